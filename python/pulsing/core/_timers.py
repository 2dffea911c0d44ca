"""Deadlines of one loop: many are set, few are reached."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import Callable

_log = logging.getLogger("pulsing")

_PER_SECOND = 64
"""Slots a second: a deadline is noticed up to 16 ms late, and all of one slot share a timer of the loop."""


_FAR = 1e10
"""Loop time that is not reached, in seconds: loops take no timer that is much later."""


class Timer:
    """One deadline that may still be reached."""

    __slots__ = ("_slot", "callback")

    def __init__(self, callback: Callable[[], None], slot: set[Timer]) -> None:
        self.callback = callback
        self._slot = slot

    def cancel(self) -> None:
        """It does not matter any more."""
        self._slot.discard(self)


class Timers:
    """Calls back at deadlines. A timer of the loop for each would cost more than the call that it guards."""

    __slots__ = ("_handle", "_keys", "_loop", "_next", "_slots")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Timer]] = {}
        self._keys: list[int] = []
        self._handle: asyncio.TimerHandle | None = None
        self._next = 0

    def at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls `callback` soon after the loop's time is `when`."""
        key = math.ceil(min(when, _FAR) * _PER_SECOND)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = set()
            heapq.heappush(self._keys, key)
            if self._handle is None or key < self._next:
                self._wait()
        timer = Timer(callback, slot)
        slot.add(timer)
        return timer

    def _wait(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._next = self._keys[0]
        self._handle = self._loop.call_at(self._next / _PER_SECOND, self._fire)

    def _fire(self) -> None:
        self._handle = None
        now = self._loop.time() * _PER_SECOND
        while self._keys:
            key = self._keys[0]
            slot = self._slots[key]
            if slot and key > now:
                break
            # The slots of messages that were answered in time are empty: nothing wakes for them.
            heapq.heappop(self._keys)
            del self._slots[key]
            while slot:
                try:
                    slot.pop().callback()
                except Exception:  # noqa: BLE001 - one that fails must not cost the others theirs
                    _log.exception("internal error at a deadline")
        if self._keys:
            self._wait()
