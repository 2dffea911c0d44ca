"""References to actors, and the one path that every call takes."""

from __future__ import annotations

import asyncio
from sys import modules
from typing import TYPE_CHECKING, Any, Final

from pulsing.core._arguments import ask_streaming, carries_stream, no_stream_in_tell
from pulsing.core._context import current
from pulsing.core._delivery import Delivery
from pulsing.core._dispatch import OP_AUTO, OP_CALL, OP_MESSAGE
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._inbound import resolve_call
from pulsing.core._outbound import remote_ask, remote_tell
from pulsing.core._propagate import OTEL, chosen, gather
from pulsing.core._reply import LocalReply, NoReply
from pulsing.exceptions import ActorNotFoundError, PulsingTimeoutError, SystemShutDownError

if TYPE_CHECKING:
    from pulsing.core._proxy import ActorProxy
    from pulsing.core._system import ActorSystem


class _Default:
    """Stands for "what the system says" where None means "for ever"."""

    def __repr__(self) -> str:
        return "the system's default"


DEFAULT: Final = _Default()

Timeout = float | None | _Default


class Options:
    """How calls are made.

    Args:
        timeout: Seconds until the first answer; None for ever.
        no_wait: Raise `MailboxFull` instead of waiting in a full mailbox.
    """

    __slots__ = ("no_wait", "timeout")

    def __init__(self, timeout: Timeout = DEFAULT, no_wait: bool = False) -> None:
        if isinstance(timeout, (int, float)) and not timeout > 0:
            raise ValueError(f"timeout={timeout}: expected seconds above 0, or None for ever")
        self.timeout = timeout
        self.no_wait = no_wait


_PLAIN = Options()

_TURN = 32
"""Calls answered on the spot after which the caller gives the loop a turn."""


class ActorRef:
    """One actor on one node. Comparable, hashable, and may be sent in messages."""

    __slots__ = ("_name", "_system", "actor_id", "node_id")

    def __init__(self, system: ActorSystem, node_id: NodeId, actor_id: ActorId, name: str | None = None) -> None:
        self._system = system
        self.node_id = node_id
        self.actor_id = actor_id
        self._name = name

    def is_local(self) -> bool:
        """True when the actor lives on this system's node."""
        return self.node_id == self._system.node_id

    async def ask(self, msg: Any, *, timeout: Timeout = DEFAULT, no_wait: bool = False) -> Any:
        """Sends a message to the actor's `receive` and returns its answer.

        Args:
            msg: Any picklable object, or a `Message`.
            timeout: Seconds; None for ever. Default: the system's (30 s).
            no_wait: Raise instead of waiting in a full mailbox.

        Raises:
            Exception: What the handler raised, as its own type.
            PulsingTimeoutError: No answer in time; the handler is cancelled.
            MailboxFull: With `no_wait` only.
            ActorStoppedError, ActorNotFoundError, ConnectionLostError: As they say.
        """
        options = Options(timeout, no_wait)
        if carries_stream((msg,), {}):
            return await ask_streaming(self, OP_MESSAGE, "", (msg,), {}, options)
        return await self._ask(OP_MESSAGE, "", (msg,), {}, options)

    async def tell(self, msg: Any, *, no_wait: bool = False) -> None:
        """Sends a message without an answer; waits only for a place in a full mailbox."""
        await self._tell(OP_MESSAGE, "", (msg,), {}, Options(DEFAULT, no_wait))

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
        self, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options = _PLAIN
    ) -> Any:
        system = self._system
        loop = asyncio.get_running_loop()
        context = current.get()
        limit = options.timeout
        if isinstance(limit, _Default):
            limit = system.default_timeout
        deadline = None if limit is None else loop.time() + limit
        if context is not None and context.deadline is not None and loop is context.cell.system.loop:
            # Nested calls inherit the remainder (R5).
            if deadline is None or context.deadline < deadline:
                deadline = context.deadline
                limit = max(0.0, deadline - loop.time())
            if limit == 0.0:
                raise PulsingTimeoutError(f"{self._label()}.{name or 'receive'} (its caller's deadline had passed)")
        trace, carried = None if context is None else context.trace, None
        if chosen.active or OTEL in modules:
            trace, carried = gather(context)
        if self.node_id != system.node_id or loop is not system.loop:
            return await remote_ask(self, op, name, args, kwargs, limit, options.no_wait, context, trace, carried)
        cell = system.cell(self.actor_id)
        if cell is None:
            raise self._missing()
        spec, args, kwargs = resolve_call(cell, op, name, args, kwargs)
        if system.debug_copy:
            args, kwargs = system.copied((args, kwargs))
        reply = LocalReply(loop, system.debug_copy)
        d = Delivery(
            loop,
            spec,
            args,
            kwargs,
            reply,
            sender=None if context is None else context.cell.id.raw,
            chain=() if context is None else context.chain_now(),
            deadline=deadline,
            limit=limit,
            trace=trace,
            carried=carried,
            no_wait=options.no_wait,
        )
        reply.delivery = d
        system.counts.local += 1
        cell.mailbox.deliver(d)
        if reply.done:
            system.inline += 1
            if system.inline % _TURN == 0:
                await asyncio.sleep(0)
            return reply.take()
        reply.future = loop.create_future()
        try:
            await reply.future
        except asyncio.CancelledError:
            d.abandon()
            raise
        return reply.take()

    async def _tell(
        self, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options = _PLAIN
    ) -> None:
        if carries_stream(args, kwargs):
            raise no_stream_in_tell(f"{self._label()}.{name or 'receive'}", args, kwargs)
        system = self._system
        loop = asyncio.get_running_loop()
        context = current.get()
        trace, carried = None if context is None else context.trace, None
        if chosen.active or OTEL in modules:
            trace, carried = gather(context)
        if self.node_id != system.node_id or loop is not system.loop:
            remote_tell(self, op, name, args, kwargs, options.no_wait, context, trace, carried)
            return
        cell = system.cell(self.actor_id)
        if cell is None:
            raise self._missing()
        spec, args, kwargs = resolve_call(cell, op, name, args, kwargs)
        if system.debug_copy:
            args, kwargs = system.copied((args, kwargs))
        failure = _TellReply()
        d = Delivery(
            loop,
            spec,
            args,
            kwargs,
            failure,
            sender=None if context is None else context.cell.id.raw,
            trace=trace,
            carried=carried,
            no_wait=options.no_wait,
            one_way=True,
        )
        system.counts.local += 1
        if cell.mailbox.full and not options.no_wait:
            room = d.acceptance()
            cell.mailbox.deliver(d)
            try:
                await room
            except asyncio.CancelledError:
                d.abandon()
                raise
        else:
            # Never run here and now: a tell returns before its message is handled.
            cell.mailbox.post(d)
        if options.no_wait and failure.failure is not None:
            raise failure.failure

    def _label(self) -> str:
        return self._name or str(self.actor_id)

    def _missing(self) -> Exception:
        if self._system.is_shut_down:
            return SystemShutDownError("the actor system is shut down")
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
