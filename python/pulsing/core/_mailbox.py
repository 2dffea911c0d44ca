"""The messages that wait for one actor (R2, R3, R14)."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from pulsing.core._life import DRAINING, OPEN
from pulsing.core._refusals import deadlock, mailbox_full, stopped

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._delivery import Delivery

CAPACITY = 256
"""Messages that may wait in a mailbox (R3)."""


_NOTHING: deque[Delivery] = deque(maxlen=0)
"""In place of queues that few actors need: an empty deque takes 760 bytes."""


class Mailbox:
    """Takes an actor's messages in order, and starts each as soon as the actor may run it."""

    __slots__ = ("_cell", "_overflow", "_pump_scheduled", "capacity", "signals", "waiting")

    def __init__(self, cell: Cell, capacity: int) -> None:
        self._cell = cell
        self.capacity = capacity
        self.waiting = _NOTHING
        """Messages that have a place."""
        self._overflow = _NOTHING
        self.signals = _NOTHING
        """Messages of the runtime itself."""
        self._pump_scheduled = False

    @property
    def depth(self) -> int:
        """Messages that wait."""
        return len(self.waiting) + len(self._overflow) + len(self.signals)

    @property
    def full(self) -> bool:
        """Whether the next message would not fit."""
        return len(self.waiting) >= self.capacity

    def deliver(self, d: Delivery) -> None:
        """Takes a message: starts it, lets it wait, or refuses it. A sync method may have answered on return."""
        cell = self._cell
        if cell.state >= DRAINING:
            self._refuse(d)
            return
        spec = d.spec
        raw = cell.raw
        handlers = cell.handlers
        if d.chain and handlers.exclusive is not None and raw in d.chain:
            if spec.exclusive:
                d.fail(deadlock(cell, d.chain))
                return
            # The chain holds our exclusive slot: waiting behind other messages for that slot would be a deadlock, too.
            handlers.start(d)
            return
        if d.sender == raw and not spec.exclusive and cell.state == OPEN and handlers.full:
            handlers.start(d)
            return
        if not self.waiting and handlers.can_start(spec):
            handlers.start(d)
        elif len(self.waiting) < self.capacity:
            self._append(d)
            cell.system.counts.waiting += 1
            d.arm()
        elif d.no_wait:
            d.fail(mailbox_full(cell, self.capacity))
        else:
            # Whoever sent it waits: an ask for its answer, a tell for its place.
            if self._overflow is _NOTHING:
                self._overflow = deque()
            self._overflow.append(d)
            cell.system.counts.waiting += 1
            d.arm()

    def holds_back(self, d: Delivery) -> bool:
        """Whether `d`, just delivered, waits for a place."""
        return bool(self._overflow) and self._overflow[-1] is d

    def post(self, d: Delivery) -> None:
        """`deliver`, but the handler begins in a later turn of the loop."""
        cell = self._cell
        if cell.state >= DRAINING:
            self._refuse(d)
        elif len(self.waiting) < self.capacity:
            self._append(d)
            cell.system.counts.waiting += 1
            self.pump_soon()
        else:
            self.deliver(d)

    def signal(self, d: Delivery) -> None:
        """Takes a message of the runtime itself, which passes those that wait (R4)."""
        if self._cell.state < DRAINING:
            if self.signals is _NOTHING:
                self.signals = deque()
            self.signals.append(d)
            self._cell.system.counts.waiting += 1
            self.pump_soon()

    def pump(self) -> None:
        """Starts what waits and may run."""
        self._pump_scheduled = False
        waiting = self.waiting
        handlers = self._cell.handlers
        system = self._cell.system
        while self.signals and handlers.can_start(self.signals[0].spec):
            d = self.signals.popleft()
            system.counts.waiting -= 1
            handlers.start(d)
        while waiting and handlers.can_start(waiting[0].spec):
            d = waiting.popleft()
            system.counts.waiting -= 1
            if not d.expired():
                handlers.start(d)
            if self._overflow:
                self._admit()

    def pump_soon(self) -> None:
        """`pump` in a turn of its own, if anything waits."""
        if (self.waiting or self.signals) and not self._pump_scheduled and self._cell.state in (OPEN, DRAINING):
            self._pump_scheduled = True
            self._cell.system.loop.call_soon(self.pump)

    def forget(self, d: Delivery) -> None:
        """Takes a message back that has not started."""
        for queue in (self.waiting, self._overflow):
            with contextlib.suppress(ValueError):
                queue.remove(d)
                self._cell.system.counts.waiting -= 1
                break
        self._admit()
        self.pump_soon()

    def refuse_all(self) -> None:
        """The actor has stopped: nothing that waits will run."""
        system = self._cell.system
        system.counts.waiting -= len(self.signals)
        self.signals.clear()
        for queue in (self.waiting, self._overflow):
            while queue:
                d = queue.popleft()
                system.counts.waiting -= 1
                self._refuse(d)

    def _append(self, d: Delivery) -> None:
        if self.waiting is _NOTHING:
            self.waiting = deque()
        self.waiting.append(d)

    def _refuse(self, d: Delivery) -> None:
        self._cell.system.counts.dead_letters += 1
        d.fail(stopped(self._cell, begun=False))

    def _admit(self) -> None:
        while self._overflow and len(self.waiting) < self.capacity:
            d = self._overflow.popleft()
            self._append(d)
            d.admitted()
