"""What blocks an event loop is told, once, with where it does it (R12); a loop that waits is left alone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from runtime_util import Run, eventually, local_system

import pulsing as pul
from pulsing.core._bridge import bridge_of
from pulsing.core._watchdog import LoopWatch


def stall() -> None:
    time.sleep(0.5)


@pul.remote
class Blocker:
    def at_once(self) -> None:
        stall()

    async def in_its_first_step(self) -> None:
        stall()

    async def between_awaits(self) -> None:
        await asyncio.sleep(0.01)
        stall()
        await asyncio.sleep(0.01)

    async def suspend(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]


@pytest.mark.parametrize("method", ["at_once", "in_its_first_step", "between_awaits"])
def test_r12_what_blocks_the_loop_is_told_once_by_name_and_stack(
    run: Run, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async def main() -> None:
        async with local_system() as system:
            blocker = await Blocker.spawn(system=system, name="blocker")
            with caplog.at_level(logging.WARNING, logger="pulsing"):
                await getattr(blocker, method)()
            (message,) = told(caplog)
            assert message.startswith(f"blocker.{method} blocks the event loop")
            assert "in stall\n    time.sleep(0.5)" in message
            caplog.clear()
            # A turn of the loop: what follows is another stall.
            await asyncio.sleep(0.01)
            with caplog.at_level(logging.WARNING, logger="pulsing"):
                await getattr(blocker, method)()
            assert len(told(caplog)) == 1

    run(main())


def test_r12_a_callback_that_blocks_is_told_too(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local_system() as system:
            blocker = await Blocker.spawn(system=system, name="blocker")
            with caplog.at_level(logging.WARNING, logger="pulsing"):
                asyncio.get_running_loop().call_later(0.05, stall)
                await blocker.suspend(0.1)
            (message,) = told(caplog)
            assert message.startswith("the event loop is blocked")
            assert "in stall" in message

    run(main())


def test_r12_a_loop_that_waits_is_left_alone(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with local_system() as system:
            loop = asyncio.get_running_loop()
            watch = bridge_of(loop).watch
            blocker = await Blocker.spawn(system=system, name="blocker")
            await blocker.suspend(0)
            assert not watch.asleep
            looks: list[int] = []
            disturbed: list[Any] = []
            look, wake = LoopWatch.look, loop.call_soon_threadsafe

            def counted_look(self: LoopWatch, now: float) -> float | None:
                looks.append(len(disturbed))
                return look(self, now)

            def counted_wake(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
                disturbed.append(callback)
                return wake(callback, *args, **kwargs)

            monkeypatch.setattr(LoopWatch, "look", counted_look)
            monkeypatch.setattr(loop, "call_soon_threadsafe", counted_wake)
            handler = asyncio.create_task(blocker.suspend(60))
            # A thread polls, so that the loop has nothing to do meanwhile.
            await asyncio.to_thread(wait_until, lambda: len(looks) > 10)
            # It may have been seen at work, before it began to wait.
            assert looks[-1] - looks[5] == 0
            assert not watch.asleep
            handler.cancel()
            await eventually("nobody looks any more", lambda: watch.asleep)
            assert told(caplog) == []

    run(main())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
