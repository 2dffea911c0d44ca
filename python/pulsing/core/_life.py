"""The life of one actor: its start, its hooks, its restarts, its end (R4, R8, R9)."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from pulsing.core._actor import DEFAULT_HOOKS, adopt_tools
from pulsing.core._context import CallContext, current
from pulsing.core._dispatch import methods_of, receive_of
from pulsing.core._errors import text_of
from pulsing.core._refusals import stopped
from pulsing.core._supervision import RestartBudget, RestartPolicy
from pulsing.core._threads import run_in_thread
from pulsing.exceptions import CallCancelledError, PulsingBusinessError, PulsingSystemError, PulsingTimeoutError

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._delivery import Delivery
    from pulsing.core._spawn import Blueprint
    from pulsing.core._watch import Tools

_log = logging.getLogger("pulsing")

STARTING, OPEN, RESTARTING, DRAINING, DRAINING_RESTART, STOPPING, STOPPED = range(7)
"""States of a cell. From DRAINING on it takes no messages; OPEN and DRAINING start those that wait."""

STOP_GRACE = 5.0
"""Seconds running handlers get when their actor is stopped."""
_CANCEL_LIMIT = 1.0
"""Seconds that cancelled handlers get to end, and `on_stop` of a killed actor."""

_RANKS = {"drain": 0, "stop": 1, "fail": 1, "kill": 2}
"""Ways to end, by harshness: a harsher one overrides a milder."""


class Life:
    """Starts, restarts and ends an actor."""

    __slots__ = (
        "_budget",
        "_cell",
        "_changed",
        "_cut_at",
        "_end",
        "_finishing",
        "_mine",
        "_plan",
        "_policy",
        "_rank",
        "_restart_task",
        "_started",
        "_stop_due",
        "reason",
        "restarts",
        "start_timeout",
        "stop_timeout",
        "tools",
        "watchers",
    )

    def __init__(self, cell: Cell, plan: Blueprint, policy: RestartPolicy) -> None:
        self._cell = cell
        self._plan = plan
        self._policy = policy
        self._budget = RestartBudget(policy)
        self._end: asyncio.Future[None] | None = None
        self._rank = -1
        self._cut_at: float | None = None
        self._changed: asyncio.Event | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._mine: Delivery | None = None
        self._started: asyncio.Future[None] | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self._stop_due = False
        self.start_timeout = cell.system.config.start_timeout
        self.stop_timeout = cell.system.config.stop_timeout
        self.reason: tuple[str, str] = ("stopped", "")
        """Why it ended, as its watchers are told: a word, and what is known beyond it."""
        self.restarts = 0
        """How often it was started again."""
        self.watchers: dict[object, Callable[[str, str], None]] | None = None
        """Called with `reason` when it has ended; see `pulsing.core._watch`."""
        self.tools: Tools | None = None
        """What the actor itself watches; see `pulsing.core._watch.Tools`."""

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self, *, made: bool = False) -> None:
        """Makes the instance and runs its `on_start`; raises what they raise (R8).

        Args:
            made: The instance has been adopted already.
        """
        try:
            await self._by_itself(self._run_on_start() if made else self._create())
            if self._end is not None:
                raise stopped(self._cell, "was stopped while it started, and")
        finally:
            if self._started is not None:
                self._started.set_result(None)
        self.open()

    async def _by_itself(self, work: Coroutine[Any, Any, None]) -> None:
        """Awaits a part of the start. A cancellation that nobody asked for is the actor's failure, and does not cancel
        who waits for it.
        """
        task = asyncio.current_task()
        asked = 0 if task is None else task.cancelling()
        try:
            await work
        except asyncio.CancelledError as error:
            if task is None or task.cancelling() > asked:
                raise
            raise CallCancelledError(f"the start of actor {self._cell.label} was cancelled by its own side") from error

    async def _create(self) -> None:
        plan = self._plan
        try:
            if plan.blocking:
                instance = await self._made_in_thread()
            else:
                instance = self._enter(plan.build)
                if inspect.isawaitable(instance):
                    instance = await self._within_start_timeout("the constructor", instance)
        except SystemExit as error:
            raise self._exited("constructor", error) from error
        self.adopt(instance)
        await self._run_on_start()

    async def _made_in_thread(self) -> Any:
        """What a constructor makes in a thread. It cannot be interrupted when it takes too long, or its spawn is given
        up: what it makes later is stopped.
        """

        async def make() -> Any:
            try:
                return await run_in_thread(self._cell.context.copy(), self._plan.build)
            except SystemExit as error:
                # Out of a task it would end the loop.
                raise self._exited("constructor", error) from error

        making = self._cell.system.loop.create_task(make())
        try:
            await asyncio.wait({making}, timeout=self.start_timeout)
        finally:
            if not making.done():
                self._cell.system.background(self._stop_late(making))
        if not making.done():
            raise self._too_late("the constructor")
        return making.result()

    async def _stop_late(self, making: asyncio.Task[Any]) -> None:
        try:
            instance = await making
        except Exception as error:  # noqa: BLE001 - whatever the user's constructor raises
            _log.debug("the constructor of actor %s failed after its time", self._cell.label, exc_info=error)
            return
        _log.warning("%s returned after its time: what it made is stopped", self._named("the constructor"))
        await self._run_on_stop(instance)

    def _named(self, what: str) -> str:
        return f"{what} of actor {self._cell.label} ({self._plan.label})"

    def _too_late(self, what: str) -> PulsingTimeoutError:
        return PulsingTimeoutError(
            f"{self._named(what)}, for which start_timeout of its system is the limit",
            round((self.start_timeout or 0.0) * 1000),
        )

    async def _within_start_timeout(self, what: str, work: Awaitable[Any]) -> Any:
        clock = asyncio.timeout(self.start_timeout)
        try:
            async with clock:
                return await work
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise self._too_late(what) from error

    async def _run_on_start(self) -> None:
        pending = self._call_hook(self._cell.instance, "on_start", self._cell.id)
        if pending is not None:
            await self._within_start_timeout("on_start", pending)

    def _exited(self, where: str, error: SystemExit) -> PulsingSystemError:
        # An exit is this actor's business: it must not take the loop along, nor whoever spawned it.
        return PulsingSystemError(f"the {where} of actor {self._cell.label} called sys.exit({error.code!r})")

    def adopt(self, instance: Any) -> None:
        """Takes `instance` as the actor's object and tells it who it is."""
        cell = self._cell
        cell.instance = instance
        cell.methods = methods_of(type(instance))
        cell.receive = receive_of(type(instance))
        cell.protocols = getattr(type(instance), "__pulsing_protocols__", ())
        self._stop_due = True
        adopt_tools(instance, cell)
        metadata = getattr(instance, "metadata", None)
        if callable(metadata):
            try:
                found = metadata()
            except SystemExit as error:
                raise self._exited("metadata", error) from error
            if isinstance(found, dict):
                cell.metadata = {**{str(k): str(v) for k, v in found.items()}, **cell.metadata}

    def open(self) -> None:
        """Starts taking messages; those that wait begin."""
        state = self._cell.state
        if state < DRAINING:
            self._cell.state = OPEN
        elif state == DRAINING_RESTART:
            self._cell.state = DRAINING
        self._cell.mailbox.pump()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _enter(self, function: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            current.set(CallContext(self._cell))
            return function(*args)

        return self._cell.context.copy().run(run)

    def _call_hook(self, instance: Any, name: str, *args: Any) -> asyncio.Task[None] | None:
        """Runs a hook, or returns the task of one that may suspend."""
        cell = self._cell
        hook = getattr(instance, name, None)
        if not callable(hook) or getattr(hook, "__func__", None) in DEFAULT_HOOKS:
            return None
        given = args
        if args:
            try:
                given = args if inspect.signature(hook).parameters else ()
            except (TypeError, ValueError):
                given = args
        threaded = self._plan.blocking and not inspect.iscoroutinefunction(hook)
        try:
            result = run_in_thread(cell.context.copy(), hook, *given) if threaded else self._enter(hook, *given)
        except SystemExit as error:
            raise self._exited(name, error) from error
        if not inspect.isawaitable(result):
            return None
        work: Awaitable[Any] = result

        async def run() -> None:
            current.set(CallContext(cell))
            try:
                await work
            except SystemExit as error:
                raise self._exited(name, error) from error

        return cell.system.loop.create_task(run(), context=cell.context.copy())

    async def _stop_hook(self) -> None:
        if self._stop_due:
            self._stop_due = False
            await self._run_on_stop(self._cell.instance)

    async def _run_on_stop(self, instance: Any) -> None:
        label = self._cell.label
        try:
            hook = self._call_hook(instance, "on_stop")
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - the actor ends all the same
            _log.exception("on_stop of actor %s failed", label)
            return
        if hook is None:
            return
        limit = self.stop_timeout
        try:
            if self._rank < _RANKS["kill"]:
                # A kill that comes while it runs leaves it little time.
                await _first(asyncio.wait({hook}, timeout=limit), self._harsher_than(_RANKS["stop"]))
            if self._rank == _RANKS["kill"] and not hook.done():
                limit = _CANCEL_LIMIT
                await asyncio.wait({hook}, timeout=limit)
            if not hook.done():
                hook.cancel()
                await asyncio.wait({hook}, timeout=_CANCEL_LIMIT)
                _log.error("on_stop of actor %s took more than %g s: it was cancelled", label, limit)
            elif not hook.cancelled() and (error := hook.exception()) is not None:
                _log.error("on_stop of actor %s failed", label, exc_info=error)
        except asyncio.CancelledError:
            hook.cancel()
            raise

    # -- failure ------------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """A handler raised `error`, which its caller has been told."""
        if self._policy.restarts and not isinstance(error, PulsingBusinessError):
            self._restart(error)

    def ended_itself(self, error: SystemExit) -> None:
        """A handler raised SystemExit."""
        code = error.code
        if self._policy.policy == "always":
            self._restart(None if code in (None, 0) else error)
        elif code in (None, 0):
            self.begin("stop", 0.0)
        else:
            self.begin("fail", 0.0, f"SystemExit: {code}")

    def _restart(self, error: BaseException | None) -> None:
        cell = self._cell
        if cell.state not in (OPEN, DRAINING):
            return
        cell.state = RESTARTING if cell.state == OPEN else DRAINING_RESTART
        cell.handlers.cancel_all(lambda: stopped(cell, "was restarted"))
        self._restart_task = cell.system.loop.create_task(self._restart_loop(error), context=cell.context.copy())

    async def _restart_loop(self, error: BaseException | None) -> None:
        cell = self._cell
        while True:
            delay = self._budget.next_delay(cell.system.loop.time())
            if delay is None:
                _log.error(
                    "actor %s failed too often (%d restarts): it stops", cell.label, self.restarts, exc_info=error
                )
                self._restart_task = None
                self.begin("fail", 0.0, words(error))
                return
            _log.warning("actor %s failed: restarting it in %.2f s", cell.label, delay, exc_info=error)
            await cell.handlers.join()
            await self._stop_hook()
            await asyncio.sleep(delay)
            self.restarts += 1
            cell.system.core.restarted(cell.raw, "stopped" if error is None else "failed")
            try:
                await self._by_itself(self._create())
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as again:  # noqa: BLE001 - any failure of the new instance counts like one of the old
                error = again
                continue
            self._restart_task = None
            self.open()
            return

    # -- end ----------------------------------------------------------------------------------------------------------

    async def end(self, how: str, grace: float = STOP_GRACE, *, reason: str | None = None) -> None:
        """`begin`, and returns when the actor has ended. Called by one of its own handlers it does not wait for that
        handler; from its hooks, or a second time from inside, it does not wait at all.
        """
        cell = self._cell
        me = current.get()
        inside = me is not None and me.cell is cell
        starting = cell.state == STARTING
        first = self._end is None
        self.begin(how, grace, reason=reason, mine=me.delivery if me is not None and inside else None)
        if inside and (starting or not first):
            return
        assert self._end is not None  # `begin` makes it
        await asyncio.shield(self._end)

    def begin(
        self,
        how: str,
        grace: float = STOP_GRACE,
        error: str = "",
        *,
        reason: str | None = None,
        mine: Delivery | None = None,
    ) -> None:
        """Ends the actor; what waits in its mailbox is passed (R4).

        Args:
            how: "drain": messages that wait and run are finished, further ones refused. "stop": waiting messages fail,
                running handlers get `grace` seconds. "kill": running handlers are cancelled at once. "fail": as "stop",
                and it counts as failed.
            grace: Seconds.
            error: What it failed with.
            reason: What watchers are told instead.
            mine: The message whose handler asked for this: it is not waited for, nor cancelled.
        """
        cell = self._cell
        loop = cell.system.loop
        rank = _RANKS[how]
        if cell.state == STOPPED:
            return
        if reason is not None:
            self.reason = (reason, "")
        elif how == "fail":
            self.reason = ("failed", error)
        elif how == "kill" and self.reason[0] == "stopped":
            self.reason = ("killed", "")
        if how in ("stop", "fail"):
            cut_at = loop.time() + grace
            self._cut_at = cut_at if self._cut_at is None else min(cut_at, self._cut_at)
        elif how == "kill":
            self._cut_at = loop.time()
        self._rank = max(rank, self._rank)
        if self._end is None:
            self._end = loop.create_future()
            self._mine = mine
            if cell.state == STARTING:
                self._started = loop.create_future()
            if how == "drain":
                cell.state = DRAINING_RESTART if cell.state in (STARTING, RESTARTING) else DRAINING
            else:
                self._refuse()
            if not cell.protocols:
                cell.system.withdraw(cell)
            # Not a task of the system's: its shutdown cancels those, and waits for this one.
            self._finishing = loop.create_task(self._finish())
            return
        if how != "drain" and cell.state < STOPPING:
            self._refuse()
        self._change().set()

    def _refuse(self) -> None:
        self._cell.state = STOPPING
        self._cell.mailbox.refuse_all()

    async def _harsher_than(self, rank: int) -> None:
        changed = self._change()
        while self._rank <= rank:
            changed.clear()
            await changed.wait()

    def _change(self) -> asyncio.Event:
        """Set whenever the actor is told to end."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    async def _finish(self) -> None:
        cell = self._cell
        loop = cell.system.loop
        handlers = cell.handlers
        try:
            if self._started is not None:
                await _first(asyncio.wait({self._started}), self._harsher_than(_RANKS["stop"]))
            if self._restart_task is not None and self._rank == 0:
                await _first(asyncio.wait({self._restart_task}), self._harsher_than(0))
            if self._restart_task is not None:
                self._restart_task.cancel()
                await asyncio.wait({self._restart_task})
            if self._rank == 0:
                await _first(self._drained(), self._harsher_than(0))
            self._refuse()
            while not self._over():
                self._change().clear()
                left = 0.0 if self._cut_at is None else self._cut_at - loop.time()
                if left <= 0:
                    break
                await _first(handlers.join(left, self._mine), self._change().wait())
            handlers.cancel_all(lambda: stopped(cell), self._mine)
            await handlers.join(_CANCEL_LIMIT, self._mine)
            # Protocol calls are the hook's to drain; it still answers new ones, and its name is withdrawn only now.
            await self._stop_hook()
            handlers.cancel_protocols()
        finally:
            self._ended()

    def _over(self) -> bool:
        return not any(d is not self._mine for d in self._cell.handlers.running)

    async def _drained(self) -> None:
        """Returns when nothing waits and no handler but the asking one runs."""
        cell = self._cell
        while cell.mailbox.depth or not self._over():
            if self._over():
                cell.mailbox.pump()
            else:
                await cell.handlers.join(None, self._mine)
            # A task that has not begun cannot be waited for.
            await asyncio.sleep(0)

    def _ended(self) -> None:
        cell = self._cell
        # Again, for an end that was cut short.
        self._refuse()
        cell.state = STOPPED
        cell.system.remove(cell)
        if self.tools is not None:
            self.tools.close()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        watchers, self.watchers = self.watchers, None
        for told in (watchers or {}).values():
            told(*self.reason)


async def _first(one: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> None:
    """Returns when either is done; the other is cancelled."""
    tasks = {asyncio.ensure_future(one), asyncio.ensure_future(other)}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def words(error: BaseException | None) -> str:
    """An error as one line for watchers."""
    return "it ended itself too often" if error is None else f"{type(error).__name__}: {text_of(error)}"


__all__ = ["DRAINING", "OPEN", "STARTING", "STOPPED", "STOPPING", "STOP_GRACE", "Life", "words"]
