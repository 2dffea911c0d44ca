"""An event loop whose time is a network's: it jumps to the next thing that happens."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from pulsing import _core

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_REAL_PAUSE = 0.002
"""Seconds of real time between two looks while the clock is held."""
_LONGEST_JUMP = 60.0
"""Seconds of virtual time after which Python is asked again, so that Ctrl-C is heard."""


class _Selector(selectors.BaseSelector):
    """Hands the thread to the network while no descriptor is ready."""

    def __init__(self, core: _core.TestNetwork) -> None:
        self._core = core
        self._real = selectors.DefaultSelector()
        self.held = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self._core.turn()
            return self._real.select(0)
        if self.held:
            self._core.turn()
            return self._real.select(_REAL_PAUSE)
        ready = self._real.select(0)
        if not ready:
            jump = _LONGEST_JUMP if timeout is None else min(timeout, _LONGEST_JUMP)
            self._core.wait(self._core.now() + jump)
            ready = self._real.select(0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs on the clock of `core`, and lets its hosts run while Python has nothing to do."""

    def __init__(self, core: _core.TestNetwork) -> None:
        self._core = core
        self._waits = _Selector(core)
        super().__init__(self._waits)
        # The network's timers have a grain of 1 ms and its clock is read as a float: a timer that the clock has reached
        # within rounding is due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Seconds since the network began."""
        return self._core.now()

    def hold_clock(self) -> Callable[[], None]:
        """Keeps the clock from jumping, while a thread works in real time; returns what lets it go."""
        self._waits.held += 1
        over = False

        def release() -> None:
            nonlocal over
            if not over:
                over = True
                self._waits.held -= 1

        return release

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As every loop's; wakes the network too."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        self._core.wake()
        return handle

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """As every loop's; the clock stands still until `func` has returned."""
        release = self.hold_clock()
        try:
            future = super().run_in_executor(executor, func, *args)
        except BaseException:
            release()
            raise
        future.add_done_callback(lambda _: release())
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As every loop's; its threads end in real time, which no `timeout` of the network's measures."""
        release = self.hold_clock()
        try:
            await super().shutdown_default_executor()
        finally:
            release()
