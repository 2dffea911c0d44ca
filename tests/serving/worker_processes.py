"""Workers in processes of their own, to be killed, stopped and woken."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from router_kit import until

from pulsing.core import ActorId, ActorRef, ActorSystem, Message, NodeId

_CODE = """
import asyncio, sys
import pulsing as pul
from router_kit import Scripted

async def main():
    node = await pul.actor_system("127.0.0.1:0", seeds=[sys.argv[1]])
    await node.spawn(Scripted(capacity=64), name="worker")
    print(node.node_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class WorkerProcess:
    """One process with one `Scripted` worker."""

    def __init__(self, process: asyncio.subprocess.Process, node_id: str) -> None:
        self.process = process
        self.node_id = node_id

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    async def load(self, node: ActorSystem) -> dict[str, int]:
        """What it says of its load, once it is known."""
        mine: list[dict[str, str]] = []

        def known() -> bool:
            found = node.core.instances("worker")
            mine[:] = [one for one in found if str(NodeId(one["node_id"])) == self.node_id]
            return bool(mine)

        await until("the worker is known", known)
        (found,) = mine
        ref = ActorRef(node, NodeId(found["node_id"]), ActorId(found["actor_id"]), "worker")
        answer: Message = await ref.ask(Message.from_json("GetLoad", {}))
        return dict(answer.to_json())


async def start(seed: str, code: str = _CODE) -> WorkerProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, seed, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    return WorkerProcess(process, line.decode().strip())


@contextlib.asynccontextmanager
async def workers(seed: str, count: int, code: str = _CODE) -> AsyncIterator[list[WorkerProcess]]:
    """`count` of them, all ended with the block."""
    started: list[WorkerProcess] = []
    try:
        for one in [start(seed, code) for _ in range(count)]:
            started.append(await one)
        yield started
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                one.wake()
                one.kill()
            await one.process.wait()
