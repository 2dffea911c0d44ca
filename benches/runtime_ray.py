"""Ray as a contestant: every actor is a process of its own, so there is no local ask; calls are `ray.get`.

In flight means a list of calls and one `ray.get` for all of them: the way Ray itself measures, with less work for the
caller than one task a call.
"""

import asyncio
import os
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
import runtime_meter as meter

CROWD = 20


@ray.remote(num_cpus=0)
class Echo:
    """What is asked."""

    def echo(self, value: Any) -> Any:
        """Answers with its argument."""
        return value

    def items(self, count: int) -> Any:
        """A stream of small objects."""
        for index in range(count):
            yield (index, "token")


@ray.remote(num_cpus=0)
class EchoAsync:
    """The same, as a coroutine."""

    async def echo(self, value: Any) -> Any:
        """Answers with its argument."""
        return value


def batches(timer: meter.Meter, actor: Any, size: int) -> meter.Metrics:
    """`size` calls at once, again and again."""
    ray.get([actor.echo.remote(meter.SMALL) for _ in range(size)])
    count, cpu, begin = 0, timer.cpu(), meter.now()
    while meter.now() - begin < timer.seconds * 1e9:
        ray.get([actor.echo.remote(meter.SMALL) for _ in range(size)])
        count += size
    took = meter.now() - begin
    return {**timer.result(count, took, timer.cpu() - cpu), "ms_a_burst": took / count * size / 1e6, "failed": 0}


def spawns(timer: meter.Meter) -> meter.Metrics:
    """Actors started one after the other, each until it answers."""
    actors: list[Any] = []
    cpu, begin = timer.cpu(), meter.now()
    while len(actors) < 3 or meter.now() - begin < timer.seconds * 1e9:
        actors.append(Echo.remote())
        ray.get(actors[-1].echo.remote(meter.SMALL))
    metrics = timer.result(len(actors), meter.now() - begin, timer.cpu() - cpu)
    for actor in actors:
        ray.kill(actor)
    return metrics


def crowd(limit: float) -> meter.Metrics:
    """Memory of some actors, each with its process."""

    def total() -> float:
        return sum(map(private, meter.family(os.getpid())))

    before, begin = total(), meter.now()
    actors: list[Any] = []
    while len(actors) < CROWD and meter.now() - begin < limit * 1e9:
        actors.append(Echo.remote())
        ray.get(actors[-1].echo.remote(meter.SMALL))
    made, took = len(actors), (meter.now() - begin) / 1e9
    grown = total() - before
    return {
        "count": made,
        "bytes_each": grown * 1e6 / made,
        "rate": made / took,
        "answered": made,
        "note": f"{made} actors, {made} answered; proportional share of memory, as each is a process",
    }


def private(pid: int) -> float:
    """Proportional share of memory of a process, in MB."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) / 1000
    except OSError:
        return 0.0


async def on_thread(work: Any, *arguments: Any) -> Any:
    """Blocking work under a deadline."""
    return await asyncio.to_thread(work, *arguments)


async def main(options: Any) -> None:
    """The rows, in the order that was asked for."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    timer = meter.Meter(options.seconds, None)
    if options.rows == "idle":
        await meter.measure("idle", {"idle": timer.idle}, 60)
        ray.shutdown()
        return
    plain, coroutine = Echo.remote(), EchoAsync.remote()
    ray.get([plain.echo.remote(b""), coroutine.echo.remote(b"")])
    small, big = meter.SMALL, bytes(meter.BIG)
    # The first seconds of a cluster go into starting spare workers.
    await asyncio.sleep(2)

    def echo_big() -> None:
        assert len(ray.get(plain.echo.remote(big))) == meter.BIG

    def echo_array() -> None:
        assert ray.get(plain.echo.remote(array)).nbytes == meter.BIG

    if "echo_array" in options.rows:
        import numpy

        array = numpy.zeros(meter.BIG // 8)

    async def stream(count: int) -> Any:
        async for ref in plain.items.options(num_returns="streaming").remote(count):
            yield await ref

    rows = {
        "remote_seq": lambda: on_thread(timer.blocking, lambda: ray.get(plain.echo.remote(small))),
        "remote_seq_async": lambda: on_thread(timer.blocking, lambda: ray.get(coroutine.echo.remote(small))),
        "remote_64": lambda: on_thread(batches, timer, plain, meter.IN_FLIGHT),
        "remote_1000": lambda: on_thread(batches, timer, plain, meter.BURST),
        "stream": lambda: timer.items(stream),
        "echo_bytes": lambda: on_thread(timer.blocking, echo_big),
        "echo_array": lambda: on_thread(timer.blocking, echo_array),
        "spawn": lambda: on_thread(spawns, timer),
        "crowd": lambda: on_thread(crowd, options.crowd_seconds),
    }
    await meter.measure(options.rows, rows, 60)
    ray.shutdown()


if __name__ == "__main__":
    chosen = meter.options()
    asyncio.run(main(chosen))
