"""Draining, stopping and killing actors by name, id, reference or proxy, wherever they live (R4)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pulsing.core._checks import check_seconds, clean_name
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._proxy import ActorProxy
from pulsing.core._refs import ActorRef
from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError, NodeNotFoundError, PulsingError, PulsingRuntimeError

if TYPE_CHECKING:
    from pulsing.core._process import ProcessActor
    from pulsing.core._system import ActorSystem

_log = logging.getLogger("pulsing")

_KILL_LIMIT = 2.0
"""Seconds that a killed actor gets until its whole process is."""

Which = str | ActorId | ActorRef | ActorProxy


async def end(system: ActorSystem, which: Which, how: str, grace: float) -> None:
    """Ends an actor and returns when it has ended.

    Args:
        system: From where.
        which: Name, id, reference or proxy.
        how: "drain", "stop" or "kill".
        grace: Seconds that running handlers get.

    Raises:
        TypeError, ValueError: A grace that is no time.
        PulsingRuntimeError: The name has several instances, none of them here.
        ConnectionLostError: The link to its node broke: it may have ended.
    """
    check_seconds("grace", grace)
    process = system.processes.find(clean(which)) if asyncio.get_running_loop() is system.loop else None
    if process is not None:
        await _end_process(system, process, how, grace)
        return
    found = _find(system, which)
    if found is None:
        _log.warning("cannot %s %r: there is no such actor", how, which)
        return
    cell = system.cell(found.actor_id) if found.node_id == system.node_id else None
    if cell is not None and asyncio.get_running_loop() is system.loop:
        await cell.life.end(how, grace)
        return
    try:
        reason = await _end_there(system, found, how, grace)
    except NodeNotFoundError:
        reason = "not_found"
    if reason == "not_found":
        _log.warning("cannot %s %r: there is no such actor", how, which)


async def _end_there(system: ActorSystem, ref: ActorRef, how: str, grace: float) -> str:
    node, actor = ref.node_id.raw, ref.actor_id.raw
    reason, _ = await system.run_core(lambda core, bridge, token: core.end(bridge, token, node, actor, how, grace))
    return str(reason)


async def _end_process(system: ActorSystem, process: ProcessActor, how: str, grace: float) -> None:
    limit = None if how == "drain" else grace + (system.config.stop_timeout if how == "stop" else _KILL_LIMIT)
    if process.ref is not None:
        try:
            # The actor first, so that its watchers are told how it ended; its process follows it.
            async with asyncio.timeout(limit):
                await _end_there(system, process.ref, how, grace)
        except (TimeoutError, PulsingError) as error:
            _log.debug("actor %s did not end by itself: %s", process.label, error)
    await process.stop(0.0 if how == "kill" else grace)


def clean(which: Which) -> Which:
    """A name as it is stored."""
    return clean_name(which) if isinstance(which, str) else which


def _find(system: ActorSystem, which: Which) -> ActorRef | None:
    if isinstance(which, ActorProxy):
        return which.ref
    if isinstance(which, ActorRef):
        return which
    if isinstance(which, str):
        by_name = system.holder(which)
        if by_name is not None:
            return by_name
        try:
            which = ActorId(which)
        except ConfigError:
            return None
    if not isinstance(which, ActorId):
        raise TypeError(f"expected the name, id, reference or proxy of an actor, not {shown(which)}")
    cell = system.cell(which)
    if cell is not None:
        return system.ref_of(cell)
    one = system.core.published(which.raw)
    return None if one is None else ActorRef(system, NodeId(one["node_id"]), which, one["name"])


def only_one(system: ActorSystem, name: str) -> ActorRef | None:
    """The instance of a name on other nodes.

    Raises:
        PulsingRuntimeError: There are several.
    """
    found = system.core.instances(name)
    if len(found) > 1:
        raise PulsingRuntimeError(
            f"{len(found)} actors on other nodes serve as {name!r}: name one by its reference, such as "
            "`await system.resolve(name, node_id=...)`"
        )
    return ActorRef(system, NodeId(found[0]["node_id"]), ActorId(found[0]["actor_id"]), name) if found else None
