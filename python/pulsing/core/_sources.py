"""The caller's end of a stream in a call's arguments: the iterator it keeps, and the task that sends its items."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from pulsing import _core
from pulsing.core._bridge import INBOUND, LoopBridge
from pulsing.core._context import CallContext, current
from pulsing.core._errors import from_core
from pulsing.core._ids import ActorId
from pulsing.core._propagate import traceparent
from pulsing.core._reply import LocalReply, RemoteReply, Reply
from pulsing.core._streams import StreamReader
from pulsing.core.messaging import Message, StreamMessage
from pulsing.exceptions import CallCancelledError, PulsingError, PulsingRuntimeError

if TYPE_CHECKING:
    from pulsing.core._bridge import Event
    from pulsing.core._system import ActorSystem

_log = logging.getLogger("pulsing")

_TURN = 32
"""Items of a sync generator between two turns of the event loop."""

END: Any = object()
"""What `Source.step`'s function returns after the last item."""


class Source:
    """An iterator among the arguments of one call.

    Args:
        system: The system that calls.
        bridge: Of the loop that calls; the iterator runs there, in a copy of the caller's context.
        value: The iterator, or a message with a streamed body.
        what: The method that is called, for messages.
    """

    __slots__ = (
        "_bridge",
        "_claimed",
        "_context",
        "_desk",
        "_ended",
        "_iterator",
        "_key",
        "_sending",
        "_system",
        "_task",
        "_what",
        "msg_type",
    )

    def __init__(self, system: ActorSystem, bridge: LoopBridge, value: Any, what: str) -> None:
        self._system = system
        self._bridge = bridge
        self._what = what
        self._context = copy_context()
        self.msg_type: str | None = None
        """Type of the message whose body the items are; None for bare items."""
        if isinstance(value, StreamMessage):
            self.msg_type = value.msg_type
            value = value._writer._iterate()
        elif isinstance(value, Message):
            self.msg_type = value.msg_type
            value = value.stream_reader()
        self._iterator: Any = value if inspect.isgenerator(value) else aiter(value)
        self._task: asyncio.Task[None] | None = None
        self._claimed = False
        self._sending = False
        """Whether the task has run its first step."""
        self._ended = False
        """The call is over, or the reader has gone."""
        self._desk: Desk | None = None
        self._key = 0

    def offer(self) -> tuple[bytes, int]:
        """Makes the items available to other nodes: the actor to ask for them, and the key to ask with."""
        self._desk = Desk.of(self._system, self._bridge)
        self._key = self._desk.add(self)
        return self._desk.id.raw, self._key

    @property
    def idle_limit(self) -> float | None:
        """Seconds within which each item has to come; None for ever."""
        return self._system.config.stream_idle

    # -- readers ------------------------------------------------------------------------------------------------------

    async def open(self) -> StreamReader:
        """The reader's end, for a callee on this loop.

        Raises:
            CallCancelledError: The call is over.
            PulsingRuntimeError: Somebody reads it already.
        """
        self._claim()
        context = current.get()
        sink = _LocalSink(self._bridge.loop, self._system.debug_copy)
        sink.source = self
        sink.start()
        self._system.counts.streams += 1
        reader: StreamReader = sink.take()
        self._begin(sink, () if context is None else context.chain_now())
        return reader

    def serve(self, call: _core.InboundCall) -> None:
        """Sends the items to a callee elsewhere."""
        reply = RemoteReply(self._bridge, call)
        try:
            self._claim()
        except PulsingError as error:
            reply.error(error)
            return

        def cancelled(_: Event) -> None:
            self.stop()

        self._bridge.handlers[call.token] = cancelled
        task = self._begin(reply, tuple(call.chain))
        task.add_done_callback(lambda _: self._bridge.forget(call.token))

    def step(self) -> Callable[[], Any]:
        """A function that makes the next item here and now, for a sync method on this loop, or returns `END`.

        Raises:
            TypeError: The iterator is asynchronous: its items have to be waited for.
            CallCancelledError, PulsingRuntimeError: As `open`.
        """
        if not inspect.isgenerator(self._iterator):
            raise TypeError(
                "an asynchronous stream cannot be read by a sync method on the event loop: make the method async and "
                "read with 'async for', or mark it @pul.blocking"
            )
        self._claim()
        context, iterator = self._context.copy(), self._iterator
        return lambda: context.run(next, iterator, END)

    def _claim(self) -> None:
        if self._ended:
            raise self._over()
        if self._claimed:
            raise PulsingRuntimeError(f"the stream given to {self._what} is being read already: it can be read once")
        self._claimed = True

    def _over(self) -> CallCancelledError:
        return CallCancelledError(f"the call of {self._what} that brought this stream is over")

    # -- sending ------------------------------------------------------------------------------------------------------

    def _begin(self, reply: Reply, chain: tuple[bytes, ...]) -> asyncio.Task[None]:
        self._task = self._bridge.loop.create_task(self._run(reply, chain), context=self._context)
        return self._task

    async def _run(self, reply: Reply, chain: tuple[bytes, ...]) -> None:
        # Calls that the iterator makes are the caller's, and the callee waits for them, too (R11).
        context = current.get()
        if context is not None:
            current.set(CallContext(context.cell, chain, context.deadline, traceparent()))
        self._sending = True
        try:
            if not self._ended:
                await self._send(reply)
                reply.end()
            else:
                reply.error(self._over())
        except asyncio.CancelledError:
            reply.error(self._over())
        except (KeyboardInterrupt, SystemExit):
            reply.error(self._over())
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the caller's iterator raises goes to its reader
            reply.error(error)
        finally:
            self._ended = True
            await self._finish()

    async def _send(self, reply: Reply) -> None:
        local = isinstance(reply, LocalReply)
        if not local:
            # Streams to other nodes are counted where they enter and leave the network.
            reply.start()
        system = self._system
        if inspect.isgenerator(self._iterator):
            for since, item in enumerate(self._iterator, 1):
                while not reply.try_send(item):
                    await reply.wait_credit()
                system.counts.stream_items += local
                if since % _TURN == 0:
                    await asyncio.sleep(0)
        else:
            async for item in self._iterator:
                while not reply.try_send(item):
                    await reply.wait_credit()
                system.counts.stream_items += local

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> asyncio.Task[None] | None:
        """Ends the iterator: the call is over, or its reader has gone. Returns the task that does, if one is needed."""
        task = self._task
        if self._ended:
            return None if task is None or task.done() else task
        self._ended = True
        if task is None:
            if inspect.isgenerator(self._iterator):
                self._close_generator()
                self._forget()
                return None
            task = self._task = self._bridge.loop.create_task(self._finish(), context=self._context)
        elif self._sending:
            # Cancelled before its first step a task ends without running any of its code; it sees by itself that it is
            # too late.
            task.cancel()
        return task

    async def _finish(self) -> None:
        self._forget()
        if inspect.isgenerator(self._iterator):
            self._close_generator()
            return
        aclose: Callable[[], Awaitable[None]] | None = getattr(self._iterator, "aclose", None)
        if aclose is None:
            return
        try:
            await aclose()
        except Exception:  # noqa: BLE001 - whatever the user's clean-up raises; nobody is left to take it
            _log.exception("a stream given to %s could not be closed", self._what)

    def _close_generator(self) -> None:
        generator: Generator[Any, None, None] = self._iterator
        try:
            generator.close()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("a stream given to %s could not be closed", self._what)

    def _forget(self) -> None:
        if self._desk is not None:
            self._desk.remove(self._key)
            self._desk = None


class _LocalSink(LocalReply):
    """Hands the items to a reader on the same loop."""

    __slots__ = ("source",)

    source: Source

    def _abandon(self) -> asyncio.Task[None] | None:
        return self.source.stop()

    def _idle_limit(self) -> float | None:
        return self.source.idle_limit


class Desk:
    """The endpoint at which other nodes fetch what the calls of one loop carry; made when first needed."""

    __slots__ = ("_bridge", "_keys", "_sources", "_system", "id")

    def __init__(self, system: ActorSystem, bridge: LoopBridge) -> None:
        self._system = system
        self._bridge = bridge
        self._sources: dict[int, Source] = {}
        self._keys = itertools.count(1)
        self.id = ActorId.generate()
        token = bridge.token(self._arrived)
        try:
            system.core.register(
                bridge.core,
                token,
                self.id.raw,
                name=None,
                public=False,
                unique=False,
                class_name=f"{__name__}.Desk",
                metadata={},
                internal=True,
            )
        except _core.CoreError as error:
            bridge.forget(token)
            raise from_core(error.args) from None

    @staticmethod
    def of(system: ActorSystem, bridge: LoopBridge) -> Desk:
        """The desk of a system's calls from one loop."""
        desk = system.desks.get(bridge)
        if desk is None:
            for other in list(system.desks):
                if other.closed:
                    system.desks.pop(other, None)
            desk = system.desks[bridge] = Desk(system, bridge)
        return desk

    def add(self, source: Source) -> int:
        """Takes a source in; returns its key."""
        key = next(self._keys)
        self._sources[key] = source
        return key

    def remove(self, key: int) -> None:
        """The source is closed."""
        self._sources.pop(key, None)

    def __len__(self) -> int:
        return len(self._sources)

    def _arrived(self, event: Event) -> None:
        if event[0] != INBOUND:
            return  # it cannot be ended from elsewhere: it goes with its system
        call: _core.InboundCall = event[2]
        source = self._sources.get(int(bytes(call.buffers[0]) if call.buffers else 0))
        if source is None:
            RemoteReply(self._bridge, call).error(CallCancelledError("the call that brought this stream is over"))
        else:
            source.serve(call)
