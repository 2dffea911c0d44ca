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

    __slots__ = ("_place", "callback", "key")

    def __init__(self, callback: Callable[[], None], key: int, place: dict[Timer, None]) -> None:
        self.callback = callback
        self.key = key
        self._place = place

    def cancel(self) -> None:
        """It does not matter any more."""
        self._place.pop(self, None)


class Timers:
    """Calls back at deadlines. A timer of the loop for each would cost more than the call that it guards.

    What is set waits in one dict until the earliest deadline that was heard of. Most of it is cancelled by then and
    leaves nothing behind; only the rest is sorted into slots, which last until their time. What is reached together is
    called back in the order in which it was set.
    """

    __slots__ = ("_handle", "_keys", "_loop", "_next", "_slots", "_unsorted")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unsorted: dict[Timer, None] = {}
        self._slots: dict[int, dict[Timer, None]] = {}
        self._keys: list[int] = []
        self._handle: asyncio.TimerHandle | None = None
        self._next = 0

    def __len__(self) -> int:
        """Deadlines that may still be reached, and slots."""
        return len(self._unsorted) + sum(1 + len(slot) for slot in self._slots.values())

    def at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Calls `callback` soon after the loop's time is `when`."""
        key = math.ceil(min(when, _FAR) * _PER_SECOND)
        timer = Timer(callback, key, self._unsorted)
        self._unsorted[timer] = None
        if self._handle is None or key < self._next:
            self._wait(key)
        return timer

    def _wait(self, key: int) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._next = key
        self._handle = self._loop.call_at(key / _PER_SECOND, self._fire)

    def _sort(self) -> None:
        # A dict keeps the size it once had: a fresh one for what comes.
        unsorted, self._unsorted = self._unsorted, {}
        for timer in unsorted:
            slot = self._slots.get(timer.key)
            if slot is None:
                slot = self._slots[timer.key] = {}
                heapq.heappush(self._keys, timer.key)
            slot[timer] = None
            timer._place = slot

    def _fire(self) -> None:
        self._handle = None
        self._sort()
        now = self._loop.time() * _PER_SECOND
        while self._keys:
            key = self._keys[0]
            slot = self._slots[key]
            if slot and key > now:
                break
            # The slots of messages that were answered in time are empty: nothing wakes for them.
            heapq.heappop(self._keys)
            del self._slots[key]
            for timer in list(slot):
                # One that was called back may have cancelled it.
                if timer not in slot:
                    continue
                del slot[timer]
                try:
                    timer.callback()
                except Exception:  # noqa: BLE001 - one that fails must not cost the others theirs
                    _log.exception("internal error at a deadline")
        if self._keys and (self._handle is None or self._keys[0] < self._next):
            # A callback may have set a deadline.
            self._wait(self._keys[0])
