"""Pulsing as a contestant: two processes, one node each."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import runtime_meter as meter

import pulsing as pul

CROWD = 100_000


@pul.remote
class Echo:
    """What is asked."""

    def __init__(self) -> None:
        self.told = 0

    def echo(self, value: Any) -> Any:
        """Answers with its argument, on the spot."""
        return value

    async def echo_async(self, value: Any) -> Any:
        """The same, as a coroutine."""
        return value

    def note(self, _value: Any) -> None:
        """Counts what it is told."""
        self.told += 1

    def count(self) -> int:
        """How much it was told."""
        return self.told

    async def items(self, count: int) -> AsyncIterator[tuple[int, str]]:
        """A stream of small objects."""
        for index in range(count):
            yield (index, "token")


async def serve() -> None:
    """The second process."""
    system = await pul.actor_system("127.0.0.1:0")
    await Echo.spawn(system=system, name="echo")
    meter.ready(system.addr)
    await meter.until_stdin_closes()
    await system.shutdown()


async def tells(timer: meter.Meter, proxy: Any) -> meter.Metrics:
    """Tells, counted once they have been handled."""
    before, count = await proxy.count(), 0
    cpu, begin = timer.cpu(), meter.now()
    end = begin + int(timer.seconds * 1e9)
    note = proxy.note
    while meter.now() < end:
        for _ in range(100):
            await note.tell(meter.SMALL)
        count += 100
    # An ask queues behind the tells of its sender; one is not always enough, as tells wait for room one by one.
    while await proxy.count() - before < count:
        pass
    return timer.result(count, meter.now() - begin, timer.cpu() - cpu)


async def main(options: Any) -> None:
    """The rows, in the order that was asked for."""
    wanted = set(options.rows.split(","))
    if wanted == {"idle"}:
        async with Alone() as system:
            await meter.measure("idle", {"idle": meter.Meter(options.seconds).idle}, 60)
        return
    child = meter.Child(__file__, "--serve", "--loop", options.loop)
    system = await pul.actor_system("127.0.0.1:0", seeds=[child.addr])
    timer, here_only = meter.Meter(options.seconds, [child.pid]), meter.Meter(options.seconds)
    near = await Echo.spawn(system=system)
    far = await Echo.resolve("echo", system=system, timeout=5)
    small, big = meter.SMALL, bytes(meter.BIG)

    async def echo_array() -> None:
        got = await far.echo(array)
        assert got.nbytes == meter.BIG
        assert got.flags.writeable

    async def echo_big() -> None:
        assert len(await far.echo(big)) == meter.BIG

    if wanted & {"echo_array"}:
        import numpy

        array = numpy.zeros(meter.BIG // 8)
    rows = {
        "local_seq": lambda: here_only.sequential(lambda: near.echo(small)),
        "local_seq_async": lambda: here_only.sequential(lambda: near.echo_async(small)),
        "local_64": lambda: here_only.in_flight(lambda: near.echo(small)),
        "local_64_async": lambda: here_only.in_flight(lambda: near.echo_async(small)),
        "local_tell": lambda: tells(here_only, near),
        "remote_seq": lambda: timer.sequential(lambda: far.echo(small)),
        "remote_seq_one": lambda: timer.sequential_on(1, lambda: far.echo(small)),
        "remote_seq_two": lambda: timer.sequential_on(2, lambda: far.echo(small)),
        "remote_seq_async": lambda: timer.sequential(lambda: far.echo_async(small)),
        "remote_64": lambda: timer.in_flight(lambda: far.echo(small)),
        "remote_tell": lambda: tells(timer, far),
        "remote_1000": lambda: timer.burst(lambda: far.echo_async(small)),
        "stream": lambda: timer.items(far.items),
        "echo_bytes": lambda: timer.sequential(echo_big),
        "echo_bytes_one": lambda: timer.sequential_on(1, echo_big),
        "echo_bytes_two": lambda: timer.sequential_on(2, echo_big),
        "echo_array": lambda: timer.sequential(echo_array),
        "spawn": lambda: here_only.spawns(lambda: Echo.spawn(system=system)),
        "crowd": lambda: here_only.crowd(
            lambda: Echo.spawn(system=system), lambda actor: actor.echo(small), CROWD, options.crowd_seconds
        ),
    }
    await meter.measure(options.rows, rows, 60)
    await system.shutdown()
    child.stop()


class Alone:
    """One node, joined to nothing or to a seed."""

    def __init__(self, *seeds: str) -> None:
        self.seeds = list(seeds)

    async def __aenter__(self) -> Any:
        self.system = await pul.actor_system("127.0.0.1:0", seeds=self.seeds)
        return self.system

    async def __aexit__(self, *_: object) -> None:
        await self.system.shutdown()


async def idle_member(seed: str) -> None:
    """One of the ten nodes that do nothing."""
    async with Alone(*([seed] if seed else [])) as system:
        meter.ready(system.addr)
        await meter.until_stdin_closes()


if __name__ == "__main__":
    chosen = meter.options(member="")
    if chosen.member:
        meter.run(idle_member("" if chosen.member == "first" else chosen.member), chosen.loop)
    else:
        meter.run(serve() if chosen.serve else main(chosen), chosen.loop)
    sys.exit(0)
