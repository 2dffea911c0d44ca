"""Workers whose answer is known in advance: they count, slowly. On SIGUSR1 each writes down how many tasks it has."""

import asyncio
import os
import pathlib
import signal
from collections.abc import AsyncIterator
from typing import Any

from pulsing.serving import Delta, EngineWorker, GenerateRequest, Usage, Worker

WORDS = 20
PAUSE = 0.01
# Folder for the counts of tasks: one file a process, named by its id.
TASKS = "PULSING_CHAOS_TASKS"


def tell_tasks() -> None:
    """Begins to answer the signal, on the loop that runs."""
    folder = pathlib.Path(os.environ[TASKS])

    def tell() -> None:
        part = folder / f"{os.getpid()}.part"
        part.write_text(str(len(asyncio.all_tasks())))
        part.replace(folder / str(os.getpid()))

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)


class CountingWorker(Worker):
    continues = "greedy"

    def __init__(self) -> None:
        super().__init__("counting", capacity=64)
        self.fingerprint = "counting"

    async def load(self) -> None:
        tell_tasks()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        # What another Worker has said before it was lost is not said again.
        first = len(request.continue_tokens)
        for number in range(first, WORDS):
            yield Delta(f"{number} ", token_ids=(number,))
            await asyncio.sleep(PAUSE)
        yield Delta(finish_reason="stop", usage=Usage(1, WORDS - first))


class CountingEngineWorker(EngineWorker):
    def on_start(self, actor_id: Any) -> None:
        super().on_start(actor_id)
        tell_tasks()
