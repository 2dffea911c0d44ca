"""The actor that each Python node runs for others: it starts actors there, finds them, and tells how the node is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from pulsing.core._dispatch import OP_CALL
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._options import Options
from pulsing.core._placement import PROCESS_OF, SERVICE_NAME
from pulsing.core._proxy import ActorProxy
from pulsing.core._refs import ActorRef
from pulsing.core._remote import import_class, registered
from pulsing.core._spawn import Blueprint, Order, SpawnOptions, arrived
from pulsing.core._supervision import RestartPolicy
from pulsing.exceptions import (
    ConnectionLostError,
    NameNotFoundError,
    NodeNotFoundError,
    PulsingActorError,
    PulsingError,
    PulsingTimeoutError,
)

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

PYTHON_ACTOR_SERVICE_NAME = SERVICE_NAME

_PATIENCE = 5.0
"""Seconds in which the service of a member becomes known."""
_EVER = 1e9
_START_TIMEOUT = "start_timeout"
"""Metadata of the service: its node's setting, in seconds; 0: none."""
_ON_THE_WAY = 1.0
"""Seconds that a spawn on another node may take beyond what its constructor and its `on_start` may."""

_log = logging.getLogger("pulsing")


class PythonActorService:
    """One a node, under `PYTHON_ACTOR_SERVICE_NAME`."""

    def __init__(self, system: ActorSystem, process_of: str | None = None) -> None:
        self._system = system
        self._process_of = process_of
        self._begun = time.monotonic()

    def metadata(self) -> dict[str, str]:
        """Tells others how long an actor may start here, and when this node is the own process of one actor."""
        told = {_START_TIMEOUT: f"{self._system.config.start_timeout or 0:g}"}
        return told if self._process_of is None else {**told, PROCESS_OF: self._process_of}

    async def spawn(self, order: Order) -> tuple[bytes, bytes]:
        """Starts an actor for another node. Returns the raw ids of its node and of itself."""
        make = await arrived(order.source, f"{self._system.node_id} at {self._system.addr}")
        plan = Blueprint(make, order.args, order.kwargs)
        try:
            ref = await self._system.spawn_from(plan, order.options, actor=order.actor)
        except SystemExit as error:
            # What ends a program that starts an actor here must not end the service of this node.
            raise PulsingActorError(f"{plan.label} called sys.exit({error.code!r}) while it was started") from error
        return ref.node_id.raw, ref.actor_id.raw

    async def discard(self, actor: ActorId) -> None:
        """Ends an actor that was started for someone who gave up waiting for it."""
        # Mostly its start has failed by itself or ended with the call, which is nothing to warn of.
        if self._system.cell(actor) is not None or self._system.processes.find(actor) is not None:
            await self._system.kill(actor)

    async def create_actor(
        self,
        class_name: str,
        *args: Any,
        name: str | None = None,
        public: bool = True,
        unique: bool = False,
        restart_policy: str = "never",
        max_restarts: int | None = None,
        min_backoff: float | None = None,
        max_backoff: float | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Starts an actor of the class at import path `class_name`."""
        from pulsing.core._dispatch import methods_of

        module, _, qualname = class_name.rpartition(".")
        found = import_class(module, qualname)
        policy = RestartPolicy.of(restart_policy, max_restarts, min_backoff, max_backoff, None)
        options = SpawnOptions(
            name, public, policy if policy.restarts else found.policy, *found.limits(None, None), unique
        )
        ref = await self._system.spawn_from(Blueprint(found.cls, args, kwargs), options)
        return {"actor_id": str(ref.actor_id), "node_id": str(ref.node_id), "methods": sorted(methods_of(found.cls))}

    def list_registry(self) -> list[str]:
        """Import paths of the ``@remote`` classes known here."""
        return registered()

    def has_actor(self, raw: bytes) -> str | None:
        """The name, or "", of a running actor; None if it does not live here."""
        cell = self._system.cell_of(raw)
        return None if cell is None else cell.name or ""

    def list_actors(self) -> list[dict[str, Any]]:
        """The actors of this node."""
        return [
            {
                "name": cell.name,
                "actor_id": str(cell.id),
                "class": cell.class_name,
                "public": cell.public,
                "internal": cell.internal,
                "metadata": dict(cell.metadata),
                "waiting": cell.mailbox.depth,
                "restarts": cell.life.restarts,
            }
            for cell in self._system.cells()
        ]

    def get_metrics(self) -> dict[str, Any]:
        """Counters of this node."""
        self._system.flush_counts()
        metrics = self._system.core.metrics()
        return {
            **metrics,
            "actors_count": len(self._system.cells()),
            "messages_total": metrics["messages"],
            "uptime_secs": self._uptime(),
        }

    def get_node_info(self) -> dict[str, Any]:
        """Who this node is."""
        return {"node_id": str(self._system.node_id), "addr": self._system.addr, "uptime_secs": self._uptime()}

    def health_check(self) -> dict[str, Any]:
        """How this node is."""
        return {"status": "healthy", "actors_count": len(self._system.cells()), "uptime_secs": self._uptime()}

    def ping(self) -> dict[str, Any]:
        """Proof of life; the timestamp is in milliseconds since 1970."""
        return {"node_id": str(self._system.node_id), "timestamp": int(time.time() * 1000)}

    def _uptime(self) -> float:
        return round(time.monotonic() - self._begun, 3)


async def _service_of(system: ActorSystem, node: NodeId | None, patience: float = _PATIENCE) -> ActorProxy:
    return await system.resolve(
        PYTHON_ACTOR_SERVICE_NAME, cls=PythonActorService, node_id=node or system.node_id, timeout=patience
    )


async def create_there(
    system: ActorSystem,
    node: NodeId,
    plan: Blueprint,
    options: SpawnOptions,
    actor: ActorId,
    patience: float | None = _PATIENCE,
) -> ActorRef:
    """Starts an actor on another node. Whoever is cancelled meanwhile, or gets no answer, leaves no actor there.

    The node limits constructor and `on_start` itself, to its `start_timeout` each. If they block its loop it cannot: it
    is waited for that long, and a little longer.

    Args:
        system: Who asks.
        node: Where.
        plan: What makes the instance.
        options: How the actor lives.
        actor: Its id.
        patience: Seconds until the node must be known; None: as long as it takes.

    Raises:
        PulsingTimeoutError: The actor has not started in time, or within the deadline of the calling handler.
    """
    order = Order(plan.source(), plan.args, plan.kwargs, options, actor)
    try:
        service = (await _service_of(system, node, _EVER if patience is None else patience)).ref
    except NameNotFoundError:
        raise NodeNotFoundError(
            f"node {node} runs no {PYTHON_ACTOR_SERVICE_NAME}: it is no Python node, so that {plan.label} cannot be "
            "placed there"
        ) from None
    try:
        # The caller's own deadline travels along.
        limit = Options(timeout=_start_limit(system, node, options))
        there, made = await service._ask(OP_CALL, "spawn", (order,), {}, limit)
    except (asyncio.CancelledError, PulsingTimeoutError, ConnectionLostError) as error:
        # It may have been ready just then, its answer on the way; or will be once its constructor returns.
        with contextlib.suppress(PulsingError):
            await service._tell(OP_CALL, "discard", (order.actor,), {})
        if isinstance(error, PulsingTimeoutError) and error.__cause__ is None:
            # The node has not told, so that only here it is known what was to be made.
            what = f"the start of {plan.label} on node {node} ({error.operation})"
            raise PulsingTimeoutError(what, error.duration_ms) from error
        raise
    return ActorRef(system, NodeId(there), ActorId(made), options.name)


def _start_limit(system: ActorSystem, node: NodeId, options: SpawnOptions) -> float | None:
    """Seconds that a spawn on `node` is waited for."""
    each = system.config.start_timeout
    for one in system.core.instances(SERVICE_NAME):
        if one["node_id"] == str(node) and _START_TIMEOUT in one["metadata"]:
            each = float(one["metadata"][_START_TIMEOUT])
    process = system.config.process_start_timeout if options.new_process else 0.0
    return None if not each or process is None else 2 * each + process + _ON_THE_WAY


async def find_there(system: ActorSystem, actor: ActorId) -> ActorRef | None:
    """Asks every other node for an actor."""

    async def ask(node: NodeId) -> ActorRef | None:
        try:
            service = await _service_of(system, node)
            name = await service.options(timeout=5.0).has_actor(actor.raw)
        except PulsingError as error:
            _log.debug("node %s cannot be asked for actor %s: %s", node, actor, error)
            return None
        return None if name is None else ActorRef(system, node, actor, name or None)

    others = [NodeId(m["node_id"]) for m in system.core.members() if not m["me"] and m["state"] in {"alive", "suspect"}]
    found = await asyncio.gather(*(ask(node) for node in others))
    return next((ref for ref in found if ref is not None), None)


class SystemActorProxy:
    """What a node tells about itself."""

    def __init__(self, service: ActorProxy) -> None:
        self._service = service

    async def list_actors(self) -> list[dict[str, Any]]:
        """The node's actors."""
        result: list[dict[str, Any]] = await self._service.list_actors()
        return result

    async def get_metrics(self) -> dict[str, Any]:
        """The node's counters."""
        return {"type": "Metrics", **await self._service.get_metrics()}

    async def get_node_info(self) -> dict[str, Any]:
        """Who the node is."""
        return {"type": "NodeInfo", **await self._service.get_node_info()}

    async def health_check(self) -> dict[str, Any]:
        """How the node is."""
        return {"type": "Health", **await self._service.health_check()}

    async def ping(self) -> dict[str, Any]:
        """Proof of life."""
        return {"type": "Pong", **await self._service.ping()}


class PythonActorServiceProxy:
    """Starts actors on a node by import path."""

    def __init__(self, service: ActorProxy) -> None:
        self._service = service

    async def list_registry(self) -> list[str]:
        """Import paths of the ``@remote`` classes known there."""
        result: list[str] = await self._service.list_registry()
        return result

    async def create_actor(self, class_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Starts an actor; see `PythonActorService.create_actor` for the keyword arguments."""
        result: dict[str, Any] = await self._service.create_actor(class_name, *args, **kwargs)
        return result


async def get_system_actor(system: ActorSystem, node_id: str | int | NodeId | None = None) -> SystemActorProxy:
    """What tells about a node; None: this one."""
    from pulsing.core._system import node_of

    return SystemActorProxy(await _service_of(system, node_of(node_id)))


async def get_python_actor_service(
    system: ActorSystem, node_id: str | int | NodeId | None = None
) -> PythonActorServiceProxy:
    """What starts actors on a node; None: this one."""
    from pulsing.core._system import node_of

    return PythonActorServiceProxy(await _service_of(system, node_of(node_id)))
