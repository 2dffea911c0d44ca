"""Running a node until it is told to stop, and the functions that ask a node about itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

from pulsing.core._service import get_system_actor
from pulsing.core._system import ActorSystem

__all__ = [
    "DEFAULT_ASK_TIMEOUT",
    "ask_with_timeout",
    "run_until_signal",
    "spawn_and_run",
    "tell_with_timeout",
    "wait_for_signal",
]

DEFAULT_ASK_TIMEOUT = 30.0

_log = logging.getLogger("pulsing")


async def ask_with_timeout(ref: Any, msg: Any, timeout: float | None = DEFAULT_ASK_TIMEOUT) -> Any:
    """`ref.ask(msg)` with a deadline in seconds."""
    return await ref.ask(msg, timeout=timeout)


async def tell_with_timeout(ref: Any, msg: Any, timeout: float | None = DEFAULT_ASK_TIMEOUT) -> None:
    """`ref.tell(msg)`, waiting at most `timeout` seconds for a place in a full mailbox."""
    async with asyncio.timeout(timeout):
        await ref.tell(msg)


async def wait_for_signal(*extra: asyncio.Future[Any]) -> int | None:
    """Returns the first SIGTERM or SIGINT, or None when one of `extra` is done; the next signal then exits with code
    1.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[int] = loop.create_future()

    def caught(number: int) -> None:
        if arrived.done():
            # Whoever asks twice does not want to wait for anything.
            os._exit(1)
        arrived.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, caught, number)
    await asyncio.wait({arrived, *extra}, return_when=asyncio.FIRST_COMPLETED)
    if arrived.done():
        return arrived.result()
    arrived.set_result(0)
    return None


async def run_until_signal(
    actor_name: str | None = None, *, system: ActorSystem | None = None, grace: float = 5.0
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and leaves the cluster; a second signal exits at once with code 1.

    Args:
        actor_name: Named in the log line.
        system: Which system; None: the process's own.
        grace: Seconds that running handlers get to finish.
    """
    from pulsing.core._global import get_system

    system = system or get_system()
    number = await wait_for_signal()
    _log.info("%s: %s, stopping", actor_name or system.addr, signal.Signals(number or signal.SIGTERM).name)
    await system.shutdown(grace)


async def spawn_and_run(
    actor: Any, name: str, addr: str | None = None, seeds: Sequence[str] | None = None, public: bool = True
) -> None:
    """Starts the process's own system and one actor in it, and serves until a signal; see `run_until_signal`."""
    from pulsing.core._global import init

    system = await init(addr, seeds=seeds)
    await system.spawn(actor, name=name, public=public)
    await run_until_signal(name, system=system)


async def list_actors(system: ActorSystem) -> list[dict[str, Any]]:
    """The actors of this node: name, actor_id, class, public, internal, metadata, waiting, restarts."""
    return await (await get_system_actor(system)).list_actors()


async def get_metrics(system: ActorSystem) -> dict[str, Any]:
    """Counters of this node."""
    return await (await get_system_actor(system)).get_metrics()


async def get_node_info(system: ActorSystem) -> dict[str, Any]:
    """Who this node is: node_id, addr, uptime_secs."""
    return await (await get_system_actor(system)).get_node_info()


async def health_check(system: ActorSystem) -> dict[str, Any]:
    """How this node is: status, actors_count, uptime_secs."""
    return await (await get_system_actor(system)).health_check()


async def ping(system: ActorSystem, node_id: Any = None) -> dict[str, Any]:
    """Proof of life of a node, by default this one: node_id, timestamp in milliseconds."""
    return await (await get_system_actor(system, node_id)).ping()
