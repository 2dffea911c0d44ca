"""Calls that leave through Rust: to other nodes, or to this node's actors from another event loop."""

from __future__ import annotations

import asyncio
import weakref
from asyncio import get_running_loop
from collections.abc import Awaitable
from sys import modules
from typing import TYPE_CHECKING, Any

from pulsing import _core
from pulsing.core._bridge import END, ERROR, ITEM, STREAM_START, VALUE, bridge_of, bridges
from pulsing.core._context import current
from pulsing.core._dispatch import OP_MESSAGE
from pulsing.core._errors import from_core
from pulsing.core._options import PLAIN, Default
from pulsing.core._pickle import dumps, dumps_whole
from pulsing.core._propagate import OTEL, chosen, gather, pack
from pulsing.core._reply import PICKLE, RAW, decode
from pulsing.core._streams import WINDOW, StreamReader
from pulsing.core.messaging import Message
from pulsing.exceptions import PulsingTimeoutError

if TYPE_CHECKING:
    from pulsing.core._bridge import Event, LoopBridge
    from pulsing.core._context import CallContext
    from pulsing.core._options import Options
    from pulsing.core._refs import ActorRef


def _envelope(
    op: int,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carried: dict[str, Any] | None,
    site: str | None = None,
) -> tuple[int, bytes, list[Any]]:
    packed = pack(carried) if carried else None
    # What few messages have comes last, and is left out: who does not know it does not miss it.
    more = (packed, site) if site else (packed,) if packed else ()
    if op == OP_MESSAGE and type(args[0]) is Message and not args[0].is_stream:
        # Who is no Python actor reads the body alone.
        return RAW, args[0].msg_type.encode(), [args[0].payload, *map(dumps_whole, more)]
    try:
        head, buffers = dumps((op, name, args, kwargs, *more))
    except TypeError as error:
        from pulsing.core._unsendable import arguments, unsendable

        raise unsendable(error, name or "receive", arguments(args, kwargs)) from error.__cause__
    return PICKLE, head, buffers


async def ask_far(
    ref: ActorRef, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """`ActorRef._ask` of an actor on another node, or on this one for another loop."""
    loop = get_running_loop()
    context = current.get()
    system = ref._system
    if context is None and options is PLAIN and not kwargs and not chosen.active and OTEL not in modules:
        # The usual call, without what it does not have.
        bridge = bridges.get(id(loop))
        if bridge is None or bridge.loop is not loop or bridge.closed:
            bridge = bridge_of(loop)
        future = loop.create_future()
        limit = system.default_timeout
        token = system.core.ask(bridge.core, future, ref.node_id.raw, ref._raw, op, name, args, limit, WINDOW)
        if token is not None:
            try:
                answer = await future
            except BaseException:
                _withdraw(bridge, token, future)
                raise
            # A tuple is no value, but the event that was to bring it.
            return answer if type(answer) is not tuple else await _outcome(bridge, ref, name, None, answer)
    limit = system.default_timeout if isinstance(options.timeout, Default) else options.timeout
    trace, carried = None if context is None else context.trace, None
    if chosen.active or OTEL in modules:
        trace, carried = gather(context)
    if context is not None:
        limit = ref._remainder(loop, context, limit, name)
    return await remote_ask(ref, op, name, args, kwargs, limit, options, context, trace, carried)


async def remote_ask(
    ref: ActorRef,
    op: int,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: float | None,
    options: Options,
    context: CallContext | None,
    trace: str | None = None,
    carried: dict[str, Any] | None = None,
) -> Any:
    """Calls through Rust with this limit, and returns the value or the stream that answers."""
    bridge = bridge_of(get_running_loop())
    handle = _sent_off(bridge, ref, op, name, args, kwargs, limit, options, context, trace, carried)
    future = bridge.loop.create_future()
    bridge.handlers[handle.token] = future.set_result
    try:
        event = await future
    except BaseException:
        _give_up(bridge, handle)
        raise
    return await _outcome(bridge, ref, name, handle, event)


def _sent_off(
    bridge: LoopBridge,
    ref: ActorRef,
    op: int,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit: float | None,
    options: Options,
    context: CallContext | None,
    trace: str | None,
    carried: dict[str, Any] | None,
) -> _core.CallHandle:
    codec, head, buffers = _envelope(op, name, args, kwargs, carried)
    try:
        return ref._system.core.call(
            bridge.core,
            ref.node_id.raw,
            ref.actor_id.raw,
            codec,
            head,
            buffers,
            limit,
            None if context is None else context.cell.id.raw,
            [] if context is None else list(context.chain_now()),
            trace,
            options.no_wait,
            WINDOW,
            options.idempotent,
        )
    except _core.CoreError as error:
        raise from_core(error.args) from None
    finally:
        # Lent to the call by now. An error remembers this frame, which must not keep views in a cycle (see `_pickle`).
        del buffers


def _give_up(bridge: LoopBridge, handle: _core.CallHandle) -> None:
    bridge.forget(handle.token)
    if not bridge.closed:
        handle.cancel()


def _withdraw(bridge: LoopBridge, token: int, future: asyncio.Future[Any]) -> None:
    """`_give_up` of a call that `System.ask` made."""
    bridge.core.give_up(token)
    if future.done() and not future.cancelled():
        # Its first event came in this very turn, and may be the beginning of a stream.
        event = future.result()
        if type(event) is tuple and event[0] == STREAM_START:
            _give_up(bridge, event[3])


async def _outcome(bridge: LoopBridge, ref: ActorRef, name: str, handle: _core.CallHandle | None, event: Event) -> Any:
    """What a call returns or raises whose first event this is; a stream's brings its handle if there is none."""
    if event[0] != STREAM_START:
        bridge.forget(event[1])
        if event[0] == VALUE:
            return decode(event[2], event[3], event[4], ref._system)
        failure = from_core(event[2])
        # Rust does not know the method. Which one did not answer is half of the diagnosis.
        raise _named(ref, name or "receive", failure) if event[2][0] == "timeout" else failure
    stream = _Stream(bridge, ref, handle or event[3])
    for held in event[2]:
        stream.on_event(held)
    try:
        await stream.begun
    except BaseException:
        stream.cancel()
        raise
    return stream.take()


def _named(ref: ActorRef, method: str, error: BaseException) -> BaseException:
    if not isinstance(error, PulsingTimeoutError) or method in error.operation:
        return error
    named = PulsingTimeoutError(f"{ref._label()}.{method} ({error.operation})", error.duration_ms)
    named.state_changed = error.state_changed
    return named


def remote_tell(
    ref: ActorRef,
    op: int,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    no_wait: bool,
    context: CallContext | None,
    trace: str | None = None,
    carried: dict[str, Any] | None = None,
    site: str | None = None,
) -> Awaitable[None] | None:
    """Sends through Rust, without an answer, from `site`, as other nodes are told. None: it is on its way;
    else that is to be awaited.
    """
    bridge = bridge_of(get_running_loop())
    codec, head, buffers = _envelope(op, name, args, kwargs, carried, site)
    try:
        waiting = ref._system.core.tell(
            bridge.core,
            ref.node_id.raw,
            ref.actor_id.raw,
            codec,
            head,
            buffers,
            None if context is None else context.cell.id.raw,
            trace,
            no_wait,
        )
    except _core.CoreError as error:
        raise from_core(error.args) from None
    return None if waiting is None else _sent(bridge, waiting)


async def _sent(bridge: LoopBridge, waiting: _core.PendingTell) -> None:
    future: asyncio.Future[None] = bridge.loop.create_future()

    def done(event: Event) -> None:
        bridge.forget(event[1])
        if future.done():
            return
        if event[0] == ERROR:
            future.set_exception(from_core(event[2]))
        else:
            future.set_result(None)

    # The event may be queued already, but this loop has not drained it.
    bridge.handlers[waiting.token] = done
    try:
        await future
    finally:
        bridge.forget(waiting.token)
        waiting.cancel()


class _Stream:
    """The stream that answers a call."""

    __slots__ = ("__weakref__", "_bridge", "_first", "_handle", "_reader", "_ref", "_result", "begun")

    def __init__(self, bridge: LoopBridge, ref: ActorRef, handle: _core.CallHandle) -> None:
        self._bridge = bridge
        self._ref = ref
        self._handle = handle
        self.begun: asyncio.Future[None] = bridge.loop.create_future()
        """Done when it is known what the answer is: at the first item, or the end."""
        self._first = True
        # Rust keeps its idle limit.
        reader = StreamReader(bridge.loop, handle.grant, self.cancel)
        self._result: Any = reader
        # Weak: the consumer alone keeps its reader alive, and ends the producer by dropping it.
        self._reader = weakref.ref(reader)
        bridge.handlers[handle.token] = self.on_event

    def take(self) -> Any:
        """The reader, or the message that it is the body of; no longer held here."""
        result, self._result = self._result, None
        return result

    def on_event(self, event: Event) -> None:
        """Takes what Rust says about it."""
        kind = event[0]
        if kind == ITEM:
            self._item(event)
        elif kind in (END, ERROR):
            self._bridge.forget(self._handle.token)
            reader = self._reader()
            if reader is not None:
                reader.finish(from_core(event[2]) if kind == ERROR else None)
            self._settle()

    def _settle(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def _item(self, event: Event) -> None:
        reader = self._reader()
        if reader is None:
            return
        if self._first:
            # A Python callee says the message's type in a first item without a body.
            self._first = False
            header = event[2] == RAW and not event[4]
            if header and event[3]:
                self._result = Message._streaming(event[3].decode(), reader)
            self._settle()
            if header:
                return
        try:
            reader.push(decode(event[2], event[3], event[4], self._ref._system))
        except Exception as error:  # noqa: BLE001 - whatever the unpickling of the callee's objects raises
            reader.finish(error)
            self.cancel()

    def cancel(self) -> None:
        """Nobody wants the rest."""
        _give_up(self._bridge, self._handle)
