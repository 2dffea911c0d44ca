"""References to actors, and the one path that every call takes."""

from __future__ import annotations

import asyncio
import sys
from sys import modules
from typing import TYPE_CHECKING, Any, NoReturn

from pulsing.core._arguments import PLAIN_TYPES, ask_streaming, carries_stream, is_stream, no_stream_in_tell
from pulsing.core._context import CallContext, current
from pulsing.core._delivery import Delivery
from pulsing.core._dispatch import OP_AUTO, OP_CALL, OP_MESSAGE
from pulsing.core._errors import to_refusal
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._inbound import resolve_call
from pulsing.core._options import DEFAULT, PLAIN, Default, Options, Timeout
from pulsing.core._outbound import ask_far, remote_tell
from pulsing.core._propagate import OTEL, chosen, gather
from pulsing.core._reply import LocalReply, NoReply
from pulsing.exceptions import ActorNotFoundError, PulsingTimeoutError, SystemShutDownError

if TYPE_CHECKING:
    from types import FrameType

    from pulsing.core._proxy import ActorProxy
    from pulsing.core._system import ActorSystem


_TURN = 32
"""Calls answered on the spot after which the caller gives the loop a turn."""


class ActorRef:
    """One actor on one node. Comparable, hashable, and may be sent in messages."""

    __slots__ = ("_local", "_name", "_raw", "_system", "actor_id", "node_id")

    def __init__(self, system: ActorSystem, node_id: NodeId, actor_id: ActorId, name: str | None = None) -> None:
        self._system = system
        self.node_id = node_id
        self.actor_id = actor_id
        self._name = name
        self._raw = actor_id.raw
        self._local = node_id == system.node_id

    def is_local(self) -> bool:
        """True when the actor lives on this system's node."""
        return self._local

    def options(
        self, *, timeout: Timeout = DEFAULT, no_wait: bool | None = None, idempotent: bool | None = None
    ) -> ActorProxy:
        """A proxy of the actor, called otherwise: ``ref.options(timeout=1.0).ask(msg)``; see `ActorProxy.options`."""
        return self.as_any().options(timeout=timeout, no_wait=no_wait, idempotent=idempotent)

    async def ask(
        self, msg: Any, *, timeout: Timeout = DEFAULT, no_wait: bool = False, idempotent: bool = False
    ) -> Any:
        """Sends a message to the actor's `receive` and returns its answer.

        Args:
            msg: Any picklable object, or a `Message`.
            timeout: Seconds; None for ever. Default: the system's (30 s).
            no_wait: Raise instead of waiting in a full mailbox.
            idempotent: The message may be handled twice: send it again when the connection breaks.

        Raises:
            Exception: What the handler raised, as its own type.
            PulsingTimeoutError: No answer in time; the handler is cancelled.
            MailboxFull: With `no_wait` only.
            ActorStoppedError, ActorNotFoundError, ConnectionLostError: As they say.
        """
        plain = timeout is DEFAULT and not no_wait and not idempotent
        return await self.ask_with(msg, PLAIN if plain else Options(timeout, no_wait, idempotent))

    async def ask_with(self, msg: Any, options: Options) -> Any:
        """`ask`, with options that stand already."""
        if type(msg) not in PLAIN_TYPES and is_stream(msg):
            return await ask_streaming(self, OP_MESSAGE, "", (msg,), {}, options)
        return await self._ask(OP_MESSAGE, "", (msg,), {}, options)

    async def tell(self, msg: Any, *, no_wait: bool = False) -> None:
        """Sends a message without an answer; waits only for a place in a full mailbox."""
        await self._tell(OP_MESSAGE, "", (msg,), {}, Options(DEFAULT, no_wait) if no_wait else PLAIN)

    def __getattr__(self, name: str) -> NoReturn:
        text = f"a reference has no {name!r}"
        if not name.startswith("_"):
            text += f"; a proxy calls methods: `ref.as_any().{name}(...)`, or what `await pul.resolve(name)` returns"
        raise AttributeError(text, name=name, obj=self)

    def as_any(self) -> ActorProxy:
        """A proxy that forwards any method name."""
        from pulsing.core._proxy import ActorProxy

        return ActorProxy(self)

    def as_type(self, cls: Any) -> ActorProxy:
        """A proxy that knows the methods of `cls`, a class or an ``@remote`` class."""
        from pulsing.core._proxy import ActorProxy, method_names

        return ActorProxy(self, method_names(cls))

    # -- the path of a call -------------------------------------------------------------------------------------------

    async def _ask(
        self, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options = PLAIN
    ) -> Any:
        system = self._system
        loop = asyncio.get_running_loop()
        if not self._local or loop is not system.loop:
            return await ask_far(self, op, name, args, kwargs, options)
        context = current.get()
        limit = options.timeout
        if isinstance(limit, Default):
            limit = system.default_timeout
        trace, carried = None if context is None else context.trace, None
        if chosen.active or OTEL in modules:
            trace, carried = gather(context)
        cell = system.cell_of(self._raw)
        if cell is None:
            raise self._missing()
        if op == OP_CALL and name in cell.methods:
            spec = cell.methods[name]
        else:
            spec, args, kwargs = resolve_call(cell, op, name, args, kwargs)
        reply = LocalReply(loop, system.debug_copy)
        if system.debug_copy:
            args, kwargs = system.copied((args, kwargs))
        d = Delivery(cell, spec, args, kwargs, reply)
        reply.delivery = d
        if context is not None:
            limit = self._remainder(loop, context, limit, name)
            d.sender = context.cell.raw
            if context.chain:
                d.chain = context.chain_now()
        if trace is not None:
            d.trace = trace
        if carried is not None:
            d.carried = carried
        if limit is not None:
            d.limit = limit
            d.deadline = loop.time() + limit
        if options.no_wait:
            d.no_wait = True
        system.counts.local += 1
        cell.mailbox.deliver(d)
        if reply.done:
            # No future and no turn of the loop, but for one turn in a while: others want to run, too.
            system.inline += 1
            if system.inline % _TURN == 0:
                await asyncio.sleep(0)
            return reply.take()
        future = reply.future = loop.create_future()
        try:
            await future
        except asyncio.CancelledError:
            d.abandon()
            raise
        return reply.take()

    def _remainder(
        self, loop: asyncio.AbstractEventLoop, context: CallContext, limit: float | None, name: str
    ) -> float | None:
        """What nested calls inherit of their caller's limit (R5)."""
        if context.deadline is None or loop is not context.cell.system.loop:
            return limit
        left = max(0.0, context.deadline - loop.time())
        if limit is not None and limit <= left:
            return limit
        if left == 0.0:
            raise PulsingTimeoutError(f"{self._label()}.{name or 'receive'} (its caller's deadline had passed)")
        return left

    async def _tell(
        self, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options = PLAIN
    ) -> None:
        if carries_stream(args, kwargs):
            raise no_stream_in_tell(f"{self._label()}.{name or 'receive'}", args, kwargs)
        system = self._system
        loop = asyncio.get_running_loop()
        context = current.get()
        trace, carried = None if context is None else context.trace, None
        if chosen.active or OTEL in modules:
            trace, carried = gather(context)
        if not self._local or loop is not system.loop:
            site = _call_site()
            place = None if site is None else system.places.get(site) or system.place(site)
            waiting = remote_tell(self, op, name, args, kwargs, options.no_wait, context, trace, carried, place)
            if waiting is not None:
                await waiting
            return
        cell = system.cell_of(self._raw)
        if cell is None:
            raise self._missing()
        if op == OP_CALL and name in cell.methods:
            spec = cell.methods[name]
        else:
            spec, args, kwargs = resolve_call(cell, op, name, args, kwargs)
        if system.debug_copy:
            args, kwargs = system.copied((args, kwargs))
        d = Delivery(cell, spec, args, kwargs, _NOBODY)
        d.one_way = True
        d.site = _call_site()
        if context is not None:
            d.sender = context.cell.raw
        if trace is not None:
            d.trace = trace
        if carried is not None:
            d.carried = carried
        system.counts.local += 1
        # Never run here and now: a tell returns before its message is handled.
        if options.no_wait:
            d.no_wait = True
            failure = d.reply = _TellReply()
            cell.mailbox.post(d)
            if failure.failure is not None:
                raise failure.failure
        elif cell.mailbox.full:
            room = d.acceptance()
            failure = d.reply = _TellReply()
            cell.mailbox.post(d)
            try:
                await room
            except asyncio.CancelledError:
                d.abandon()
                raise
            if failure.failure is not None and to_refusal(failure.failure) is not None:
                # It never had its place: the actor has ended.
                raise failure.failure
        else:
            cell.mailbox.post(d)

    def _label(self) -> str:
        return self._name or str(self.actor_id)

    def _missing(self) -> Exception:
        if self._system.is_shut_down:
            return SystemShutDownError("the actor system is shut down")
        self._system.counts.dead_letters += 1
        return ActorNotFoundError(
            f"no actor {self._label()} on this node: it was stopped or never lived here; resolve its name again"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorRef) and (self.node_id, self.actor_id) == (other.node_id, other.actor_id)

    def __hash__(self) -> int:
        return hash(self.actor_id)

    def __repr__(self) -> str:
        name = f" {self._name!r}" if self._name else ""
        return f"<ActorRef{name} {self.actor_id} on node {self.node_id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_ref, (self.node_id.raw, self.actor_id.raw, self._name)


_NOBODY = NoReply()


def _call_site() -> tuple[str, int] | None:
    """File and line of the code outside of this package that is running; None if only the event loop is."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__package__") == "asyncio":
        return None
    return frame.f_code.co_filename, frame.f_lineno


class _TellReply(NoReply):
    """Remembers a refusal that came while `tell` still ran."""

    failure: BaseException | None = None

    def error(self, error: BaseException) -> None:
        self.failure = error


def rebuild_ref(node: bytes, actor: bytes, name: str | None) -> ActorRef:
    """A reference that came in a message, bound to the system that decodes it."""
    from pulsing.core._pickle import decoding_system

    system = decoding_system()
    if system is None:
        from pulsing.core._global import get_system

        system = get_system()
    return ActorRef(system, NodeId(node), ActorId(actor), name)


__all__ = ["DEFAULT", "OP_AUTO", "OP_CALL", "OP_MESSAGE", "ActorRef", "Options", "Timeout", "rebuild_ref"]
