"""Calls that leave through Rust: to other nodes, or to this node's actors from another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from pulsing import _core
from pulsing.core import _bridge
from pulsing.core._dispatch import OP_MESSAGE
from pulsing.core._errors import from_core
from pulsing.core._pickle import dumps, dumps_whole
from pulsing.core._propagate import pack
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
    op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], carried: dict[str, Any] | None
) -> tuple[int, bytes, list[Any]]:
    packed = pack(carried) if carried else None
    if op == OP_MESSAGE and type(args[0]) is Message and not args[0].is_stream:
        # Who is no Python actor reads the body alone.
        beside = [dumps_whole(packed)] if packed else []
        return RAW, args[0].msg_type.encode(), [args[0].payload, *beside]
    try:
        head, buffers = dumps((op, name, args, kwargs, packed) if packed else (op, name, args, kwargs))
    except TypeError as error:
        from pulsing.core._unsendable import arguments, unsendable

        raise unsendable(error, name or "receive", arguments(args, kwargs)) from error.__cause__
    return PICKLE, head, buffers


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
    """Calls through Rust and returns the value or the stream that answers."""
    bridge = _bridge.bridge_of(asyncio.get_running_loop())
    codec, head, buffers = _envelope(op, name, args, kwargs, carried)
    call = _Call(bridge, ref, name or "receive")
    try:
        call.handle = ref._system.core.call(
            bridge.core,
            call.token,
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
        bridge.forget(call.token)
        raise from_core(error.args) from None
    except BaseException:
        bridge.forget(call.token)
        raise
    finally:
        # Lent to the call by now. An error remembers this frame, which must not keep views in a cycle (see `_pickle`).
        del buffers
    try:
        await call.future
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call.take()


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
) -> Awaitable[None] | None:
    """Sends through Rust, without an answer. None: it is on its way; else that is to be awaited."""
    bridge = _bridge.bridge_of(asyncio.get_running_loop())
    codec, head, buffers = _envelope(op, name, args, kwargs, carried)
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
        if event[0] == _bridge.ERROR:
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


class _Call:
    """One call that is out, and the stream that may answer it."""

    __slots__ = ("_bridge", "_failure", "_first", "_method", "_reader", "_ref", "_result", "future", "handle", "token")

    def __init__(self, bridge: LoopBridge, ref: ActorRef, method: str) -> None:
        self._bridge = bridge
        self._ref = ref
        self._method = method
        self.future: asyncio.Future[None] = bridge.loop.create_future()
        self.handle: _core.CallHandle | None = None
        self._result: Any = None
        self._failure: BaseException | None = None
        self._reader: Any = None
        self._first = False
        self.token = bridge.token(self._on_event)

    def take(self) -> Any:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        result, self._result = self._result, None
        return result

    def _settle(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def _on_event(self, event: Event) -> None:
        kind = event[0]
        if kind == _bridge.ITEM:
            self._item(event)
        elif kind == _bridge.VALUE:
            self._bridge.forget(self.token)
            try:
                self._result = decode(event[2], event[3], event[4], self._ref._system)
            except Exception as error:  # noqa: BLE001 - whatever the unpickling of the callee's objects raises
                self._failure = error
            self._settle()
        elif kind == _bridge.ERROR:
            self._bridge.forget(self.token)
            failure = from_core(event[2])
            if self._reader is None:
                if event[2][0] == "timeout":
                    # Rust does not know the method. Which one did not answer is half of the diagnosis.
                    failure = self._named(failure)
                self._failure = failure
                self._settle()
            else:
                self._finish(failure)
        elif kind == _bridge.STREAM_START:
            import weakref

            # Rust keeps its idle limit.
            reader = StreamReader(self._bridge.loop, self._grant, self.cancel)
            self._reader = weakref.ref(reader)
            self._result = reader
            self._first = True
        elif kind == _bridge.END:
            self._bridge.forget(self.token)
            self._finish(None)

    def _named(self, error: BaseException) -> BaseException:
        if not isinstance(error, PulsingTimeoutError) or self._method in error.operation:
            return error
        what = f"{self._ref._label()}.{self._method} ({error.operation})"
        named = PulsingTimeoutError(what, error.duration_ms)
        named.state_changed = error.state_changed
        return named

    def _item(self, event: Event) -> None:
        reader = self._reader() if self._reader is not None else None
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
        except Exception as error:  # noqa: BLE001 - as above
            reader.finish(error)
            self.cancel()

    def _finish(self, error: BaseException | None) -> None:
        reader = self._reader() if self._reader is not None else None
        if reader is not None:
            reader.finish(error)
        self._settle()

    def _grant(self, items: int) -> None:
        if self.handle is not None:
            self.handle.grant(items)

    def cancel(self) -> None:
        self._bridge.forget(self.token)
        if self.handle is not None and not self._bridge.closed:
            self.handle.cancel()
