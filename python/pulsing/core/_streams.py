"""The consumer's end of a stream: credit, idle limit, prompt abandonment (R5, R6)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from pulsing.core._bridge import bridge_of
from pulsing.exceptions import PulsingTimeoutError

WINDOW = 64
"""Items that may be under way before the consumer takes one."""


class StreamReader:
    """Items of a stream, in order.

    Use it in ``async for``; whoever leaves the loop early calls `aclose` (or uses ``async with``), or just drops the
    object:
    either way the producer's ``finally`` runs promptly.
    """

    __slots__ = (
        "__weakref__",
        "_abandon",
        "_ended",
        "_error",
        "_grant",
        "_idle",
        "_items",
        "_loop",
        "_over",
        "_taken",
        "_waiter",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        grant: Callable[[int], None],
        abandon: Callable[[], asyncio.Task[None] | None],
        idle: float | None = None,
    ) -> None:
        self._loop = loop
        self._grant = grant
        self._abandon: Callable[[], asyncio.Task[None] | None] | None = abandon
        self._idle = idle
        self._items: deque[Any] = deque()
        self._taken = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._over: Callable[[], object] | None = None

    def push(self, item: Any) -> None:
        """The producer's next item."""
        self._items.append(item)
        self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        """The producer's end."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._abandon = None
            self._wake()
            over, self._over = self._over, None
            if over is not None:
                over()

    def when_over(self, over: Callable[[], object]) -> None:
        """Calls `over` once, on the loop, when nothing more is sent: the producer ended, or the reader gave up."""
        if self._ended:
            over()
        else:
            self._over = over

    @property
    def buffered(self) -> bool:
        """Whether the next item has arrived already."""
        return bool(self._items)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("this stream is being read by another task already")
            await self._wait()
        item = self._items.popleft()
        self._taken += 1
        # Half a window at a time: one grant for many items, and the producer never runs dry.
        if self._taken * 2 >= WINDOW and not self._ended:
            taken, self._taken = self._taken, 0
            self._grant(taken)
        return item

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        timer = None
        if self._idle is not None:
            timer = bridge_of(self._loop).timers.at(self._loop.time() + self._idle, self._expire)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        abandon = self._abandon
        limit = self._idle or 0.0
        self.finish(PulsingTimeoutError("the next item of a stream (its idle limit)", round(limit * 1000)))
        if abandon is not None:
            abandon()

    async def aclose(self) -> None:
        """Gives up the rest of the stream and ends its producer; idempotent."""
        abandon = self._abandon
        self._items.clear()
        self.finish()
        self._error = None
        if abandon is not None:
            ending = abandon()
            if ending is not None:
                await asyncio.wait([ending])

    def cancel(self) -> None:
        """`aclose` without waiting for the producer's end."""
        abandon = self._abandon
        self._items.clear()
        self.finish()
        self._error = None
        if abandon is not None:
            abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a stream travels as an argument of its own, not inside other objects")

    def __del__(self) -> None:
        abandon = getattr(self, "_abandon", None)
        if abandon is not None and not self._loop.is_closed():
            # A finaliser may run on any thread, inside any callback.
            self._loop.call_soon_threadsafe(abandon)
            if self._over is not None:
                self._loop.call_soon_threadsafe(self._over)
