"""Bad input gets an error that names the thing or the value, whatever the argument and whatever was given (R7)."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from runtime_util import cluster, local_system, run

import pulsing as pul
from pulsing.exceptions import PulsingError

BAD = [-1, math.nan, "", b"x", [], {}, object(), "a\0b", "\ud800", "é" * 600]
NO_NUMBER = [*BAD, True, math.inf]
ACCIDENTS = re.compile(
    r"not supported between|has no attribute|unhashable|codec can't|cannot convert|not an instance of"
)
"""How Python itself speaks of a value that nobody looked at before it was used."""


@pul.remote
class Thing:
    def get(self) -> int:
        return 1

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    what = f"{call}, {args}, {kwargs}"

    async def try_it() -> None:
        result = call(*args, **kwargs)
        if inspect.isawaitable(result):
            async with asyncio.timeout(5):
                result = await result
        pytest.fail(f"{what} gave {result!r}")

    with pytest.raises((TypeError, ValueError, PulsingError)) as caught:
        await try_it()
    assert not isinstance(caught.value, UnicodeError), what
    assert not ACCIDENTS.search(str(caught.value)), f"{what}: {caught.value}"


def test_r7_arguments_that_make_no_sense_are_refused_where_they_are_given() -> None:
    async def main() -> None:
        async with local_system() as system:
            thing = await Thing.spawn(system=system, name="thing")
            gave = system.local_actor_names()
            numbers = ("mailbox", "max_concurrency", "max_restarts", "min_backoff", "max_backoff", "restart_window")
            for bad in NO_NUMBER:
                for key in numbers:
                    await refused(pul.remote, **{key: bad})
                    await refused(system.spawn, Thing.cls, **{key: bad})
                await refused(thing.options, timeout=bad)
                await refused(thing.ask, "x", timeout=bad)
                await refused(system.resolve, "thing", timeout=bad)
                await refused(system.stop, "nobody", bad)
                await refused(system.shutdown, bad)
                await refused(pul.NodeId, bad)
            for bad in BAD:
                for key in ("public", "unique", "new_process"):
                    await refused(Thing.spawn, system=system, name="bad", **{key: bad})
                await refused(thing.options, no_wait=bad)
                await refused(Thing.spawn, system=system, name=bad)
                await refused(system.mount, Thing.cls(), bad)
                await refused(system.resolve, bad)
                await refused(system.resolve, "thing", cls=bad)
                await refused(system.resolve, "thing", node_id=bad)
                await refused(Thing.spawn, system=system, placement=bad)
                await refused(system.spawn, Thing.cls, restart_policy=bad)
                await refused(Thing.spawn, system=bad)
                await refused(system.spawn, bad)
                await refused(system.mount, bad, "bad")
                await refused(pul.watch, bad)
                await refused(pul.link, thing, bad)
                await refused(pul.propagate, bad)
                if not isinstance(bad, str):
                    await refused(system.stop, bad)
                    await refused(pul.Message, bad)
                if not isinstance(bad, bytes):
                    await refused(pul.Message, "", bad)
            # Nothing of it left a trace.
            assert system.local_actor_names() == gave
            assert await thing.get() == 1

    run(main())


def test_r5_times_beyond_any_clock_are_as_good_as_for_ever() -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            for end in (1e9, 1e19, 1e30, 1.7e308):
                near = await Thing.spawn(system=here, name="thing")
                far = await Thing.resolve("thing", system=there, timeout=end)
                for thing in (near, far):
                    assert await thing.options(timeout=end).get() == 1
                    waiting = asyncio.create_task(thing.options(timeout=end).wait())
                    await asyncio.sleep(0.01)
                    assert not waiting.done()
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                await there.stop(far, end)
                unknown = asyncio.create_task(there.resolve("nobody", timeout=end))
                await asyncio.sleep(0.01)
                assert not unknown.done()
                unknown.cancel()

    run(main())


def test_r7_what_was_given_is_named_in_a_line_however_large_it_is() -> None:
    long = "x" * 100_000
    numbers = list(range(100_000))

    async def main() -> None:
        async with cluster(1) as (system,):
            for wrong in (
                lambda: pul.spawn(numbers, system=system),
                lambda: pul.spawn(dict.fromkeys(numbers), system=system),
                lambda: Thing.spawn(system=system, placement=long),
                lambda: Thing.spawn(system=system, placement=long + ":1"),
                lambda: Thing.spawn(system=system, restart_policy=long),
                lambda: system.stop(numbers),
                lambda: system.resolve(long, timeout=0.01),
            ):
                with pytest.raises(Exception) as refused:  # noqa: PT011 - their types are told elsewhere
                    await wrong()
                assert len(str(refused.value)) < 1000, str(refused.value)[:200]
            for make in (
                lambda: pul.ActorId(long),
                lambda: pul.Message("x", numbers),
                lambda: pul.Message(numbers, b""),
            ):
                with pytest.raises((ValueError, TypeError)) as refused:
                    make()
                assert len(str(refused.value)) < 1000

    run(main())
