"""What it costs to ask Rust for something and be woken with the answer: one of two libraries, in one process.

``--library pulsing``: this tree's bridge, asked for a name it knows. ``--library pyo3``: pyo3-async-runtimes, asked for
nothing at all (`pyo3_async/`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import runtime_meter as meter

GATHERED = 100


async def gathered(timer: meter.Meter, call: Callable[[], Awaitable[Any]]) -> meter.Metrics:
    """`GATHERED` completions at once, again and again."""
    await asyncio.gather(*(call() for _ in range(GATHERED)))
    count, cpu, begin = 0, timer.cpu(), meter.now()
    while meter.now() - begin < timer.seconds * 1e9:
        await asyncio.gather(*(call() for _ in range(GATHERED)))
        count += GATHERED
    return timer.result(count, meter.now() - begin, timer.cpu() - cpu)


async def measured(options: Any, call: Callable[[], Awaitable[Any]]) -> None:
    """Both rows."""
    timer = meter.Meter(options.seconds)
    rows = {
        "completion_seq": lambda: timer.sequential(call),
        "completion_100": lambda: gathered(timer, call),
    }
    await meter.measure(options.rows, rows, 60)


async def pulsing_bridge(options: Any) -> None:
    """Ours."""
    import pulsing as pul
    from pulsing.core._bridge import bridge_of

    class Named(pul.Actor):
        """Has a name to ask for."""

    system = await pul.actor_system("127.0.0.1:0")
    await system.spawn(Named(), name="named", public=True)
    loop = asyncio.get_running_loop()
    bridge, core = bridge_of(loop), system.core

    def call() -> Awaitable[Any]:
        # A future, as the library returns one: a coroutine would be charged for its task in `gather`.
        future = loop.create_future()

        def done(event: Any) -> None:
            bridge.forget(event[1])
            future.set_result(event[2])

        core.resolve(bridge.core, bridge.token(done), "named", None, 1.0)
        return future

    assert await call()
    await measured(options, call)
    await system.shutdown()


async def pyo3_async(options: Any) -> None:
    """The library."""
    import pyo3_async_bench

    await measured(options, pyo3_async_bench.nothing)


if __name__ == "__main__":
    chosen = meter.options(library="pulsing")
    meter.run((pulsing_bridge if chosen.library == "pulsing" else pyo3_async)(chosen), chosen.loop)
