"""What a running handler inherits to the calls it makes: its chain, its deadline, its trace."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._delivery import Delivery


class CallContext:
    """The surroundings of one handler.

    Attributes:
        cell: The actor that runs.
        delivery: The message it handles; None in ``on_start``, ``on_stop`` and protocol calls.
        chain: Raw ids of actors whose exclusive slot this chain of calls holds, outermost first (R11).
        deadline: Loop time at which the caller stops waiting; None for ever (R5).
        trace: W3C ``traceparent``, handed on untouched.
    """

    __slots__ = ("cell", "chain", "deadline", "delivery", "trace")

    def __init__(
        self,
        cell: Cell,
        delivery: Delivery | None = None,
        chain: tuple[bytes, ...] = (),
        deadline: float | None = None,
        trace: str | None = None,
    ) -> None:
        self.cell = cell
        self.delivery = delivery
        self.chain = chain
        self.deadline = deadline
        self.trace = trace

    def chain_now(self) -> tuple[bytes, ...]:
        """The chain for a call made now: without us once our exclusive turn is over, as in a background task."""
        d = self.delivery
        if d is not None and self.chain and self.cell.handlers.exclusive is not d:
            return self.chain[:-1] if self.chain[-1] == self.cell.id.raw else self.chain
        return self.chain


current: ContextVar[CallContext | None] = ContextVar("pulsing_call", default=None)
