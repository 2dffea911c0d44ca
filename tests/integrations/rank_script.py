"""What each rank of a test's job runs: python rank_script.py SCENARIO OUT. Lines of JSON in OUT say what it saw."""

import asyncio
import json
import os
import pathlib
import signal
import sys
import time

import pulsing as pul
from pulsing.exceptions import PulsingError

OUT = pathlib.Path(sys.argv[2])


def say(**what: object) -> None:
    line = json.dumps({"rank": int(os.environ.get("RANK", "-1")), "pid": os.getpid(), **what}) + "\n"
    with OUT.open("a") as out:
        out.write(line)


def all_wrote(life: str | None = None) -> None:
    """Waits until every rank has written what it saw, in this life of the job, and so needs nobody any more."""
    deadline = time.monotonic() + 30
    while True:
        rows = [json.loads(line) for line in OUT.read_text().splitlines()]
        if len({row["rank"] for row in rows if row.get("restart") == life}) == int(os.environ["WORLD_SIZE"]):
            return
        assert time.monotonic() < deadline, f"not all have written: {rows}"
        time.sleep(0.02)


@pul.remote
class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def number(self) -> int:
        return self.rank


async def call_all(rank: int, world: int) -> list[int]:
    await Rank.spawn(rank, name=f"rank/{rank}")
    return [await (await pul.resolve(f"rank/{one}", cls=Rank, timeout=30)).number() for one in range(world)]


async def join(system: pul.ActorSystem, **more: object) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say(
        cluster=system.config.cluster,
        secret=system.config.passphrase is not None,
        restart=os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        members=len(await system.members()),
        heard=await call_all(rank, world),
        **more,
    )


async def before_and_after() -> None:
    """Joins before torch's own group exists and again after; the store is the same one."""
    import torch.distributed as dist

    await join(await pul.init_inside_torchrun(), when="before")
    # In threads: collectives block, and others may still be calling this rank's actor.
    await asyncio.to_thread(dist.init_process_group, "gloo")
    await asyncio.to_thread(dist.barrier)
    await pul.shutdown()
    await join(await pul.init_inside_torchrun(), when="after")
    again = await pul.init_inside_torchrun()
    assert again is pul.get_system()
    await asyncio.to_thread(dist.barrier)
    await pul.shutdown()
    dist.destroy_process_group()


async def one_dies() -> None:
    """In the job's first life rank 1 is killed when all have joined."""
    await join(await pul.init_inside_torchrun())
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    await asyncio.to_thread(all_wrote, life)
    if life == "0":
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
    await pul.shutdown()


async def through_the_group() -> None:
    """There is no store that others could look up: the ranks met through a file."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group("gloo", init_method=f"file://{OUT}.group", rank=rank, world_size=world)
    system = await pul.init_inside_torchrun()
    os.environ.update(hidden)
    await join(system)
    await asyncio.to_thread(dist.barrier)
    await pul.shutdown()
    dist.destroy_process_group()


async def rank_0_fails() -> None:
    """Rank 0 cannot listen where it is told to."""
    began = time.monotonic()
    addr = os.environ["TAKEN"] if os.environ["RANK"] == "0" else None
    try:
        await pul.init_inside_torchrun(addr=addr)
    except PulsingError as error:
        say(error=type(error).__name__, text=str(error), took=time.monotonic() - began)


async def one_does_not_call() -> None:
    if os.environ["RANK"] == "0":
        try:
            await pul.init_inside_torchrun(join_timeout=2.0)
        except PulsingError as error:
            say(error=type(error).__name__, text=str(error), running=pul.is_initialized())


def bootstrapped() -> None:
    """Code without an event loop, which does not say where it runs."""
    ready = pul.bootstrap(wait_timeout=60)
    system = pul.get_system()
    secret = system.config.passphrase is not None
    say(ready=ready, cluster=system.config.cluster, secret=secret, members=len(pul.sync.run(system.members)))
    all_wrote()
    pul.bootstrap.stop()


if __name__ == "__main__":
    scenario = globals()[sys.argv[1]]
    if asyncio.iscoroutinefunction(scenario):
        asyncio.run(scenario())
    else:
        scenario()
