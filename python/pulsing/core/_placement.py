"""Where an actor is to live: ``placement="local" | "remote" | node id | "host:port"``."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from typing import TYPE_CHECKING, Any

from pulsing.core._ids import NodeId
from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError, NodeNotFoundError

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

SERVICE_NAME = "system/python_actor_service"
"""The actor that each Python node runs for others; who has none cannot be given actors."""

PROCESS_OF = "process_of"
"""Metadata of the service on a node that is one actor's own process: that actor."""

_SHOWN = 20
_SETTLE = 1.0
"""Seconds in which the names of a member are known everywhere (M5)."""
_LOOK = 0.01

Placement = str | int | NodeId

_log = logging.getLogger("pulsing")


class Placer:
    """Chooses nodes for one system."""

    __slots__ = ("_system", "_turn", "_without")

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        # Systems that start together must not all begin with the same node.
        self._turn = random.randrange(1 << 16)
        self._without: set[str] = set()

    async def node(self, placement: Placement) -> NodeId:
        """The node that `placement` means.

        Raises:
            ValueError: It is no placement.
            NodeNotFoundError: Its node or address is no living member; the message lists those that are.
        """
        system = self._system
        if isinstance(placement, str):
            if placement == "local":
                return system.node_id
            if placement == "remote":
                return await self._elsewhere()
        try:
            node = placement if isinstance(placement, NodeId) else NodeId(placement)
        except (ConfigError, TypeError):
            if not isinstance(placement, str) or ":" not in placement:
                raise ValueError(
                    f"placement={shown(placement)}: expected 'local', 'remote', a node id, or the host:port of a member"
                ) from None
            return self._open_to_others(await self._at(placement), placement)
        if node == system.node_id or node.is_local():
            return system.node_id
        if not any(m["node_id"] == str(node) for m in self._living()):
            raise NodeNotFoundError(
                f"placement={shown(str(placement))} is no living member of this cluster; {self._who()}"
            )
        return self._open_to_others(node, placement)

    async def _elsewhere(self) -> NodeId:
        system = self._system
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE
        while True:
            alive = {m["node_id"] for m in system.core.members() if m["state"] == "alive" and not m["me"]}
            served = [one for one in system.core.instances(SERVICE_NAME) if one["node_id"] in alive]
            nodes = sorted(one["node_id"] for one in served if PROCESS_OF not in one["metadata"])
            if nodes:
                self._turn += 1
                return NodeId(nodes[self._turn % len(nodes)])
            # Members are known a moment before their names are.
            silent = alive.difference(self._without, (one["node_id"] for one in served))
            if not silent or loop.time() >= deadline:
                self._without |= silent
                _log.warning("placement='remote', but there is no other Python node: the actor is placed here")
                return system.node_id
            await asyncio.sleep(_LOOK)

    def _open_to_others(self, node: NodeId, placement: Placement) -> NodeId:
        for one in self._system.core.instances(SERVICE_NAME):
            if one["node_id"] == str(node) and PROCESS_OF in one["metadata"] and node != self._system.node_id:
                raise ValueError(
                    f"placement={shown(str(placement))} is the own process of actor {one['metadata'][PROCESS_OF]} "
                    "(new_process=True), which takes no others and ends with it; place the actor on another node, or "
                    "give it a process of its own"
                )
        return node

    async def _at(self, address: str) -> NodeId:
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"placement={shown(address)}: expected host:port with a port from 1 to 65535")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise NodeNotFoundError(
                f"placement={shown(address)}: host {host!r} has no address ({error}); {self._who()}"
            ) from None
        wanted = {(ipaddress.ip_address(one[4][0]), int(port)) for one in found}
        for member in self._living():
            if _endpoint(member["addr"]) in wanted:
                return NodeId(member["node_id"])
        if int(port) == _endpoint(self._system.addr)[1] and any(ip.is_loopback for ip, _ in wanted):
            return self._system.node_id
        raise NodeNotFoundError(f"placement={shown(address)} is no living member of this cluster; {self._who()}")

    def _living(self) -> list[dict[str, Any]]:
        return [m for m in self._system.core.members() if m["state"] in {"alive", "suspect"}]

    def _who(self) -> str:
        living = self._living()
        shown = [f"{m['node_id']} at {m['addr']}{' (this node)' if m['me'] else ''}" for m in living[:_SHOWN]]
        more = f" and {len(living) - _SHOWN} more" if len(living) > _SHOWN else ""
        return f"its members: {', '.join(shown)}{more}"


def _endpoint(addr: str) -> tuple[Any, int]:
    host, _, port = addr.rpartition(":")
    return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port)
