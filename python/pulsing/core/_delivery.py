"""One message on its way through an actor: its deadline, its cancellation, its one answer (R1, R5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pulsing.core._context import CallContext
from pulsing.core._dispatch import MethodSpec
from pulsing.core._errors import refuse_as
from pulsing.core._reply import Reply
from pulsing.exceptions import PulsingTimeoutError

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._timers import Timer

WAITING, RUNNING, DONE = range(3)


class Delivery(CallContext):
    """A message, from its arrival to its answer, and the surroundings of its handler.

    Args:
        cell: The actor that it is for.
        spec: How its handler runs.
        args: Positional arguments.
        kwargs: Keyword arguments.
        reply: Where the answer goes.

    Attributes:
        sender: Raw id of the calling actor.
        limit: The whole limit in seconds, for messages.
        carried: Context variables that travel with the call; None: the handler's context needs nothing.
        no_wait: Refuse instead of waiting in a full mailbox.
        one_way: Nobody waits for the answer.
        site: File and line that sent it, or another node's words for that, of a message that nobody waits for.
    """

    sender: bytes | None = None
    limit: float | None = None
    carried: dict[str, Any] | None = None
    no_wait = False
    one_way = False
    site: tuple[str, int] | str | None = None
    state = WAITING
    task: asyncio.Task[None] | None = None
    """The task of its handler, from the handler's first step on."""
    cancel_reason: BaseException | None = None
    on_end: Callable[[], None] | None = None
    """Called once, when nothing may follow."""
    on_admitted: Callable[[], None] | None = None
    """Called once, when it has a place; not if it ends before."""
    _timer: Timer | None = None
    _accepted: asyncio.Future[None] | None = None

    def __init__(
        self,
        cell: Cell,
        spec: MethodSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reply: Reply,
    ) -> None:
        # Not through the base class: every message passes here.
        self.cell = cell
        self.spec = spec
        self.args = args
        self.kwargs = kwargs
        self.reply = reply

    @property
    def delivery(self) -> Delivery:
        """The message itself."""
        return self

    def chain_now(self) -> tuple[bytes, ...]:
        """The chain for a call made now: without us once our exclusive turn is over, as in a background task."""
        if self.chain and self.cell.handlers.exclusive is not self:
            return self.chain[:-1] if self.chain[-1] == self.cell.raw else self.chain
        return self.chain

    def value(self, value: Any) -> None:
        """Answers with a value."""
        if self.state != DONE:
            if self._timer is None and self._accepted is None and self.on_end is None:
                self.state = DONE
            else:
                self.finish()
            self.reply.value(value)

    def fail(self, error: BaseException) -> None:
        """Answers with an error, or fails the stream that has begun."""
        if self.state != DONE:
            self.finish()
            self.reply.error(error)

    def finish(self) -> None:
        """Nothing may follow."""
        self.state = DONE
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._accepted is not None:
            self._release()
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()

    def arm(self) -> None:
        """Starts the clock, if there is a deadline and it does not run already."""
        if self.deadline is not None and self._timer is None and self.state != DONE:
            self._timer = self.cell.system.timers.at(self.deadline, self._expire)

    def disarm(self) -> None:
        """Stops the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.deadline = None

    def expired(self) -> bool:
        """Answers with the deadline error if the deadline has passed."""
        if self.deadline is None or self.cell.system.loop.time() < self.deadline:
            return False
        self._expire()
        return True

    def _expire(self) -> None:
        self._timer = None
        what = f"{self.cell.label}.{self.spec.name}"
        if self.state == WAITING:
            what += self.cell.handlers.ahead()
        limit = self.limit or 0.0
        error = refuse_as(PulsingTimeoutError(what, round(limit * 1000)), "timeout", what, limit)
        self.cancel(error)

    def cancel(self, reason: BaseException) -> None:
        """Ends the message, started or not; `reason` is what its caller gets."""
        if self.state == DONE:
            return
        waiting = self.state == WAITING
        self.cancel_reason = reason
        self.fail(reason)
        if waiting:
            self.cell.mailbox.forget(self)
        elif self.task is not None:
            # Before its first step it has none here: cancelled then, a task ends without running any of its code, and
            # would not put the actor's books in order; it sees by itself that it is too late.
            self.task.cancel()

    def abandon(self) -> asyncio.Task[None] | None:
        """The caller has gone. Returns the handler's task, which is ending."""
        from pulsing.core._refusals import stopped

        if self.state == DONE:
            return None
        self.cancel(stopped(self.cell))
        return self.task if self.task is not asyncio.current_task() else None

    def admitted(self) -> None:
        """There is room for it in the mailbox, or it has begun."""
        on_admitted, self.on_admitted = self.on_admitted, None
        if on_admitted is not None:
            on_admitted()
        self._release()

    def _release(self) -> None:
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(None)

    def acceptance(self) -> asyncio.Future[None]:
        """Done when the message has a place in the mailbox, or has ended."""
        self._accepted = self.cell.system.loop.create_future()
        return self._accepted
