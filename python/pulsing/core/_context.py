"""What a running handler inherits to the calls it makes: its chain, its deadline, its trace."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._delivery import Delivery


class CallContext:
    """The surroundings of one handler; those of a message's handler are its `Delivery` itself.

    Attributes:
        cell: The actor that runs.
        chain: Raw ids of actors whose exclusive slot this chain of calls holds, outermost first (R11).
        deadline: Loop time at which the caller stops waiting; None for ever (R5).
        trace: W3C ``traceparent``, handed on untouched.
    """

    # No slots: a message sets a third of what `Delivery` has, and what is not set costs nothing.
    chain: tuple[bytes, ...] = ()
    deadline: float | None = None
    trace: str | None = None

    def __init__(
        self, cell: Cell, chain: tuple[bytes, ...] = (), deadline: float | None = None, trace: str | None = None
    ) -> None:
        self.cell = cell
        self.chain = chain
        self.deadline = deadline
        self.trace = trace

    @property
    def delivery(self) -> Delivery | None:
        """The message that is handled; None in ``on_start``, ``on_stop`` and protocol calls."""
        return None

    def chain_now(self) -> tuple[bytes, ...]:
        """The chain for a call made now."""
        return self.chain


current: ContextVar[CallContext | None] = ContextVar("pulsing_call", default=None)
