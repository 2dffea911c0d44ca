"""The queue between one event loop and Rust: one reader callback, one table of who waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

from pulsing import _core
from pulsing.core._errors import from_core
from pulsing.core._timers import Timers
from pulsing.core._watchdog import LoopWatch

(
    VALUE,
    ERROR,
    STREAM_START,
    ITEM,
    END,
    INBOUND,
    CANCELLED,
    CREDIT,
    DONE,
    CHANGED,
    DISPLACED,
    ENDING,
    PLAIN,
) = range(13)

Event = tuple[Any, ...]
Handler = Callable[[Event], None]

_log = logging.getLogger("pulsing")


class LoopBridge:
    """Delivers Rust's events on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.core = _core.Bridge()
        self.handlers: dict[int, Handler] = {}
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self.timers = Timers(loop)
        self.watch = LoopWatch(loop)
        self.closed = False
        self._sentinel: AsyncGenerator[None, None] | None = None
        loop.add_reader(self.core.fileno(), self._drain)
        self._watch_loop_end()

    def token(self, handler: Handler) -> int:
        """A fresh token whose events go to `handler`, until `forget`."""
        token = self.core.token()
        self.handlers[token] = handler
        return token

    def forget(self, token: int) -> None:
        """Drops what waits for `token`; later events for it are ignored."""
        self.handlers.pop(token, None)

    async def run(self, start: Callable[[int], None], orphan: Callable[[Any], None] | None = None) -> Any:
        """Starts an operation that reports to a token, and returns its result.

        Args:
            start: Starts it, given the token.
            orphan: Takes a result that comes after the caller was cancelled.
        """
        future: asyncio.Future[Any] = self.loop.create_future()

        def done(event: Event) -> None:
            self.forget(event[1])
            if future.done():
                if orphan is not None and event[0] == DONE:
                    orphan(event[2])
                return
            if event[0] == ERROR:
                future.set_exception(from_core(event[2]))
            else:
                future.set_result(event[2])

        token = self.token(done)
        try:
            start(token)
        except BaseException:
            self.forget(token)
            raise
        try:
            return await future
        except asyncio.CancelledError:
            if orphan is None:
                self.forget(token)
            raise

    def close(self) -> None:
        """The loop ends: nothing is delivered any more."""
        if self.closed:
            return
        self.closed = True
        bridges.pop(id(self.loop), None)
        if not self.loop.is_closed():
            self.loop.remove_reader(self.core.fileno())
        self.core.close()
        self.watch.close()
        self.handlers.clear()

    def _drain(self) -> None:
        core = self.core
        try:
            self._deliver(iter(core.drain()))
        finally:
            core.flush()

    def _deliver(self, events: Iterator[Event]) -> None:
        handlers = self.handlers
        try:
            for event in events:
                handler = handlers.get(event[1])
                if handler is None:
                    if event[0] == STREAM_START and len(event) > 2:
                        self._begun(event)
                    continue
                try:
                    handler(event if event[0] != STREAM_START else self._held(event, handler))
                except Exception:  # noqa: BLE001 - one bad event must not cost the loop the others
                    if not _gave_up(handler):
                        _log.exception("internal error while delivering event %r", event[:2])
        except BaseException:
            # It ends this turn, and perhaps the program. Whoever goes on with the loop finds the others' events.
            self.loop.call_soon(self._deliver, events)
            raise

    def _held(self, event: Event, handler: Handler) -> Event:
        """Keeps what follows a stream's beginning for a caller that has not looked yet: as the event's third part."""
        if _asked(handler) is None:
            return event
        held: list[Event] = []
        self.handlers[event[1]] = held.append
        return (*event, held)

    def _begun(self, event: Event) -> None:
        """The answer to a call that `System.ask` made is a stream: as `_held`, with the call's handle."""
        kind, token, handle, future = event
        if future.done():
            # Cancelled in this very turn.
            handle.cancel()
            return
        held: list[Event] = []
        self.handlers[token] = held.append
        future.set_result((kind, token, held, handle))

    def _watch_loop_end(self) -> None:
        # A loop has no hook for its end, but `asyncio.run` closes the asynchronous generators that began in it, ours
        # last
        # of all users' tasks: that is when systems which nobody shut down leave the cluster.
        async def sentinel() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                for closer in list(self.closers):
                    try:
                        await closer()
                    except Exception:  # noqa: BLE001 - the other systems of this loop still have to leave
                        _log.exception("could not shut down an actor system at the end of its loop")
                self.close()

        self._sentinel = sentinel()
        with contextlib.suppress(StopIteration):
            self._sentinel.asend(None).send(None)


def _asked(handler: Handler) -> asyncio.Future[Event] | None:
    """The future that a handler sets, if it does that only: a caller waits for the first event of its call."""
    future = getattr(handler, "__self__", None)
    return future if isinstance(future, asyncio.Future) else None


def _gave_up(handler: Handler) -> bool:
    """Whether a caller was cancelled in this very turn, and has not forgotten its token yet."""
    future = _asked(handler)
    return future is not None and future.cancelled()


bridges: dict[int, LoopBridge] = {}
"""The bridge of each loop that has one, by the loop's `id`."""


def bridge_of(loop: asyncio.AbstractEventLoop) -> LoopBridge:
    """The bridge of the running loop, made at its first use."""
    bridge = bridges.get(id(loop))
    if bridge is not None and bridge.loop is loop and not bridge.closed:
        return bridge
    for other in list(bridges.values()):
        if other.loop.is_closed():
            other.close()
    bridge = bridges[id(loop)] = LoopBridge(loop)
    return bridge
