"""xoscar as a contestant: the caller is in a pool's main process, the callee there (local) or in a sub-pool."""

from collections.abc import AsyncIterator
from typing import Any

import runtime_meter as meter
import xoscar
from xoscar.backends.allocate_strategy import ProcessIndex

CROWD = 100_000


class Echo(xoscar.Actor):
    """What is asked."""

    def __init__(self) -> None:
        super().__init__()
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

    @xoscar.generator
    async def items(self, count: int) -> AsyncIterator[tuple[int, str]]:
        """A stream of small objects."""
        return tokens(count)


async def tokens(count: int) -> AsyncIterator[tuple[int, str]]:
    """Small objects."""
    for index in range(count):
        yield (index, "token")


async def tells(timer: meter.Meter, ref: Any) -> meter.Metrics:
    """Tells, counted once they have been handled."""
    before, count = await ref.count(), 0
    cpu, begin = timer.cpu(), meter.now()
    while meter.now() - begin < timer.seconds * 1e9:
        for _ in range(100):
            await ref.note.tell(meter.SMALL)
        count += 100
    while await ref.count() - before < count:
        pass
    return timer.result(count, meter.now() - begin, timer.cpu() - cpu)


async def main(options: Any) -> None:
    """The rows, in the order that was asked for."""
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    address = pool.external_address
    timer = meter.Meter(options.seconds, None)
    if options.rows == "idle":
        await meter.measure("idle", {"idle": timer.idle}, 60)
        await pool.stop()
        return
    near = await xoscar.create_actor(Echo, address=address, uid="near", allocate_strategy=ProcessIndex(0))
    far = await xoscar.create_actor(Echo, address=address, uid="far", allocate_strategy=ProcessIndex(1))
    assert near.address != far.address
    small, big = meter.SMALL, bytes(meter.BIG)
    numbers = iter(range(10**9))

    async def spawn() -> Any:
        return await xoscar.create_actor(
            Echo, address=address, uid=f"made-{next(numbers)}", allocate_strategy=ProcessIndex(0)
        )

    async def items(count: int) -> AsyncIterator[Any]:
        async for item in await far.items(count):
            yield item

    async def echo_big() -> None:
        assert len(await far.echo(big)) == meter.BIG

    async def echo_array() -> None:
        assert (await far.echo(array)).nbytes == meter.BIG

    if "echo_array" in options.rows:
        import numpy

        array = numpy.zeros(meter.BIG // 8)

    async def ask_far() -> Any:
        return await far.echo_async(small)

    rows = {
        "local_seq": lambda: timer.sequential(lambda: near.echo(small)),
        "local_seq_async": lambda: timer.sequential(lambda: near.echo_async(small)),
        "local_64": lambda: timer.in_flight(lambda: near.echo(small)),
        "local_64_async": lambda: timer.in_flight(lambda: near.echo_async(small)),
        "local_tell": lambda: tells(timer, near),
        "remote_seq": lambda: timer.sequential(lambda: far.echo(small)),
        "remote_seq_async": lambda: timer.sequential(lambda: far.echo_async(small)),
        "remote_64": lambda: timer.in_flight(lambda: far.echo(small)),
        "remote_1000": lambda: timer.burst(ask_far),
        "stream": lambda: timer.items(items),
        "echo_bytes": lambda: timer.sequential(echo_big),
        "echo_array": lambda: timer.sequential(echo_array),
        "spawn": lambda: timer.spawns(spawn),
        "crowd": lambda: timer.crowd(spawn, lambda actor: actor.echo(small), CROWD, options.crowd_seconds),
    }
    await meter.measure(options.rows, rows, 60)
    await pool.stop()


if __name__ == "__main__":
    chosen = meter.options()
    meter.run(main(chosen), chosen.loop)
