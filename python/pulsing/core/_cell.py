"""One actor: its mailbox, its running handlers, its life."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from pulsing.core._actor import Delayer, nothing
from pulsing.core._context import CallContext, current
from pulsing.core._delivery import DONE, RUNNING, Delivery
from pulsing.core._dispatch import MethodSpec, methods_of
from pulsing.core._errors import refuse_as
from pulsing.core._ids import ActorId
from pulsing.core._producers import as_items, stream_type
from pulsing.core._reply import LocalReply
from pulsing.core._supervision import RestartBudget, RestartPolicy
from pulsing.core._threads import run_in_thread
from pulsing.exceptions import (
    ActorStoppedError,
    CallCancelledError,
    DeadlockError,
    MailboxFull,
    PulsingActorError,
    PulsingBusinessError,
    PulsingError,
)

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

_log = logging.getLogger("pulsing")

CAPACITY = 256
"""Messages that may wait in a mailbox (R3)."""
MAX_CONCURRENCY = 256
"""Handlers of one actor that may interleave (R14)."""
SLOW_CALL = 0.1
"""Seconds after which an inline method is reported: it stalled the whole loop."""
_HOOK_LIMIT = 60.0
"""Seconds that `on_stop` may take; a Worker drains in it."""

_OVERFLOW = 16
"""Mailboxes full of messages sent by `tell` from elsewhere that are kept beside the mailbox."""

STARTING, OPEN, RESTARTING, STOPPING, STOPPED = range(5)


class Cell:
    """An actor on its loop. Everything here runs on that loop's thread."""

    def __init__(
        self,
        system: ActorSystem,
        factory: Callable[[], Any],
        *,
        name: str | None,
        policy: RestartPolicy,
        blocking: bool = False,
        mailbox: int = CAPACITY,
        max_concurrency: int = MAX_CONCURRENCY,
    ) -> None:
        self.system = system
        self.id = ActorId.generate()
        self.name = name
        self.instance: Any = None
        self.metadata: dict[str, str] = {}
        self.capacity = mailbox
        self.max_concurrency = max_concurrency
        self.state = STARTING
        self.key = 0
        self.internal = False
        self.public = False
        self.restarts = 0
        self._factory = factory
        self._blocking = blocking
        self._policy = policy
        self._budget = RestartBudget(policy)
        self._context = copy_context()
        self._waiting: deque[Delivery] = deque()
        self._overflow: deque[Delivery] = deque()
        self._running: set[Delivery] = set()
        self._protocol_tasks: set[asyncio.Task[None]] = set()
        self._exclusive: Delivery | None = None
        self._unstarted = 0
        self._pump_scheduled = False
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._end: asyncio.Future[None] | None = None
        self._restart_task: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """How messages name it."""
        return self.name or str(self.id)

    @property
    def class_name(self) -> str:
        """``module.Class`` of the instance."""
        cls = type(self.instance)
        return f"{cls.__module__}.{cls.__qualname__}"

    @property
    def methods(self) -> dict[str, MethodSpec]:
        """Its remote methods."""
        return methods_of(type(self.instance))

    @property
    def protocols(self) -> frozenset[int]:
        """Codecs whose calls the actor takes raw, in `on_protocol_call`."""
        return frozenset(getattr(type(self.instance), "__pulsing_protocols__", ()))

    @property
    def depth(self) -> int:
        """Messages that wait."""
        return len(self._waiting) + len(self._overflow)

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Makes the instance and runs its `on_start`; raises what they raise (R8)."""
        await self._create()
        self.open()

    async def _create(self) -> None:
        context = self._context.copy()
        if self._blocking:
            instance = await run_in_thread(context, self._factory)
        else:
            instance = self._enter(self._factory)
            if inspect.isawaitable(instance):
                instance = await instance
        self.adopt(instance)
        await self.run_on_start()

    async def run_on_start(self) -> None:
        """Runs the instance's `on_start`; raises what it raises."""
        await self._hook("on_start", self.id)

    def adopt(self, instance: Any) -> None:
        """Takes `instance` as the actor's object and tells it who it is."""
        self.instance = instance
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(instance, "_pulsing_cell", self)
        if getattr(instance, "delayed", None) is None:
            with contextlib.suppress(AttributeError, TypeError):
                object.__setattr__(instance, "delayed", Delayer(self))
        metadata = getattr(instance, "metadata", None)
        if callable(metadata):
            found = metadata()
            if isinstance(found, dict):
                self.metadata = {**{str(k): str(v) for k, v in found.items()}, **self.metadata}

    def open(self) -> None:
        """Starts taking messages."""
        self.state = OPEN
        self._pump()

    def _enter(self, function: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            current.set(CallContext(self))
            return function(*args)

        return self._context.copy().run(run)

    async def _hook(self, name: str, *args: Any) -> None:
        hook = getattr(self.instance, name, None)
        if not callable(hook):
            return
        try:
            takes = len(inspect.signature(hook).parameters) > 0
        except (TypeError, ValueError):
            takes = True
        given = args if takes else ()

        async def run() -> None:
            current.set(CallContext(self))
            result = hook(*given)
            if inspect.isawaitable(result):
                await result

        if self._blocking and not inspect.iscoroutinefunction(hook):
            await run_in_thread(self._context.copy(), hook, *given)
            return
        await self.system.loop.create_task(run(), context=self._context.copy())

    # -- mailbox ------------------------------------------------------------------------------------------------------

    def deliver(self, d: Delivery) -> None:
        """Takes a message: starts it, lets it wait, or refuses it. A sync method may have answered on return."""
        if self.state >= STOPPING:
            self._refuse_stopped(d)
            return
        d.cell = self
        spec = d.spec
        raw = self.id.raw
        if raw in d.chain and self._exclusive is not None:
            if spec.exclusive:
                d.fail(deadlock(self, d.chain))
                return
            # The chain holds our exclusive slot: waiting behind other messages for that slot would be a deadlock, too.
            self._start(d)
            return
        if d.sender == raw and not spec.exclusive and self.state == OPEN and len(self._running) >= self.max_concurrency:
            self._start(d)
            return
        if not self._waiting and self._can_start(spec):
            self._start(d)
        elif len(self._waiting) < self.capacity:
            self._waiting.append(d)
            d.arm()
        elif d.no_wait:
            text = (
                f"mailbox of actor {self.label} is full ({self.capacity} messages wait); wait, or call without no_wait"
            )
            d.fail(refuse_as(MailboxFull(text), "mailbox_full", "", self.capacity))
        elif d.one_way and not d.awaited and len(self._overflow) >= _OVERFLOW * self.capacity:
            # Nobody can be made to wait for a tell that came through the network: beyond this it is lost.
            self.system.counts.dead_letters += 1
            _log.warning("mailbox of actor %s is full: a message sent by tell is dropped", self.label)
            d.finish()
        else:
            self._overflow.append(d)
            d.arm()

    def post(self, d: Delivery) -> None:
        """`deliver`, but an inline method runs in a turn of its own."""
        if self.state < STOPPING and not d.spec.exclusive:
            self.deliver(d)
        elif self.state >= STOPPING:
            self._refuse_stopped(d)
        elif len(self._waiting) < self.capacity:
            d.cell = self
            self._waiting.append(d)
            self._pump_soon()
        else:
            self.deliver(d)

    def holds(self, d: Delivery) -> bool:
        """Whether this message has the exclusive slot."""
        return self._exclusive is d

    @property
    def full(self) -> bool:
        """Whether the next message would not fit."""
        return len(self._waiting) >= self.capacity

    def _refuse_stopped(self, d: Delivery) -> None:
        self.system.counts.dead_letters += 1
        d.fail(stopped(self))

    def _can_start(self, spec: MethodSpec) -> bool:
        if self.state != OPEN or len(self._running) >= self.max_concurrency:
            return False
        if spec.exclusive:
            # An inline method would overtake a task that was created but has not begun.
            return self._exclusive is None and self._unstarted == 0
        return True

    def _pump(self) -> None:
        self._pump_scheduled = False
        waiting = self._waiting
        while waiting and self._can_start(waiting[0].spec):
            self._start(waiting.popleft())
            self._admit()

    def _admit(self) -> None:
        while self._overflow and len(self._waiting) < self.capacity:
            d = self._overflow.popleft()
            self._waiting.append(d)
            d.admitted()

    def _pump_soon(self) -> None:
        if self._waiting and not self._pump_scheduled and self.state == OPEN:
            self._pump_scheduled = True
            self.system.loop.call_soon(self._pump)

    def forget(self, d: Delivery) -> None:
        """Takes a message back that has not started."""
        for queue in (self._waiting, self._overflow):
            with contextlib.suppress(ValueError):
                queue.remove(d)
                break
        self._admit()
        self._pump_soon()

    # -- handlers -----------------------------------------------------------------------------------------------------

    def _start(self, d: Delivery) -> None:
        if d.state == DONE or d.expired():
            return
        d.state = RUNNING
        spec = d.spec
        if spec.exclusive:
            self._exclusive = d
            # From here on whoever calls us in this chain would wait on itself.
            d.chain = (*d.chain, self.id.raw)
        if spec.kind == "sync" and not spec.blocking:
            self._run_inline(d)
            return
        self._spawn(d, self._handle(d))

    def _spawn(self, d: Delivery, coroutine: Any) -> None:
        self._running.add(d)
        self._unstarted += 1
        d.task = self.system.loop.create_task(coroutine, context=self._context.copy())
        if d.state != DONE:
            d.arm()

    def _run_inline(self, d: Delivery) -> None:
        begun = time.perf_counter()
        try:
            result = self._context.copy().run(_call_in, self, d)
        except BaseException as error:  # noqa: BLE001 - whatever the user's method raises goes to its caller
            self._leave_exclusive(d)
            self._raised(d, error)
        else:
            if _is_plain(result):
                self._leave_exclusive(d)
                d.value(result)
            else:
                self._spawn(d, self._finish(d, result))
        took = time.perf_counter() - begun
        if took > SLOW_CALL:
            _log.warning(
                "%s.%s blocked the event loop for %.2f s: make it async, or mark it @pul.blocking",
                self.label,
                d.spec.name,
                took,
            )
        self._pump_soon()

    async def _handle(self, d: Delivery) -> None:
        """The task of a method that may suspend."""
        await self._guard(d, self._call(d))

    async def _finish(self, d: Delivery, result: Any) -> None:
        """The task of an inline method that returned something to wait for or to iterate."""
        await self._guard(d, self._answer(d, result))

    async def _guard(self, d: Delivery, work: Coroutine[Any, Any, None]) -> None:
        self._unstarted -= 1
        d.begun = True
        self._pump_soon()
        current.set(CallContext(self, d, d.chain, d.deadline, d.trace))
        try:
            if d.state == DONE:
                work.close()
            else:
                await work
        except BaseException as error:  # noqa: BLE001 - as above
            self._raised(d, error)
        finally:
            self._leave_exclusive(d)
            self._running.discard(d)
            d.finish()
            if not self._running:
                for waiter in self._idle_waiters:
                    if not waiter.done():
                        waiter.set_result(None)
                self._idle_waiters.clear()
            self._pump_soon()

    async def _call(self, d: Delivery) -> None:
        spec = d.spec
        function = getattr(self.instance, spec.name)
        if spec.blocking and spec.kind == "sync":
            result = await self._in_thread(d, function, *d.args, **d.kwargs)
        else:
            result = function(*d.args, **d.kwargs)
        await self._answer(d, result)

    async def _in_thread(self, d: Delivery, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        job = asyncio.ensure_future(run_in_thread(copy_context(), function, *args, **kwargs))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and the actor stays busy until it returns; the caller need not wait for
            # that.
            d.fail(d.cancel_reason or _cancelled_itself(self, d))
            if self.state < STOPPING:
                await asyncio.wait([job])
            raise

    async def _answer(self, d: Delivery, result: Any) -> None:
        if inspect.isawaitable(result):
            result = await result
        if _is_plain(result):
            d.value(result)
            return
        # A stream has no total limit (R5), and it is no longer this handler's turn.
        d.disarm()
        context = current.get()
        if context is not None:
            context.deadline = None
        if not d.spec.blocking:
            self._leave_exclusive(d)
            self._pump_soon()
        # Streams to other nodes are counted where they enter and leave the network.
        local = isinstance(d.reply, LocalReply)
        self.system.counts.streams += local
        items = as_items(result, self._in_thread_plain if d.spec.blocking else None)
        reply = d.reply
        try:
            reply.start(stream_type(result))
            async for item in items:
                while not reply.try_send(item):
                    await reply.wait_credit()
                self.system.counts.stream_items += local
            reply.end()
        finally:
            await items.aclose()
        d.state = DONE

    async def _in_thread_plain(self, function: Callable[..., Any], *args: Any) -> Any:
        return await run_in_thread(copy_context(), function, *args)

    def _leave_exclusive(self, d: Delivery) -> None:
        if self._exclusive is d:
            self._exclusive = None

    # -- failure ------------------------------------------------------------------------------------------------------

    def _raised(self, d: Delivery, error: BaseException) -> None:
        # Without an answer the caller would wait for ever; and what escapes from here also costs others, whose events
        # this turn of the loop still has to deliver. Not only users raise it: a panic of Rust code is no Exception.
        if isinstance(error, asyncio.CancelledError):
            d.fail(d.cancel_reason or _cancelled_itself(self, d))
        elif isinstance(error, SystemExit):
            self._ended_itself(d)
        elif isinstance(error, KeyboardInterrupt):
            d.fail(stopped(self))
            raise error
        else:
            self._fail(d, error)

    def _fail(self, d: Delivery, error: BaseException) -> None:
        if d.one_way:
            _log.error("%s.%s, called by tell, failed", self.label, d.spec.name, exc_info=error)
        d.fail(error)
        if self._policy.restarts and not isinstance(error, PulsingBusinessError):
            self._restart(error)

    def _ended_itself(self, d: Delivery) -> None:
        d.fail(stopped(self))
        if self._policy.policy == "always":
            self._restart(None)
        else:
            self.system.background(self.stop(0.0))

    def _restart(self, error: BaseException | None) -> None:
        if self.state != OPEN:
            return
        self.state = RESTARTING
        for d in list(self._running):
            d.cancel(stopped(self, "was restarted"))
        self._restart_task = self.system.loop.create_task(self._restart_loop(error), context=self._context.copy())

    async def _restart_loop(self, error: BaseException | None) -> None:
        while True:
            delay = self._budget.next_delay(self.system.loop.time())
            if delay is None:
                _log.error(
                    "actor %s failed too often (%d restarts): it stops", self.label, self.restarts, exc_info=error
                )
                self._restart_task = None
                await self.stop(0.0)
                return
            _log.warning("actor %s failed: restarting it in %.2f s", self.label, delay, exc_info=error)
            await self._idle()
            await self._stop_hook()
            await asyncio.sleep(delay)
            self.restarts += 1
            self.system.counts.restarts += 1
            try:
                await self._create()
            except Exception as again:  # noqa: BLE001 - any failure of the new instance counts like one of the old
                error = again
                continue
            self._restart_task = None
            self.open()
            return

    # -- stop ---------------------------------------------------------------------------------------------------------

    async def stop(self, grace: float) -> None:
        """Ends the actor: waiting messages fail, running handlers get `grace` seconds, then are cancelled."""
        loop = self.system.loop
        if self._end is not None:
            if not self._inside():
                await asyncio.shield(self._end)
            return
        self._end = loop.create_future()
        self.state = STOPPING
        if self._restart_task is not None:
            self._restart_task.cancel()
        try:
            if not self.protocols:
                self.system.withdraw(self)
            for queue in (self._waiting, self._overflow):
                while queue:
                    self._refuse_stopped(queue.popleft())
            me = current.get()
            mine = me.delivery if me is not None and me.cell is self else None
            if grace > 0:
                await self._idle(grace, mine)
            for d in list(self._running):
                if d is not mine:
                    d.cancel(stopped(self))
            await self._idle(1.0, mine)
            # Protocol calls are the hook's to drain; it still answers new ones, and its name is withdrawn only now.
            await self._stop_hook()
            self.system.withdraw(self)
            for task in list(self._protocol_tasks):
                task.cancel()
        finally:
            self.state = STOPPED
            self.system.remove(self)
            self._end.set_result(None)

    def _inside(self) -> bool:
        me = current.get()
        return me is not None and me.cell is self

    async def _idle(self, limit: float | None = None, mine: Delivery | None = None) -> None:
        """Returns when no handler but `mine` runs, or after `limit` seconds."""
        deadline = None if limit is None else self.system.loop.time() + limit
        while True:
            tasks = [d.task for d in self._running if d is not mine and d.task is not None]
            tasks = [task for task in tasks if not task.done() and task is not asyncio.current_task()]
            if not tasks:
                return
            left = None if deadline is None else deadline - self.system.loop.time()
            if left is not None and left <= 0:
                return
            await asyncio.wait(tasks, timeout=left)

    async def _stop_hook(self) -> None:
        try:
            async with asyncio.timeout(_HOOK_LIMIT):
                await self._hook("on_stop")
        except Exception:  # noqa: BLE001 - the actor ends all the same
            _log.exception("on_stop of actor %s failed", self.label)

    # -- protocols ----------------------------------------------------------------------------------------------------

    def run_protocol(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Runs a protocol call as a task of its own."""

        async def run() -> None:
            current.set(CallContext(self))
            await work()

        task = self.system.loop.create_task(run(), context=self._context.copy())
        self._protocol_tasks.add(task)
        task.add_done_callback(self._protocol_tasks.discard)
        return task


def _call_in(cell: Cell, d: Delivery) -> Any:
    current.set(CallContext(cell, d, d.chain, d.deadline, d.trace))
    return getattr(cell.instance, d.spec.name)(*d.args, **d.kwargs)


def _is_plain(result: Any) -> bool:
    """Whether `result` is an answer by itself, not something to await or to iterate."""
    if result is None or type(result) in _PLAIN:
        return True
    return not (
        inspect.isawaitable(result)
        or inspect.isgenerator(result)
        or inspect.isasyncgen(result)
        or stream_type(result) is not None
    )


_PLAIN = frozenset({int, float, str, bytes, bool, list, dict, tuple, set})


def stopped(cell: Cell, how: str = "stopped") -> PulsingError:
    """What callers of a stopped actor get."""
    error = ActorStoppedError(f"actor {cell.label} {how} before it answered", cell.label)
    return refuse_as(error, "actor_stopped")


def deadlock(cell: Cell, chain: tuple[bytes, ...]) -> PulsingError:
    """What a call gets that would wait on its own chain."""
    names = [cell.system.label_of(raw) for raw in (*chain[chain.index(cell.id.raw) :], cell.id.raw)]
    text = " -> ".join(names)
    return refuse_as(DeadlockError(f"deadlock: {text} (a serial actor would wait on itself)"), "deadlock", text)


def _cancelled_itself(cell: Cell, d: Delivery) -> PulsingActorError | CallCancelledError:
    return CallCancelledError(f"the handler {cell.label}.{d.spec.name} was cancelled by its own side")
