"""The peer wheel, pulsing 0.1.2, as a contestant: two processes, one node each.

Its plain methods cannot be called on another node (the reply is not decoded), so all calls between processes use
coroutine methods.
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import runtime_meter as meter

import pulsing as pul

CROWD = 100_000


@pul.remote
class Echo:
    """What is asked."""

    def echo(self, value: Any) -> Any:
        """Answers with its argument, on the spot."""
        return value

    async def echo_async(self, value: Any) -> Any:
        """The same, as a coroutine."""
        return value

    async def items(self, count: int) -> AsyncIterator[tuple[int, str]]:
        """A stream of small objects."""
        for index in range(count):
            yield (index, "token")


class Ear(pul.Actor):
    """What is told."""

    def __init__(self) -> None:
        self.told = 0

    async def receive(self, msg: Any) -> Any:
        """Counts; answers how often when asked."""
        if msg == "count":
            return self.told
        self.told += 1
        return None


async def serve() -> None:
    """The second process."""
    system = await pul.actor_system("127.0.0.1:0")
    await Echo.local(system, name="echo", public=True)
    meter.ready(str(system.addr))
    await meter.until_stdin_closes()
    await system.shutdown()


async def tells(timer: meter.Meter, ear: Any) -> meter.Metrics:
    """Tells, counted once they have been handled."""
    before, count = await ear.ask("count"), 0
    cpu, begin = timer.cpu(), meter.now()
    while meter.now() - begin < timer.seconds * 1e9:
        for _ in range(100):
            await ear.tell(meter.SMALL)
        count += 100
    while await ear.ask("count") - before < count:
        pass
    return timer.result(count, meter.now() - begin, timer.cpu() - cpu)


async def main(options: Any) -> None:
    """The rows, in the order that was asked for."""
    wanted = set(options.rows.split(","))
    if wanted == {"idle"}:
        system = await pul.actor_system("127.0.0.1:0")
        await meter.measure("idle", {"idle": meter.Meter(options.seconds).idle}, 60)
        await system.shutdown()
        return
    child = meter.Child(__file__, "--serve", "--loop", options.loop)
    system = await pul.actor_system("127.0.0.1:0", seeds=[child.addr])
    timer, here_only = meter.Meter(options.seconds, [child.pid]), meter.Meter(options.seconds)
    near = await Echo.local(system)
    ear = await system.spawn(Ear(), name="local/ear", public=False)
    far = await Echo.resolve("echo", system=system, timeout=10)
    small, big = meter.SMALL, bytes(meter.BIG)

    async def echo_big() -> None:
        assert len(await far.echo_async(big)) == meter.BIG

    async def echo_array() -> None:
        assert (await far.echo_async(array)).nbytes == meter.BIG

    if "echo_array" in wanted:
        import numpy

        array = numpy.zeros(meter.BIG // 8)

    async def far_plain() -> None:
        assert await far.echo(small) == small

    rows = {
        "local_seq": lambda: here_only.sequential(lambda: near.echo(small)),
        "local_seq_async": lambda: here_only.sequential(lambda: near.echo_async(small)),
        "local_64": lambda: here_only.in_flight(lambda: near.echo(small)),
        "local_64_async": lambda: here_only.in_flight(lambda: near.echo_async(small)),
        "local_tell": lambda: tells(here_only, ear),
        "remote_seq": lambda: timer.sequential(far_plain),
        "remote_seq_async": lambda: timer.sequential(lambda: far.echo_async(small)),
        "stream": lambda: timer.items(far.items),
        "echo_bytes": lambda: timer.sequential(echo_big),
        "echo_array": lambda: timer.sequential(echo_array),
        "spawn": lambda: here_only.spawns(lambda: Echo.local(system)),
        "crowd": lambda: here_only.crowd(
            lambda: Echo.local(system), lambda actor: actor.echo(small), CROWD, options.crowd_seconds
        ),
        # Last: calls fail for everyone once a dozen are under way.
        "remote_64": lambda: timer.in_flight(lambda: far.echo_async(small)),
        "remote_1000": lambda: timer.burst(lambda: call(far.echo_async, small)),
    }
    await meter.measure(options.rows, rows, 12)
    await system.shutdown()
    child.stop()


async def call(method: Any, value: Any) -> Any:
    """A coroutine of what is only awaitable."""
    return await method(value)


if __name__ == "__main__":
    chosen = meter.options()
    meter.run(serve() if chosen.serve else main(chosen), chosen.loop)
    sys.exit(0)
