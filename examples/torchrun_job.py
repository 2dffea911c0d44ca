"""The ranks of a torchrun job as nodes: torchrun --nproc-per-node 2 examples/torchrun_job.py (needs torch)."""

import asyncio
import os

import pulsing as pul

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@pul.remote
class Rank:
    def greet(self, who: int) -> str:
        return f"rank {RANK} greets rank {who}"


@pul.remote
class Job:
    """On rank 0: tells the others when it is over, so that nobody leaves while somebody else still asks."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def end(self) -> None:
        await self.ended.wait()

    def finish(self) -> None:
        self.ended.set()


async def main() -> None:
    await pul.init_inside_torchrun()
    await Rank.spawn(name=f"rank/{RANK}")
    if RANK == 0:
        job = await Job.spawn(name="job")
        for other in range(WORLD):
            rank = await pul.resolve(f"rank/{other}", cls=Rank, timeout=30)
            print(await rank.greet(RANK), flush=True)
        await job.finish()
    else:
        job = await pul.resolve("job", cls=Job, timeout=30)
        await job.end.options(timeout=None)()
    await pul.shutdown()


asyncio.run(main())
