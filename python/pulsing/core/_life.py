"""The life of one actor: its start, its hooks, its restarts, its end (R8, R9)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pulsing.core._actor import Delayer
from pulsing.core._context import CallContext, current
from pulsing.core._dispatch import methods_of, receive_of
from pulsing.core._refusals import stopped
from pulsing.core._supervision import RestartBudget, RestartPolicy
from pulsing.core._threads import run_in_thread
from pulsing.exceptions import PulsingBusinessError

if TYPE_CHECKING:
    from pulsing.core._cell import Cell

_log = logging.getLogger("pulsing")

STARTING, OPEN, RESTARTING, STOPPING, STOPPED = range(5)
"""States of a cell. From STOPPING on it takes no messages."""

HOOK_LIMIT = 60.0
"""Seconds that `on_stop` may take; a Worker drains in it."""


class Life:
    """Starts, restarts and stops an actor."""

    __slots__ = ("_blocking", "_budget", "_cell", "_end", "_factory", "_policy", "_restart_task", "restarts")

    def __init__(self, cell: Cell, factory: Callable[[], Any], policy: RestartPolicy, blocking: bool) -> None:
        self._cell = cell
        self._factory = factory
        self._policy = policy
        self._blocking = blocking
        self._budget = RestartBudget(policy)
        self._end: asyncio.Future[None] | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self.restarts = 0
        """How often it was started again."""

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Makes the instance and runs its `on_start`; raises what they raise (R8)."""
        await self._create()
        self.open()

    async def _create(self) -> None:
        if self._blocking:
            instance = await run_in_thread(self._cell.context.copy(), self._factory)
        else:
            instance = self._enter(self._factory)
            if inspect.isawaitable(instance):
                instance = await instance
        self.adopt(instance)
        await self.run_on_start()

    async def run_on_start(self) -> None:
        """Runs the instance's `on_start`; raises what it raises."""
        await self._hook("on_start", self._cell.id)

    def adopt(self, instance: Any) -> None:
        """Takes `instance` as the actor's object and tells it who it is."""
        cell = self._cell
        cell.instance = instance
        cell.methods = methods_of(type(instance))
        cell.receive = receive_of(type(instance))
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(instance, "_pulsing_cell", cell)
        if getattr(instance, "delayed", None) is None:
            with contextlib.suppress(AttributeError, TypeError):
                object.__setattr__(instance, "delayed", Delayer(cell))
        metadata = getattr(instance, "metadata", None)
        if callable(metadata):
            found = metadata()
            if isinstance(found, dict):
                cell.metadata = {**{str(k): str(v) for k, v in found.items()}, **cell.metadata}

    def open(self) -> None:
        """Starts taking messages."""
        self._cell.state = OPEN
        self._cell.mailbox.pump()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _enter(self, function: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            current.set(CallContext(self._cell))
            return function(*args)

        return self._cell.context.copy().run(run)

    async def _hook(self, name: str, *args: Any) -> None:
        cell = self._cell
        hook = getattr(cell.instance, name, None)
        if not callable(hook):
            return
        try:
            takes = len(inspect.signature(hook).parameters) > 0
        except (TypeError, ValueError):
            takes = True
        given = args if takes else ()

        async def run() -> None:
            current.set(CallContext(cell))
            result = hook(*given)
            if inspect.isawaitable(result):
                await result

        if self._blocking and not inspect.iscoroutinefunction(hook):
            await run_in_thread(cell.context.copy(), hook, *given)
            return
        await cell.system.loop.create_task(run(), context=cell.context.copy())

    async def _stop_hook(self) -> None:
        try:
            async with asyncio.timeout(HOOK_LIMIT):
                await self._hook("on_stop")
        except Exception:  # noqa: BLE001 - the actor ends all the same
            _log.exception("on_stop of actor %s failed", self._cell.label)

    # -- failure ------------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """A handler raised `error`, which its caller has been told."""
        if self._policy.restarts and not isinstance(error, PulsingBusinessError):
            self._restart(error)

    def ended_itself(self) -> None:
        """A handler raised SystemExit."""
        if self._policy.policy == "always":
            self._restart(None)
        else:
            self._cell.system.background(self.stop(0.0))

    def _restart(self, error: BaseException | None) -> None:
        cell = self._cell
        if cell.state != OPEN:
            return
        cell.state = RESTARTING
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
                await self.stop(0.0)
                return
            _log.warning("actor %s failed: restarting it in %.2f s", cell.label, delay, exc_info=error)
            await cell.handlers.join()
            await self._stop_hook()
            await asyncio.sleep(delay)
            self.restarts += 1
            cell.system.counts.restarts += 1
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
        cell = self._cell
        me = current.get()
        if self._end is not None:
            if me is None or me.cell is not cell:
                await asyncio.shield(self._end)
            return
        self._end = cell.system.loop.create_future()
        cell.state = STOPPING
        if self._restart_task is not None:
            self._restart_task.cancel()
        try:
            if not cell.protocols:
                cell.system.withdraw(cell)
            cell.mailbox.refuse_all()
            mine = me.delivery if me is not None and me.cell is cell else None
            if grace > 0:
                await cell.handlers.join(grace, mine)
            cell.handlers.cancel_all(lambda: stopped(cell), mine)
            await cell.handlers.join(1.0, mine)
            # Protocol calls are the hook's to drain; it still answers new ones, and its name is withdrawn only now.
            await self._stop_hook()
            cell.system.withdraw(cell)
            cell.handlers.cancel_protocols()
        finally:
            cell.state = STOPPED
            cell.system.remove(cell)
            self._end.set_result(None)
