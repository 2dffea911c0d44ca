"""A Worker whose answer is known in advance: it counts, slowly."""

import asyncio
from collections.abc import AsyncIterator

from pulsing.serving import Delta, GenerateRequest, Usage, Worker

WORDS = 20


class CountingWorker(Worker):
    def __init__(self) -> None:
        super().__init__("counting", capacity=64)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        # What another Worker has said before it was lost is not said again.
        for number in range(len(request.continue_text.split()), WORDS):
            yield Delta(f"{number} ")
            await asyncio.sleep(0.01)
        yield Delta(finish_reason="stop", usage=Usage(1, WORDS))
