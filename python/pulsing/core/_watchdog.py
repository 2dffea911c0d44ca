"""Tells what blocks an event loop (R12).

A thread looks at the stack of each loop's thread: a loop that waits for events is left alone, one that does something
is asked for a sign of life, and if none comes in time, what it does is logged. Looked at are loops that run handlers or
have done so within the last second; all others sleep undisturbed, and so does the thread.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType

_log = logging.getLogger("pulsing")

LIMIT = 0.1
"""Seconds without a sign of life after which a loop counts as blocked, unless its system says otherwise."""
_TICK = 0.02
"""Seconds between two looks at a loop that does something; one that waits is looked at half as often."""
_LINGER = 1.0
"""Seconds for which a loop is looked at after its last handler has ended."""
_STACK = 30
"""Innermost frames that are logged."""


class LoopWatch:
    """One loop, as the watchdog sees it."""

    __slots__ = (
        "_active",
        "_asked",
        "_base",
        "_loop",
        "_reported",
        "_starved",
        "_thread",
        "_tid",
        "asleep",
        "limit",
        "running",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._tid = threading.get_native_id()
        self._starved = 0.0
        self.limit = LIMIT
        self.running = 0
        """Handlers that have begun and not ended."""
        self.asleep = True
        """Whether nobody looks: who begins a handler calls `wake`."""
        self._active = 0.0
        self._asked: float | None = None
        self._reported = False
        self._base: FrameType | None = None

    def wake(self) -> None:
        """Something is about to run: look at the loop from now on."""
        self.asleep = False
        self._active = time.monotonic()
        if self._base is None:
            self._loop.call_soon(self._alive)
        _watchdog.add(self)

    def close(self) -> None:
        """The loop ends."""
        self.asleep = True
        self._base = None
        _watchdog.remove(self)

    def _alive(self) -> None:
        # uvloop's own code has no frames: while it waits, the innermost is the one that runs the loop, which called us.
        self._base = sys._getframe().f_back
        self._asked = None
        self._reported = False

    def look(self, now: float) -> float | None:
        """Reports the loop if it is blocked. Returns seconds until the next look; None: not until it is woken."""
        top = sys._current_frames().get(self._thread)
        if top is None or self._loop.is_closed():
            return None
        if self._asked is not None:
            self._active = now
            # What waited for a core meanwhile did not block the loop: others did.
            if not self._reported and now - self._asked - (_starved(self._tid) - self._starved) >= self.limit:
                self._reported = True
                _report(top, self.limit)
            return _TICK
        if top is self._base or top.f_globals.get("__name__") == "selectors":
            if self.running == 0 and now - self._active > _LINGER:
                return None
            return 2 * _TICK
        self._active = self._asked = now
        self._starved = _starved(self._tid)
        try:
            self._loop.call_soon_threadsafe(self._alive)
        except RuntimeError:
            return None  # closed in between
        return _TICK


def _starved(tid: int) -> float:
    """Seconds for which a thread has been ready to run without a core; 0 where the system (not Linux) does not tell."""
    try:
        with open(f"/proc/self/task/{tid}/schedstat", "rb") as told:
            return int(told.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class _Watchdog:
    """The thread that looks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[LoopWatch] = set()
        self._thread: threading.Thread | None = None

    def add(self, watch: LoopWatch) -> None:
        with self._changed:
            self._watched.add(watch)
            if self._thread is None:
                # A daemon: it must not keep the interpreter from exiting (R13).
                self._thread = threading.Thread(target=self._run, name="pulsing-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, watch: LoopWatch) -> None:
        with self._changed:
            self._watched.discard(watch)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                watched = list(self._watched)
            now = time.monotonic()
            pause = 2 * _TICK
            for watch in watched:
                again = watch.look(now)
                if again is not None:
                    pause = min(pause, again)
                    continue
                with self._changed:
                    if watch.running == 0:
                        watch.asleep = True
                        self._watched.discard(watch)
            time.sleep(pause)


_watchdog = _Watchdog()


def _report(top: FrameType, limit: float) -> None:
    from pulsing.core._delivery import Delivery

    what = "the event loop is blocked"
    frame: FrameType | None = top
    while frame is not None:
        if frame.f_globals.get("__name__") == "pulsing.core._handlers":
            d = frame.f_locals.get("d")
            if isinstance(d, Delivery):
                what = f"{d.cell.label}.{d.spec.name} blocks the event loop"
                break
        frame = frame.f_back
    stack = "".join(traceback.format_list(traceback.extract_stack(top, limit=_STACK))).rstrip()
    _log.warning(
        "%s for more than %.0f ms: make it async, or mark it @pul.blocking; it is here:\n%s", what, limit * 1000, stack
    )
