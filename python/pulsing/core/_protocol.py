"""Calls of protocols other than Python's own, while their actor answers them."""

from __future__ import annotations

import asyncio

from pulsing.core._context import CallContext


class ProtocolRun(CallContext):
    """One `Actor.on_protocol_call` that runs, and the surroundings of the calls that it makes."""

    task: asyncio.Task[None] | None = None
    """What it runs in."""
    begun = False
    """Whether its task has run."""
    cancelled = False
    """Whether it was cancelled before that, and is not to begin."""

    def cancel(self, _: object = None) -> None:
        """Ends it, begun or not. Takes the event that tells of a caller that gave up, too."""
        # Cancelled before its first step, a task runs no line of its work, which has to leave things in order.
        self.cancelled = True
        if self.begun and self.task is not None:
            self.task.cancel()


__all__ = ["ProtocolRun"]
