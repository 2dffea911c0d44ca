"""Deadlines of requests, under one timer: nearly every request is over long before its own, and a timer for each would
cost a fast engine more than the rest of its request.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

__all__ = ["Deadlines", "Limit"]

# Between two looks at the requests, in seconds: as exact as deadlines are, and what many short ones may cost.
_LOOK = 0.01


class Deadlines:
    """Cancels what runs for longer than it may."""

    __slots__ = ("_limits", "_look_at", "_loop", "_timer")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0

    def within(self, seconds: float | None, task: asyncio.Task[Any] | None = None) -> Limit:
        """A context that ends with a TimeoutError if it lasts for longer than `seconds`; None: for as long as it likes.

        For the task that enters it, as ``asyncio.timeout`` is: `task`, for who knows it already.
        """
        return Limit(self, seconds, task)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of all that is looked after: the one that ran when it was asked for first."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def watch(self, limit: Limit) -> None:
        """Looks after one from now on."""
        self._limits.add(limit)
        if self._timer is None or limit.due < self._look_at:
            self._arm(limit.due)

    def leave(self, limit: Limit) -> None:
        """Looks after it no longer."""
        self._limits.discard(limit)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = due
        self._timer = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self.loop.time()
        for limit in [limit for limit in self._limits if limit.due <= now]:
            self._limits.discard(limit)
            limit.expire()
        if self._limits:
            self._arm(max(now + _LOOK, min(limit.due for limit in self._limits)))


class Limit:
    """One deadline; see :meth:`Deadlines.within`."""

    __slots__ = ("_cancelling", "_deadlines", "_expired", "_seconds", "_task", "due")

    due: float
    """When it is up, on the loop's clock."""

    def __init__(self, deadlines: Deadlines, seconds: float | None, task: asyncio.Task[Any] | None) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._task = task
        self._cancelling = 0
        self._expired = False

    def __enter__(self) -> None:
        if self._seconds is None:
            self._task = None
            return
        loop = self._deadlines.loop
        task = self._task = self._task or asyncio.current_task(loop)
        assert task is not None  # requests run in tasks
        self._cancelling = task.cancelling()
        self.due = loop.time() + self._seconds
        self._deadlines.watch(self)

    def expire(self) -> None:
        """Its time is up."""
        if self._task is not None:
            self._expired = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        if not self._expired:
            self._deadlines.leave(self)
        # Cancelled by somebody else as well, it is cancelled.
        elif task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error
