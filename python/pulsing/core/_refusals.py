"""What a call gets that the runtime itself refuses or ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulsing.core._errors import refuse_as
from pulsing.exceptions import ActorStoppedError, CallCancelledError, DeadlockError, MailboxFull, PulsingError

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._delivery import Delivery


def stopped(cell: Cell, how: str = "stopped", *, begun: bool = True) -> PulsingError:
    """What callers of a stopped actor get; it may have `begun` with the message, unless it says that it had not."""
    if cell.loss is not None:
        how = f"stopped ({cell.loss})"
    if begun:
        return refuse_as(ActorStoppedError(f"actor {cell.label} {how} before it answered", cell.label), "actor_stopped")
    text = f"actor {cell.label} {how} before it answered; it had not begun with this message"
    error = ActorStoppedError(text, cell.label)
    error.state_changed = "no"
    return refuse_as(error, "actor_stopped", "", 1.0)


def deadlock(cell: Cell, chain: tuple[bytes, ...]) -> PulsingError:
    """What a call gets that would wait on its own chain."""
    names = [cell.system.label_of(raw) for raw in (*chain[chain.index(cell.id.raw) :], cell.id.raw)]
    text = " -> ".join(names)
    return refuse_as(DeadlockError(f"deadlock: {text} (a serial actor would wait on itself)"), "deadlock", text)


def mailbox_full(cell: Cell, capacity: int) -> PulsingError:
    """What a call with `no_wait` gets that finds no room."""
    text = f"mailbox of actor {cell.label} is full ({capacity} messages wait); wait, or call without no_wait"
    return refuse_as(MailboxFull(text), "mailbox_full", "", capacity)


def cancelled_itself(cell: Cell, d: Delivery) -> PulsingError:
    """What the caller of a handler gets that ended by a cancellation of its own."""
    return CallCancelledError(f"the handler {cell.label}.{d.spec.name} was cancelled by its own side")
