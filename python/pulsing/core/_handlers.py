"""The handlers of one actor that run: how a message becomes a call of its method (R12, R14)."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextvars import copy_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pulsing.core._context import current
from pulsing.core._delivery import DONE, RUNNING, Delivery
from pulsing.core._dispatch import MethodSpec
from pulsing.core._eager import start_task
from pulsing.core._errors import as_raised
from pulsing.core._life import DRAINING, OPEN, STOPPING
from pulsing.core._producers import as_items, stream_type
from pulsing.core._propagate import enter
from pulsing.core._protocol import ProtocolRun
from pulsing.core._refusals import cancelled_itself, stopped
from pulsing.core._reply import LocalReply
from pulsing.core._threads import run_in_thread

if TYPE_CHECKING:
    from pulsing.core._cell import Cell

_log = logging.getLogger("pulsing")

MAX_CONCURRENCY = 256
"""Handlers of one actor that may interleave (R14)."""
_NESTING = 8
"""First steps within first steps, as when actors call each other in turn; deeper ones wait for the loop, not to exhaust
the stack.
"""


_TAKING = frozenset({OPEN, DRAINING})
"""States in which an actor's messages may start."""
_NOBODY: MappingProxyType[Delivery, None] = MappingProxyType({})
"""In place of dicts that few actors of many need: the collector looks at each."""


class Handlers:
    """Runs an actor's messages: sync methods inline, what may suspend in tasks, blocking methods in threads."""

    __slots__ = ("_cell", "_protocol_runs", "_unstarted", "exclusive", "max_concurrency", "running")

    def __init__(self, cell: Cell, max_concurrency: int) -> None:
        self._cell = cell
        self.max_concurrency = max_concurrency
        self.running: dict[Delivery, None] | MappingProxyType[Delivery, None] = _NOBODY
        """Messages whose handlers have a task, in the order in which they began: that in which they are cancelled."""
        self.exclusive: Delivery | None = None
        """The message that has the exclusive slot."""
        self._unstarted = 0
        self._protocol_runs: dict[ProtocolRun, None] | None = None

    @property
    def full(self) -> bool:
        """Whether no more handlers may interleave."""
        return len(self.running) >= self.max_concurrency

    @property
    def idle(self) -> bool:
        """Whether no handler runs or is about to."""
        return not self.running and self._unstarted == 0

    def ahead(self) -> str:
        """What a message that has not begun waits for, as the end of a sentence about it."""
        if self.exclusive is not None:
            return f", waiting for {self._cell.label}.{self.exclusive.spec.name} to return"
        return f", waiting for one of {len(self.running)} handlers to return" if self.full else ""

    def can_start(self, spec: MethodSpec) -> bool:
        """Whether a message for this method may run at once."""
        if len(self.running) >= self.max_concurrency:
            return False
        if self._cell.state not in _TAKING:
            return False
        if spec.exclusive:
            # It would overtake a task that was created but has not begun.
            return self.exclusive is None and self._unstarted == 0
        return True

    def start(self, d: Delivery) -> None:
        """Runs the message, or begins to: an async handler runs its first step before this returns."""
        if d.state == DONE:
            return
        d.state = RUNNING
        cell = self._cell
        watch = cell.system.watch
        if watch.asleep:
            watch.wake()
        spec = d.spec
        if spec.exclusive:
            self.exclusive = d
            # From here on whoever calls us in this chain would wait on itself.
            d.chain = (*d.chain, cell.raw)
        if spec.kind != "sync" or spec.blocking:
            self._begin(d, self._handle(d))
            return
        try:
            result = cell.context.copy().run(_call_in, cell, d)
        except BaseException as error:  # noqa: BLE001 - whatever the user's method raises goes to its caller
            self._leave_exclusive(d)
            self._raised(d, error)
        else:
            if type(result) in _PLAIN or _is_plain(result):
                if self.exclusive is d:
                    self.exclusive = None
                d.value(result)
            else:
                self._begin(d, self._finish(d, result))
        if cell.mailbox.waiting or cell.mailbox.signals:
            cell.mailbox.pump_soon()

    def _begin(self, d: Delivery, coroutine: Coroutine[Any, Any, None]) -> None:
        cell = self._cell
        system = cell.system
        if not isinstance(self.running, dict):
            self.running = {}
        self.running[d] = None
        system.watch.running += 1
        self._unstarted += 1
        if system.nesting < _NESTING:
            system.nesting += 1
            try:
                start_task(system.loop, coroutine, cell.context.copy(), d)
            finally:
                system.nesting -= 1
        else:
            system.loop.create_task(coroutine, context=cell.context.copy())
        if d.state != DONE:
            d.arm()

    def _enter(self, d: Delivery) -> bool:
        """The first step of a handler's task. False: its message has ended already."""
        self._unstarted -= 1
        cell = self._cell
        current.set(d)
        if d.carried is not None:
            enter(d)
        if d.task is None:
            d.task = asyncio.current_task(cell.system.loop)
        if cell.mailbox.waiting or cell.mailbox.signals:
            # What is exclusive waited for this beginning.
            cell.mailbox.pump_soon()
        return d.state != DONE

    def _leave(self, d: Delivery) -> None:
        """The last step of a handler's task."""
        if self.exclusive is d:
            self.exclusive = None
        if isinstance(self.running, dict):
            self.running.pop(d, None)
        self._cell.system.watch.running -= 1
        if d.state != DONE:
            d.finish()
        # A task that only we know has nobody left to tell of its end.
        d.task = None
        mailbox = self._cell.mailbox
        if mailbox.waiting or mailbox.signals:
            mailbox.pump_soon()

    async def _handle(self, d: Delivery) -> None:
        """The task of a method that may suspend."""
        try:
            if self._enter(d):
                spec = d.spec
                function = getattr(self._cell.instance, spec.name)
                if spec.blocking and spec.kind == "sync":
                    result = await self._in_thread(d, function, *d.args, **d.kwargs)
                elif spec.kind == "async":
                    result = await function(*d.args, **d.kwargs)
                else:
                    result = function(*d.args, **d.kwargs)
                if type(result) in _PLAIN:
                    d.value(result)
                else:
                    await self._answer(d, result)
        except BaseException as error:  # noqa: BLE001 - as above
            self._raised(d, error)
        finally:
            self._leave(d)

    async def _finish(self, d: Delivery, result: Any) -> None:
        """The task of an inline method that returned something to wait for or to iterate."""
        try:
            if self._enter(d):
                await self._answer(d, result)
            elif inspect.iscoroutine(result):
                result.close()
        except BaseException as error:  # noqa: BLE001 - as above
            self._raised(d, error)
        finally:
            self._leave(d)

    async def _in_thread(self, d: Delivery, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def run() -> tuple[Any, BaseException | None]:
            try:
                return await run_in_thread(copy_context(), function, *args, **kwargs), None
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - out of a task of its own an exit would end the loop
                return None, error

        job = asyncio.ensure_future(run())
        try:
            result, error = await asyncio.shield(job)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and the actor stays busy until it returns; the caller need not wait for
            # that.
            d.fail(d.cancel_reason or cancelled_itself(self._cell, d))
            job.add_done_callback(lambda job: self._ended_late(d, job))
            if self._cell.state < STOPPING:
                await asyncio.wait([job])
                _, error = job.result()
                if error is not None:
                    # It counts as any failure does, though nobody waits for it.
                    raise error from None
            raise
        if error is not None:
            raise error
        return result

    def _ended_late(self, d: Delivery, job: asyncio.Future[tuple[Any, BaseException | None]]) -> None:
        error = None if job.cancelled() else job.result()[1]
        if error is not None:
            _log.error("%s.%s failed after its caller had gone", self._cell.label, d.spec.name, exc_info=error)

    async def _answer(self, d: Delivery, result: Any) -> None:
        if inspect.isawaitable(result):
            result = await result
        if _is_plain(result):
            d.value(result)
            return
        # A stream has no total limit (R5), and it is no longer this handler's turn.
        d.disarm()
        if not d.spec.blocking:
            self._leave_exclusive(d)
            self._cell.mailbox.pump_soon()
        # Streams to other nodes are counted where they enter and leave the network.
        local = isinstance(d.reply, LocalReply)
        system = self._cell.system
        system.counts.streams += local
        # An asynchronous generator closes as one: no second around it, which would cost each item.
        whole: Any = result if inspect.isasyncgen(result) else None
        items: AsyncGenerator[Any, None] = whole or as_items(result, _in_thread_plain if d.spec.blocking else None)
        reply = d.reply
        try:
            reply.start(stream_type(result))
            async for item in items:
                while not reply.try_send(item):
                    await reply.wait_credit()
                system.counts.stream_items += local
            reply.end()
        finally:
            await items.aclose()
        d.finish()

    def _leave_exclusive(self, d: Delivery) -> None:
        if self.exclusive is d:
            self.exclusive = None

    def _raised(self, d: Delivery, error: BaseException) -> None:
        # Without an answer the caller would wait for ever; and what escapes from here also costs others, whose events
        # this turn of the loop still has to deliver. Not only users raise it: a panic of Rust code is no Exception.
        cell = self._cell
        if isinstance(error, asyncio.CancelledError):
            d.fail(d.cancel_reason or cancelled_itself(cell, d))
        elif isinstance(error, SystemExit):
            d.fail(stopped(cell))
            cell.life.ended_itself(error)
        elif isinstance(error, KeyboardInterrupt):
            d.fail(stopped(cell))
            raise error
        else:
            if d.one_way:
                _log.error(
                    "%s.%s, told %s, failed", cell.label, d.spec.name, whence(cell, d.site, d.sender), exc_info=error
                )
            d.fail(as_raised(error))
            cell.life.failed(error)

    # -- the end of what runs -----------------------------------------------------------------------------------------

    def cancel_all(self, reason: Callable[[], BaseException], but: Delivery | None = None) -> None:
        """Cancels every handler except `but`; their callers get `reason`."""
        for d in list(self.running):
            if d is not but:
                d.cancel(reason())

    async def join(self, limit: float | None = None, but: Delivery | None = None) -> None:
        """Returns when no handler but `but` runs, or after `limit` seconds."""
        loop = self._cell.system.loop
        deadline = None if limit is None else loop.time() + limit
        while True:
            tasks = [d.task for d in self.running if d is not but and d.task is not None]
            tasks = [task for task in tasks if not task.done() and task is not asyncio.current_task()]
            if not tasks:
                return
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return
            await asyncio.wait(tasks, timeout=left)

    # -- protocols ----------------------------------------------------------------------------------------------------

    def run_protocol(self, run: ProtocolRun, work: Coroutine[Any, Any, None]) -> None:
        """Runs a protocol call's `work`, whose last step is `protocol_over`, in a task."""
        system = self._cell.system
        if self._protocol_runs is None:
            self._protocol_runs = {}
        self._protocol_runs[run] = None
        watch = system.watch
        watch.running += 1
        if watch.asleep:
            watch.wake()
        # Not eagerly: nearly all of these wait for something, and a task that does is cheaper begun by the loop.
        run.task = system.loop.create_task(work, context=self._cell.context.copy())

    def protocol_over(self, run: ProtocolRun) -> None:
        """A protocol call has ended."""
        if self._protocol_runs is not None:
            self._protocol_runs.pop(run, None)
        self._cell.system.watch.running -= 1
        # Its context leads back to it: what goes round in circles is left to the collector.
        run.task = None

    def cancel_protocols(self) -> None:
        """Cancels the protocol calls that still run."""
        for run in list(self._protocol_runs or ()):
            run.cancel()


def whence(cell: Cell, site: tuple[str, int] | str | None, sender: bytes | None) -> str:
    """Where a message came from that nobody waits for: who reads of its failure can look there."""
    if site is not None:
        return f"at {site}" if isinstance(site, str) else f"at {site[0]}:{site[1]}"
    return f"by actor {cell.system.label_of(sender)}" if sender is not None else "from elsewhere"


def _call_in(cell: Cell, d: Delivery) -> Any:
    current.set(d)
    if d.carried is not None:
        enter(d)
    return getattr(cell.instance, d.spec.name)(*d.args, **d.kwargs)


async def _in_thread_plain(function: Callable[..., Any], *args: Any) -> Any:
    return await run_in_thread(copy_context(), function, *args)


def _is_plain(result: Any) -> bool:
    """Whether `result` is an answer by itself, not something to await or to iterate."""
    if type(result) in _PLAIN:
        return True
    return not (
        inspect.isawaitable(result)
        or inspect.isgenerator(result)
        or isinstance(result, AsyncIterator)
        or stream_type(result) is not None
    )


_PLAIN = frozenset({type(None), int, float, str, bytes, bool, list, dict, tuple, set})
