"""A node with its Python actors."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pulsing import _core
from pulsing.core import _lifecycle
from pulsing.core._bridge import LoopBridge, bridge_of
from pulsing.core._cell import Cell
from pulsing.core._checks import check_seconds, clean_name
from pulsing.core._config import SystemConfig
from pulsing.core._ending import Which, end, only_one
from pulsing.core._errors import from_core
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._launch import Launcher
from pulsing.core._life import OPEN
from pulsing.core._name_watch import NameWatch
from pulsing.core._placement import SERVICE_NAME, Placement, Placer
from pulsing.core._process import Processes
from pulsing.core._proxy import ActorProxy, method_names
from pulsing.core._refs import ActorRef
from pulsing.core._remote import ActorClass
from pulsing.core._settings import DEBUG_COPY, flag_of
from pulsing.core._sources import Desk
from pulsing.core._spawn import Blueprint, SpawnOptions, blueprint
from pulsing.core._start import start_core
from pulsing.core._supervision import RestartPolicy
from pulsing.exceptions import (
    ActorNotFoundError,
    ConfigError,
    PulsingRuntimeError,
    SystemShutDownError,
)

_log = logging.getLogger("pulsing")

_PLACES = 1024
"""Places in code whose words are kept."""
_FLUSH_EVERY = 0.5
"""Seconds by which `/metrics` may lag behind what happened in Python."""

_STATUS = {"alive": "Alive", "suspect": "Suspect", "down": "Dead", "left": "Left"}


class Counts:
    """What happened inside Python, until it is told to the node's metrics."""

    __slots__ = ("bytes_copied", "dead_letters", "inbound", "local", "stream_items", "streams", "waiting")

    def __init__(self) -> None:
        self.local = self.inbound = self.streams = self.stream_items = self.dead_letters = self.bytes_copied = 0
        self.waiting = 0
        """Messages that began to wait in mailboxes, less those that ceased to."""


def node_of(value: str | int | NodeId | None) -> NodeId | None:
    """A node id in any of its spellings."""
    return value if value is None or isinstance(value, NodeId) else NodeId(value)


class ActorSystem:
    """One node: its actors, its view of the cluster. It belongs to the event loop it was started on.

    Made by `pul.init`, `pul.actor_system` or `ActorSystem.create`; ended by `shutdown`, or with its loop.
    """

    def __init__(self, core: _core.System, bridge: LoopBridge, config: SystemConfig) -> None:
        self.core = core
        self.loop = bridge.loop
        self.timers = bridge.timers
        self.watch = bridge.watch
        self.config = config
        self.default_timeout = config.default_timeout
        self.debug_copy = flag_of(DEBUG_COPY, os.environ)
        self.counts = Counts()
        self.inline = 0
        self.nesting = 0
        """First steps of handlers that run within each other."""
        self.is_shut_down = False
        self._bridge = bridge
        self._node_id = NodeId(core.node_id)
        self._cells: dict[bytes, Cell] = {}
        self._names: dict[str, Cell] = {}
        self._placer = Placer(self)
        self._launcher = Launcher(self, bridge)
        self._ends: dict[bytes, Callable[[], None]] = {}
        self.processes = Processes(self)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.get_ident()
        self.places: dict[tuple[str, int], str] = {}
        """Files and lines that send to other nodes, as those are told."""
        self.desks: dict[LoopBridge, Desk] = {}
        """Where other nodes fetch the streams that calls from a loop carry."""

    # -- life ---------------------------------------------------------------------------------------------------------

    @classmethod
    async def create(
        cls,
        config: SystemConfig | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        _host: _core.TestHost | None = None,
        process_of: str | None = None,
    ) -> ActorSystem:
        """Starts a node on the running loop.

        Args:
            config: Its settings; None: a node of its own.
            loop: The running loop, if given at all.
            process_of: The actor whose own process this is.

        Raises:
            BindError: The address is in use.
            JoinError: No seed let us in within `join_timeout`.
            RefusedError: A seed said why it will not have us.
            ConfigError: Settings that make no sense.
        """
        config = config or SystemConfig()
        running = asyncio.get_running_loop()
        if loop is not None and loop is not running:
            raise ConfigError("a system belongs to the loop it is started on: call create() from that loop")
        _lifecycle.prepare()
        _lifecycle.start_logging()
        bridge = bridge_of(running)
        core = await start_core(config, bridge, _host)
        system = cls(core, bridge, config)
        system.processes.in_memory = _host is not None
        bridge.watch.limit = math.inf if config.watchdog is None else config.watchdog
        _lifecycle.track(system)
        bridge.closers.append(system._at_loop_end)
        from pulsing.core._service import PythonActorService

        await system.spawn(PythonActorService(system, process_of), name=SERVICE_NAME, public=True, _internal=True)
        system._keep_counting()
        return system

    async def shutdown(self, grace: float | None = None) -> None:
        """Stops every actor, leaves the cluster and ends the node; idempotent.

        Args:
            grace: Seconds that running handlers get to finish; default: the system's `stop_grace`.
        """
        if grace is not None:
            check_seconds("grace", grace, or_none="for the system's `stop_grace`")
        if self._ending is None:
            grace = self.config.stop_grace if grace is None else grace
            self._ending = self.loop.create_task(self._shut_down(grace))
        await asyncio.shield(self._ending)

    async def _shut_down(self, grace: float) -> None:
        self.is_shut_down = True
        self.core.drain()
        cells = sorted(self._cells.values(), key=lambda cell: cell.internal)
        ends = (cell.life.end("stop", grace, reason="node_left") for cell in cells)
        results = await asyncio.gather(self.processes.stop(grace), *ends, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                _log.error("an actor did not stop cleanly", exc_info=error)
        for task in list(self._tasks):
            task.cancel()
        self.flush_counts()
        await self._bridge.run(lambda token: self.core.shutdown(self._bridge.core, token))
        _lifecycle.untrack(self)
        if self._at_loop_end in self._bridge.closers:
            self._bridge.closers.remove(self._at_loop_end)

    async def _at_loop_end(self) -> None:
        if not self.is_shut_down:
            _log.debug("the loop ends without shutdown(): leaving the cluster")
            await self.shutdown(0.5)

    @property
    def node_id(self) -> NodeId:
        """Id of this node."""
        return self._node_id

    @property
    def addr(self) -> str:
        """Address that others reach this node at, ``ip:port``."""
        return self.core.addr

    @property
    def observed_at(self) -> str | None:
        """Address where observers are answered besides the node's port, ``ip:port``; None: nowhere."""
        return self.core.observed_at

    # -- actors -------------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        actor: Any,
        *,
        name: str | None = None,
        public: bool | None = None,
        unique: bool = False,
        restart_policy: str = "never",
        max_restarts: int | None = None,
        min_backoff: float | None = None,
        max_backoff: float | None = None,
        restart_window: float | None = None,
        mailbox: int | None = None,
        max_concurrency: int | None = None,
        placement: Placement = "local",
        new_process: bool = False,
        _internal: bool = False,
    ) -> ActorRef:
        """Starts an actor and returns when it is ready.

        Args:
            actor: An instance with `receive` or methods; or, needed for supervision, a zero-argument factory of one.
            name: Name to serve under; none: reachable by reference only.
            public: Publish the name in the cluster; default: when there is one.
            unique: The name is for this actor alone in the whole cluster. Of claims made on several nodes at once,
                or while they were parted, the oldest stands, and the other actor is stopped.
            restart_policy: "never", "on_failure" or "always".
            max_restarts: Restarts allowed within `restart_window`; default: the system's, and so are the next three.
            min_backoff: Seconds before the first restart of a series.
            max_backoff: Longest wait in seconds.
            restart_window: Seconds over which restarts are counted.
            mailbox: Messages that may wait (16 to 1,000,000); default: the system's.
            max_concurrency: Handlers that may interleave; default: the system's.
            placement: Where it lives, as for `ActorClass.spawn`. An instance that goes elsewhere goes as a copy.
            new_process: It lives in a process of its own, as for `ActorClass.spawn`.

        Raises:
            Exception: What the factory or `on_start` raised.
            NameTakenError: The name has a holder on that node; or anywhere, if that holder or this actor is unique.
            ConfigError: A unique actor without a public name.
            ProcessDiedError: The new process ended before the actor was ready.
            NodeNotFoundError: The placement is no living member.
            CodeNotFoundError: The other node lacks code that the actor needs.
            TypeError: Nothing that can be an actor, supervision without a factory, or what cannot travel.
            ValueError: A placement that is none, or numbers that make no sense.
        """
        policy = RestartPolicy.of(restart_policy, max_restarts, min_backoff, max_backoff, restart_window)
        options = SpawnOptions(name, public, policy, mailbox, max_concurrency, unique, new_process)
        return await self.spawn_from(blueprint(actor, policy), options, placement, internal=_internal)

    async def spawn_class(
        self,
        cls: ActorClass,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str | None,
        public: bool | None,
        unique: bool = False,
        placement: Placement = "local",
        mailbox: int | None = None,
        max_concurrency: int | None = None,
        new_process: bool = False,
    ) -> ActorRef:
        """`spawn` of an ``@remote`` class, here or on another node."""
        options = SpawnOptions(name, public, cls.policy, *cls.limits(mailbox, max_concurrency), unique, new_process)
        return await self.spawn_from(Blueprint(cls.cls, args, kwargs), options, placement)

    async def spawn_from(
        self,
        plan: Blueprint,
        options: SpawnOptions,
        placement: Placement = "local",
        *,
        actor: ActorId | None = None,
        internal: bool = False,
    ) -> ActorRef:
        """What every spawn comes to.

        Args:
            plan: What makes the instance.
            options: How the actor lives.
            placement: Where.
            actor: Its id, when whoever asked for it has chosen one.
            internal: It is part of the runtime.
        """
        self.check_usable()
        node = self._node_id if placement == "local" else await self._placer.node(placement)
        if node != self._node_id:
            from pulsing.core._service import create_there

            return await create_there(self, node, plan, options, actor or ActorId.generate())
        if options.new_process:
            if options.name is not None:
                options = dataclasses.replace(options, name=self._launcher.free(options.name, options.unique))
            return await self.processes.spawn(plan, options, actor or ActorId.generate())
        return await self._launcher.launch(plan, options, actor, internal)

    def check_usable(self) -> None:
        """Raises unless actors can be started here and now."""
        _lifecycle.check_fork()
        if self.is_shut_down:
            raise SystemShutDownError("the actor system is shut down")
        if asyncio.get_running_loop() is not self.loop:
            raise PulsingRuntimeError(
                "this actor system belongs to another event loop: start actors from there, or start a system here with "
                "pul.actor_system()"
            )

    def mount(self, instance: Any, name: str, public: bool = True) -> None:
        """Makes any object an actor; from the system's loop without waiting for an async `on_start`, from other
        threads with.

        Raises:
            NameTakenError: The name has a holder on this node.
            TimeoutError: From another thread, when it is not ready within 30 s.
        """
        if threading.get_ident() != self._thread:
            future = asyncio.run_coroutine_threadsafe(self.spawn(instance, name=name, public=public), self.loop)
            future.result(30)
            return
        self._launcher.mount(instance, name, public)

    async def drain(self, name: Which) -> None:
        """Lets an actor finish the messages that wait and run, while further ones get ActorStoppedError; then ends it.
        There is no limit of time: `stop` or `kill` cuts it short.

        Args:
            name: Its name, id, reference or proxy; it may live on another node. An unknown one is a warning in the log.
        """
        await end(self, name, "drain", 0.0)

    async def stop(self, name: Which, grace: float | None = None) -> None:
        """Ends an actor: waiting messages fail, running handlers get `grace` seconds and are then cancelled, `on_stop`
        runs. Returns when it has ended; a handler of the actor itself is not waited for.

        Args:
            name: As for `drain`.
            grace: Seconds; default: the system's `stop_grace`.

        Raises:
            PulsingRuntimeError: The name has several instances, none of them here.
            ConnectionLostError: The link to its node broke: it may have ended.
        """
        await end(self, name, "stop", self.config.stop_grace if grace is None else grace)

    async def kill(self, name: Which) -> None:
        """Ends an actor at once: running handlers are cancelled, and `on_stop` gets a second. See `stop`."""
        await end(self, name, "kill", 0.0)

    def holder(self, name: str) -> ActorRef | None:
        """The actor of this name: here, or the only one elsewhere."""
        cell = self._names.get(clean_name(name))
        return self.ref_of(cell) if cell is not None else only_one(self, clean_name(name))

    # -- finding ------------------------------------------------------------------------------------------------------

    async def resolve(
        self, name: str, *, cls: Any = None, node_id: str | int | NodeId | None = None, timeout: float | None = None
    ) -> ActorProxy:
        """One actor that serves under `name`: of several instances, each in turn.

        Args:
            name: Its name.
            cls: Class whose methods the proxy knows; none: it forwards any.
            node_id: Only on this node.
            timeout: Seconds to wait for the name to appear; None: it must be known now.

        Raises:
            NameNotFoundError: Nobody serves under it.
            TypeError, ValueError: A timeout or a node that is none.
        """
        name = clean_name(name)
        if timeout is not None:
            check_seconds("timeout", timeout, or_none="for what is known already")
        node = node_of(node_id)
        methods = None if cls is None else method_names(cls)
        private = self._names.get(name)
        if private is not None and not private.public and private.state >= OPEN and node in (None, self._node_id):
            return ActorProxy(self.ref_of(private), methods)
        own = self.processes.find(name)
        if own is not None and not own.public and own.ref is not None and node in (None, own.ref.node_id):
            return ActorProxy(own.ref, methods)
        bridge = bridge_of(asyncio.get_running_loop())
        raw = None if node is None else node.raw
        found = await bridge.run(lambda token: self.core.resolve(bridge.core, token, name, raw, timeout or 0.0))
        return ActorProxy(self._ref_from(found), methods)

    async def resolve_named(
        self, name: str, node_id: str | int | NodeId | None = None, timeout: float | None = None
    ) -> ActorRef:
        """`resolve`, as a bare reference."""
        return (await self.resolve(name, node_id=node_id, timeout=timeout)).ref

    async def refer(self, actorid: ActorId | str) -> ActorRef:
        """The actor with this id, wherever in the cluster it lives.

        Raises:
            ConfigError: The text is no id. (It is a ValueError.)
            ActorNotFoundError: No node knows it.
        """
        actor = actorid if isinstance(actorid, ActorId) else ActorId.from_str(actorid)
        cell = self._cells.get(actor.raw)
        if cell is not None:
            return self.ref_of(cell)
        one = self.core.published(actor.raw)
        if one is not None:
            return self._ref_from(one)
        from pulsing.core._service import find_there

        ref = await find_there(self, actor)
        if ref is None:
            raise ActorNotFoundError(f"no node of the cluster has an actor {actor}: it was stopped or never lived")
        return ref

    actor_ref = refer

    def ref_of(self, cell: Cell) -> ActorRef:
        """A reference to an actor of this node."""
        return ActorRef(self, self._node_id, cell.id, cell.name)

    def _ref_from(self, found: dict[str, Any]) -> ActorRef:
        return ActorRef(self, NodeId(found["node_id"]), ActorId(found["actor_id"]), found["name"])

    async def members(self) -> list[dict[str, Any]]:
        """The nodes of the cluster: node_id (hex), addr, state (alive, suspect, down, left), status, me."""
        return [{**member, "status": _STATUS[member["state"]]} for member in self.core.members()]

    async def get_named_instances(self, name: str) -> list[dict[str, Any]]:
        """The instances of a name: name, node_id, actor_id, addr, class, metadata, unique."""
        return self.core.instances(clean_name(name))

    async def all_named_actors(self) -> list[dict[str, Any]]:
        """Every published name: name, instance_count, instances."""
        return [
            {"name": name, "instance_count": len(found), "instances": found}
            for name, found in self.core.names().items()
        ]

    def local_actor_names(self) -> list[str]:
        """Names of the actors on this node, the runtime's own left out."""
        return sorted(name for name, cell in self._names.items() if not cell.internal)

    async def system(self) -> ActorRef:
        """This node's own service actor."""
        return await self.remote_system(self._node_id)

    async def remote_system(self, node_id: str | int | NodeId) -> ActorRef:
        """The service actor of a node.

        Raises:
            NameNotFoundError: The node is not a member, or is no Python node.
        """
        return await self.resolve_named(SERVICE_NAME, node_id=node_id, timeout=1.0)

    def watch_name(self, name: str) -> NameWatch:
        """The instances of a name as they come, change and go: ``async for change in system.watch_name("worker")``.

        Args:
            name: The name. Nobody needs to serve under it yet. A private one of this node is seen here, too.

        Raises:
            InvalidNameError: Nobody could serve under it.
            SystemShutDownError: From the loop: the system was shut down.
        """
        return NameWatch(self, clean_name(name))

    async def watch_names(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` whenever members or names may have changed; returns what ends that."""
        bridge = bridge_of(asyncio.get_running_loop())
        token = bridge.token(lambda _: callback())
        changes = self.core.watch(bridge.core, token)

        def close() -> None:
            bridge.forget(token)
            if not bridge.closed:
                changes.cancel()

        return close

    # -- for the rest of the package ----------------------------------------------------------------------------------

    async def run_core(self, start: Callable[[_core.System, _core.Bridge, int], None]) -> Any:
        """Starts an operation of the extension that reports to a token, and returns its result."""
        bridge = bridge_of(asyncio.get_running_loop())
        return await bridge.run(lambda token: start(self.core, bridge.core, token))

    def cell(self, actor: ActorId) -> Cell | None:
        """A running actor of this node."""
        return self._cells.get(actor.raw)

    def cell_of(self, raw: bytes) -> Cell | None:
        """A running actor of this node, by its raw id."""
        return self._cells.get(raw)

    def named(self, name: str) -> Cell | None:
        """The actor of this node that has, or is about to have, this name."""
        return self._names.get(name)

    def claim(self, name: str, cell: Cell) -> None:
        """Keeps a name for an actor until that is removed."""
        self._names[name] = cell

    def enter(self, cell: Cell) -> None:
        """Makes an actor known by its id."""
        self._cells[cell.id.raw] = cell

    def cells(self) -> Sequence[Cell]:
        """The actors of this node."""
        return list(self._cells.values())

    def label_of(self, raw: bytes) -> str:
        """How messages name an actor."""
        cell = self._cells.get(raw)
        return cell.label if cell is not None else self.core.name_of(raw) or raw.hex()

    def place(self, site: tuple[str, int]) -> str:
        """A file and a line as other nodes are told, kept in `places`."""
        if len(self.places) >= _PLACES:
            self.places.clear()
        text = self.places[site] = f"{site[0]}:{site[1]} on the node at {self.addr}"
        return text

    def set_metadata(self, cell: Cell, values: dict[str, str]) -> None:
        """Replaces published metadata keys of an actor."""
        metadata = {**cell.metadata, **{key: str(value) for key, value in values.items()}}
        if cell.key and not self.is_shut_down:
            try:
                self.core.set_metadata(cell.id.raw, metadata)
            except _core.CoreError as error:
                raise from_core(error.args) from None
        # What was refused is not part of what is published next.
        cell.metadata = metadata

    def withdraw(self, cell: Cell) -> None:
        """Takes an actor's name off the cluster; idempotent."""
        if cell.key:
            self.core.withdraw(cell.id.raw)

    def remove(self, cell: Cell) -> None:
        """Forgets an actor that has ended, and tells other nodes' watchers why."""
        if cell.key:
            self.core.unregister(cell.id.raw, *cell.life.reason)
        self._bridge.forget(cell.key)
        self._cells.pop(cell.id.raw, None)
        if cell.name is not None and self._names.get(cell.name) is cell:
            del self._names[cell.name]
        ended = self._ends.pop(cell.id.raw, None)
        if ended is not None:
            ended()

    def when_ended(self, actor: ActorId, tell: Callable[[], None]) -> None:
        """Has `tell` called once an actor of this node has ended, one that is still to come included."""
        self._ends[actor.raw] = tell

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `work` on the system's loop until it ends or the system does."""
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def copied(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """A call's arguments after a trip through pickle (``PULSING_DEBUG_COPY=1``).

        Raises:
            TypeError: One of them would not travel; the message says which and why.
        """
        from pulsing.core import _unsendable
        from pulsing.core._pickle import copied

        try:
            return copied(arguments, self)
        except TypeError as error:
            named = _unsendable.arguments(*arguments)
            raise _unsendable.unsendable(error, "another process", named) from error.__cause__

    def _keep_counting(self) -> None:
        # Observers are answered outside Python and cannot ask for it.
        if not self.is_shut_down:
            self.flush_counts()
            self.loop.call_later(_FLUSH_EVERY, self._keep_counting)

    def flush_counts(self) -> None:
        """Tells the node's metrics what happened in Python."""
        counts, self.counts = self.counts, Counts()
        self.core.count(
            messages=counts.local,
            waiting=counts.waiting,
            streams=counts.streams,
            stream_items=counts.stream_items,
            dead_letters=counts.dead_letters,
            bytes_copied=counts.bytes_copied,
        )

    def __repr__(self) -> str:
        return f"<ActorSystem {self._node_id} at {self.addr}{', shut down' if self.is_shut_down else ''}>"
