"""Calls that come through Rust, from another node or from Rust in this process, on their way to an actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from sys import modules
from typing import TYPE_CHECKING, Any

from pulsing import _core
from pulsing.core._bridge import DISPLACED, ENDING, INBOUND, PLAIN
from pulsing.core._cell import Cell
from pulsing.core._context import current
from pulsing.core._delivery import DONE, Delivery
from pulsing.core._dispatch import OP_AUTO, OP_CALL, OP_GET, OP_MESSAGE, MethodSpec
from pulsing.core._handlers import whence
from pulsing.core._life import STOPPED
from pulsing.core._pickle import loads
from pulsing.core._propagate import OTEL, arrive
from pulsing.core._protocol import ProtocolRun
from pulsing.core._refusals import stopped
from pulsing.core._reply import PICKLE, RAW, RemoteReply, Reply, TellReply, consumer_gone, decode, wait_credit
from pulsing.exceptions import PulsingRuntimeError, PulsingUnsupportedError

if TYPE_CHECKING:
    from pulsing.core._bridge import Event, LoopBridge

Resolved = tuple[MethodSpec, tuple[Any, ...], dict[str, Any]]
"""How a handler runs, and its arguments."""

Envelope = tuple[int, str, tuple[Any, ...], dict[str, Any], dict[str, bytes] | None, str | None]
"""Operation, name, arguments, what the call carries, and where in the code a `tell` came from."""

_log = logging.getLogger("pulsing")


class InboundCall:
    """One call of a protocol other than Python's own, as `Actor.on_protocol_call` gets it.

    Attributes:
        codec: Which protocol.
        head: The encoded message.
        buffers: Its out-of-band buffers, each behind the buffer protocol.
        timeout: Seconds the caller waits for the first answer from now on; None for ever.
        trace: W3C ``traceparent``.
        cancelled: True once the caller gave up.
        answered: True once the answer is complete.
    """

    __slots__ = ("_bridge", "_raw")

    def __init__(self, bridge: LoopBridge, raw: _core.InboundCall) -> None:
        self._bridge = bridge
        self._raw = raw

    @property
    def codec(self) -> int:
        return self._raw.codec

    @property
    def head(self) -> bytes:
        return self._raw.head

    @property
    def buffers(self) -> list[Any]:
        return self._raw.buffers

    @property
    def timeout(self) -> float | None:
        return self._raw.timeout

    @property
    def trace(self) -> str | None:
        return self._raw.trace

    @property
    def cancelled(self) -> bool:
        return self._raw.cancelled

    @property
    def answered(self) -> bool:
        return self._raw.answered

    def reply(self, head: bytes, buffers: Sequence[Any] = (), codec: int | None = None) -> None:
        """Answers with one message; `codec` defaults to the call's own.

        Raises:
            RuntimeError: Answered already, or a stream has begun.
        """
        self._raw.reply(head, list(buffers), codec)

    def try_send(self, head: bytes) -> bool:
        """Sends one stream item if there is credit; the first one begins the stream. False: :meth:`send` it.

        Raises:
            PulsingRuntimeError: The consumer has gone.
        """
        try:
            return self._raw.try_send(head)
        except _core.CoreError:
            raise consumer_gone() from None

    async def send(self, head: bytes, buffers: Sequence[Any] = ()) -> None:
        """Sends one stream item, waiting for credit; the first one begins the stream.

        Raises:
            PulsingRuntimeError: The consumer has gone.
        """
        items = list(buffers)
        try:
            while not self._raw.try_send(head, items):
                await wait_credit(self._bridge, self._raw)
        except _core.CoreError:
            raise consumer_gone() from None

    def end(self) -> None:
        """The stream is complete.

        Raises:
            RuntimeError: Answered already.
        """
        self._raw.end()

    def fail(self, type_name: str, message: str, code: int = 0, data: bytes = b"", traceback: str = "") -> None:
        """Answers with an error, or fails the stream.

        Args:
            type_name: Full name of the error's type.
            message: Its text.
            code: A number with meaning to the two ends; an HTTP status in the worker protocol. 0 = none.
            data: Opaque encoding of the error; the OpenAI error object as JSON in the worker protocol.
            traceback: Ready to print.

        Raises:
            RuntimeError: Answered already.
        """
        self._raw.fail(type_name, message, code, data, traceback)

    def __repr__(self) -> str:
        return repr(self._raw)


class Inlet:
    """Takes the calls that arrive for one actor, their cancellations, and the loss of its name."""

    __slots__ = ("_bridge", "_cell")

    def __init__(self, bridge: LoopBridge, cell: Cell) -> None:
        self._bridge = bridge
        self._cell = cell

    # No method that is bound: the collector would look at one more object of each actor.
    def __call__(self, event: Event) -> None:
        """Takes one event of the actor."""
        if event[0] != PLAIN:
            self._take_other(event)
            return
        # An ask that carries nothing unusual, without what it does not have; any other goes the longer way.
        _, _, call, envelope, timeout, sender, token = event
        cell = self._cell
        if cell.state < STOPPED and not cell.protocols and OTEL not in modules:
            try:
                op, name, args, kwargs = envelope
                spec = cell.methods.get(name) if op == OP_CALL else None
            except (TypeError, ValueError):
                # Not what callers send: the longer way tells this one.
                spec = None
            if spec is not None:
                system = cell.system
                system.counts.inbound += 1
                d = Delivery(cell, spec, args, kwargs, RemoteReply(self._bridge, call))
                if sender is not None:
                    d.sender = sender
                if timeout is not None:
                    d.limit = timeout
                    d.deadline = system.loop.time() + timeout
                    if timeout <= 0.0 and d.expired():
                        return
                cell.mailbox.deliver(d)
                if d.state != DONE:
                    self._cancellable(d, token)
                return
        self._take_other((INBOUND, cell.key, call))

    def _take_other(self, event: Event) -> None:
        if event[0] == DISPLACED:
            self._cell.displaced(event[2])
            return
        cell = self._cell
        if event[0] == ENDING:
            _, _, how, grace, error = event
            cell.life.begin(how, cell.system.config.stop_grace if grace is None else grace, error or "")
            return
        call: _core.InboundCall = event[2]
        cell.system.counts.inbound += 1
        if cell.state == STOPPED:
            call.refuse("actor_stopped", "", 1.0)
        elif call.codec in cell.protocols:
            self._protocol(call)
        else:
            self._deliver(call)

    def _cancellable(self, d: Delivery, token: int) -> None:
        cell = self._cell
        self._bridge.handlers[token] = lambda _: d.cancel(stopped(cell))
        d.on_end = lambda: self._bridge.forget(token)

    def _protocol(self, raw: _core.InboundCall) -> None:
        call = InboundCall(self._bridge, raw)
        cell = self._cell
        if raw.one_way:
            raw.accept()

        run = ProtocolRun(cell, trace=raw.trace)
        token = raw.token
        self._bridge.handlers[token] = run.cancel
        cell.handlers.run_protocol(run, self._answer(call, raw, run, token))

    async def _answer(self, call: InboundCall, raw: _core.InboundCall, run: ProtocolRun, token: int) -> None:
        cell = self._cell
        try:
            current.set(run)
            run.begun = True
            if run.cancelled:
                raise asyncio.CancelledError
            await cell.instance.on_protocol_call(call)
        except asyncio.CancelledError as error:
            if not raw.answered:
                raw.refuse("cancelled" if raw.cancelled else "actor_stopped")
            # The task keeps it. A frame of the actor's that knows its own task would go round in circles with what it
            # was asked, which may be large, and the collector is in no hurry.
            raise error.with_traceback(None) from None
        except SystemExit as error:
            # As of any handler: it ends the actor, not the loop.
            if not raw.answered:
                raw.refuse("actor_stopped")
            cell.life.ended_itself(error)
        except Exception as error:  # noqa: BLE001 - whatever the user's method raises goes to its caller
            if raw.answered or raw.cancelled:
                # The consumer has gone: nobody is left to tell.
                _log.debug("%s.on_protocol_call ended after its caller", cell.label, exc_info=error)
            else:
                _log.exception("%s.on_protocol_call failed", cell.label)
                RemoteReply(self._bridge, raw).error(error)
        finally:
            if not raw.answered:
                raw.refuse("protocol", f"{cell.label}.on_protocol_call returned without an answer")
            self._bridge.forget(token)
            cell.handlers.protocol_over(run)

    def _deliver(self, call: _core.InboundCall) -> None:
        cell = self._cell
        loop = cell.system.loop
        one_way, timeout = call.one_way, call.timeout
        remote = RemoteReply(self._bridge, call)
        reply: Reply = TellReply(call) if one_way else remote
        site = None
        try:
            op, name, args, kwargs, packed, site = self._decode(call)
            spec, args, kwargs = resolve_call(cell, op, name, args, kwargs)
            carried = arrive(packed, cell.system)
        except Exception as error:  # noqa: BLE001 - whatever the unpickling of the caller's objects raises
            if one_way:
                told = whence(cell, site, call.sender)
                _log.error("%s cannot read a message, told %s", cell.label, told, exc_info=error)
            reply.error(error)
            return
        d = Delivery(cell, spec, args, kwargs, reply)
        d.sender = call.sender
        d.chain = tuple(call.chain)
        d.trace = call.trace
        d.carried = carried
        if timeout is not None:
            d.limit = timeout
            d.deadline = loop.time() + timeout
            if timeout <= 0.0 and d.expired():
                return
        if one_way:
            # A tell that came through Rust has been told to be on its way: it is kept, whatever its `no_wait`.
            d.one_way = True
            d.site = site
            d.on_admitted = call.accept
            cell.mailbox.deliver(d)
            if d.on_admitted is not None and not cell.mailbox.holds_back(d):
                d.admitted()
            return
        d.no_wait = call.no_wait
        cell.mailbox.deliver(d)
        if not remote.done:
            self._cancellable(d, call.token)

    def _decode(self, call: _core.InboundCall) -> Envelope:
        cell = self._cell
        more: list[Any]
        if call.codec == PICKLE:
            try:
                op, name, args, kwargs, *more = decode(PICKLE, call.head, call.buffers, cell.system)
            except (ImportError, AttributeError) as error:
                from pulsing.core._spawn import unreadable

                node = f"{cell.system.node_id} at {cell.system.addr}"
                raise unreadable(error, f"a message for actor {cell.label}", node) from error
            packed, site, *_ = (*more, None, None)
            return op, name, args, kwargs, packed, site
        if call.codec == RAW:
            message = decode(RAW, call.head, call.buffers, cell.system)
            more = [loads(bytes(one)) for one in call.buffers[1:3]]
            packed, site, *_ = (*more, None, None)
            return OP_MESSAGE, "", (message,), {}, packed, site
        raise PulsingRuntimeError(
            f"actor {cell.label} takes pickled calls and plain messages"
            + (f" and protocols {sorted(cell.protocols)}" if cell.protocols else "")
            + f", not codec {call.codec}"
        )


def resolve_call(cell: Cell, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Resolved:
    """The handler that an envelope asks for.

    Raises:
        AttributeError: There is no such public method or attribute.
        PulsingUnsupportedError: A message for an actor without `receive`.
    """
    methods = cell.methods
    if op == OP_CALL and name in methods:
        return methods[name], args, kwargs
    if op == OP_AUTO:
        message = args[0]
        by_name = isinstance(message, str) and message in methods and cell.receive is None
        op, name, args = (OP_CALL, message, ()) if by_name else (OP_MESSAGE, "", args)
    if op == OP_CALL:
        spec = methods.get(name)
        if spec is None:
            raise AttributeError(
                f"actor {cell.label} has no method {name!r}; it has: {', '.join(sorted(methods)) or 'none'}"
            )
        return spec, args, kwargs
    if op == OP_GET:
        if name.startswith("_") or name in methods or not hasattr(cell.instance, name):
            what = "is a method: call it" if name in methods else "does not exist"
            raise AttributeError(f"attribute {name!r} of actor {cell.label} {what}")
        return _GET, (name,), {}
    if op == OP_MESSAGE:
        receive = cell.receive
        if receive is None:
            raise PulsingUnsupportedError(
                f"actor {cell.label} has no receive() for messages; its methods: {', '.join(sorted(methods)) or 'none'}"
            )
        return receive, args, kwargs
    raise PulsingRuntimeError(f"unknown operation {op} in a call: the caller runs another version of Pulsing")


_GET = MethodSpec("__getattribute__", "sync", False, True)

__all__ = ["InboundCall", "Inlet", "resolve_call"]
