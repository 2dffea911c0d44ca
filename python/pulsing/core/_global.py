"""The process's own system, and the functions that use it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pulsing.core._config import DEFAULT_TIMEOUT, HOOK_TIMEOUT, SystemConfig
from pulsing.core._ending import Which
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._life import STOP_GRACE
from pulsing.core._lifecycle import check_fork, start_logging
from pulsing.core._placement import Placement
from pulsing.core._proxy import ActorProxy
from pulsing.core._refs import ActorRef
from pulsing.core._system import ActorSystem
from pulsing.exceptions import ConfigError, PulsingRuntimeError

_system: ActorSystem | None = None
_starting: asyncio.Future[ActorSystem] | None = None
_starting_with: SystemConfig | None = None


def _config(
    addr: str | None,
    seeds: Sequence[str] | None,
    head_addr: str | None,
    is_head_node: bool,
    settings: dict[str, Any],
) -> SystemConfig:
    if head_addr is not None and is_head_node:
        raise ConfigError("Cannot set both head_addr and is_head_node: a head has no head")
    # A bare string goes on as it is: SystemConfig says in words what is wrong with it.
    joined: Any = seeds if isinstance(seeds, str) else tuple(seeds or ())
    config = SystemConfig(addr=addr, seeds=joined, **settings)
    return config.with_head_addr(head_addr) if head_addr is not None else config


async def init(
    addr: str | None = None,
    *,
    seeds: Sequence[str] | None = None,
    passphrase: str | None = None,
    head_addr: str | None = None,
    is_head_node: bool = False,
    cluster: str = "default",
    insecure: bool = False,
    secret_file: str | None = None,
    join_timeout: float | None = 10.0,
    observe: bool = True,
    default_timeout: float | None = DEFAULT_TIMEOUT,
    start_timeout: float | None = HOOK_TIMEOUT,
    stop_timeout: float = HOOK_TIMEOUT,
    max_message: int | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
) -> ActorSystem:
    """Starts the process's own system, or returns it if it runs with the same arguments.

    Args:
        addr: ``host:port`` to listen on; None: a free port on the interface that reaches the first seed.
        seeds: ``host:port`` of nodes to join; none: this is the first node.
        passphrase: Secret of the cluster: mutual TLS between all who know it.
        head_addr: One more seed; every node can be one, so that there is no special head.
        is_head_node: Accepted for older programs; changes nothing.
        cluster: Name of the cluster; nodes of another name are refused.
        insecure: Take plaintext peers from other hosts without proof; needed on both sides.
        secret_file: File of the per-user secret; None: the default place.
        join_timeout: Seconds to wait for the seeds; None for ever.
        observe: Answer observers on the node's port.
        default_timeout: Seconds a call waits for its first answer unless it says otherwise; None for ever.
        start_timeout: Seconds an actor's `on_start` may take; None for ever.
        stop_timeout: Seconds an actor's `on_stop` may take; a killed actor's gets one.
        max_message: Largest message accepted from a peer, in bytes; None: 4 GiB.
        log_level: How much the runtime itself logs on stderr; default: ``PULSING_LOG``, else "warn". Python's part logs
            to ``logging.getLogger("pulsing")``.
        log_format: "text" or "json"; default: ``PULSING_LOG_FORMAT``, else text.

    Raises:
        PulsingRuntimeError: It runs with other arguments, or on another event loop.
        BindError, JoinError, RefusedError, ConfigError: As they say.
    """
    global _system, _starting, _starting_with  # noqa: PLW0603 - the process has one
    check_fork()
    if log_level is not None or log_format is not None:
        start_logging(log_level, log_format)
    config = _config(
        addr,
        seeds,
        head_addr,
        is_head_node,
        {
            "passphrase": passphrase,
            "cluster": cluster,
            "insecure": insecure,
            "secret_file": secret_file,
            "join_timeout": join_timeout,
            "observe": observe,
            "default_timeout": default_timeout,
            "start_timeout": start_timeout,
            "stop_timeout": stop_timeout,
            "max_message": max_message,
        },
    )
    loop = asyncio.get_running_loop()
    running = _current()
    if running is None and _starting is not None and not _starting.get_loop().is_closed():
        if _starting.get_loop() is not loop:
            raise PulsingRuntimeError(
                "pul.init() runs on another event loop of this process; use pul.actor_system() here"
            )
        _same(_starting_with, config)
        return await asyncio.shield(_starting)
    if running is not None:
        if running.loop is not loop:
            raise PulsingRuntimeError(
                "pul.init() was called on another event loop of this process; pul.actor_system() starts a second system"
            )
        _same(running.config, config)
        return running
    _starting_with = config
    _starting = loop.create_task(ActorSystem.create(config))
    try:
        # Cancelling this call cancels the start; who else waits for it is told so.
        _system = await _starting
    finally:
        _starting = None
    return _system


def _same(before: SystemConfig | None, now: SystemConfig) -> None:
    if before != now:
        raise PulsingRuntimeError(
            f"pul.init() was called before with other arguments ({before}); call pul.shutdown() first, or use "
            "pul.actor_system() for a second system"
        )


def _current() -> ActorSystem | None:
    global _system  # noqa: PLW0603 - as above
    if _system is not None and (_system.is_shut_down or _system.loop.is_closed()):
        _system = None
    return _system


def adopt(system: ActorSystem | None) -> ActorSystem | None:
    """Makes `system` the process's own; returns the one that was."""
    global _system
    before, _system = _current(), system
    return before


async def shutdown(grace: float = 5.0) -> None:
    """Ends the process's own system; nothing happens when there is none.

    Args:
        grace: Seconds that running handlers get to finish.
    """
    global _system
    system, _system = _current(), None
    if system is not None:
        await system.shutdown(grace)


def get_system() -> ActorSystem:
    """The process's own system.

    Raises:
        PulsingRuntimeError: `init` was not called, or `shutdown` was.
    """
    check_fork()
    system = _current()
    if system is None:
        raise PulsingRuntimeError("Actor system not initialized: call `await pul.init()` first")
    return system


def is_initialized() -> bool:
    """Whether the process's own system runs."""
    return _current() is not None


async def actor_system(
    addr: str | None = None,
    *,
    seeds: Sequence[str] | None = None,
    passphrase: str | None = None,
    head_addr: str | None = None,
    is_head_node: bool = False,
    **settings: Any,
) -> ActorSystem:
    """Starts a system of its own, apart from `init`'s; takes the same arguments.

    Raises:
        TypeError: An unknown setting.
        BindError, JoinError, RefusedError, ConfigError: As they say.
    """
    config = _config(addr, seeds, head_addr, is_head_node, {"passphrase": passphrase, **settings})
    return await ActorSystem.create(config)


async def spawn(
    actor: Any,
    *,
    name: str | None = None,
    public: bool | None = None,
    unique: bool = False,
    restart_policy: str = "never",
    max_restarts: int = 3,
    min_backoff: float = 0.1,
    max_backoff: float = 30.0,
    restart_window: float = 300.0,
    mailbox: int | None = None,
    max_concurrency: int | None = None,
    placement: Placement = "local",
    new_process: bool = False,
) -> ActorRef:
    """`ActorSystem.spawn` on the process's own system."""
    return await get_system().spawn(
        actor,
        name=name,
        public=public,
        unique=unique,
        restart_policy=restart_policy,
        max_restarts=max_restarts,
        min_backoff=min_backoff,
        max_backoff=max_backoff,
        restart_window=restart_window,
        mailbox=mailbox,
        max_concurrency=max_concurrency,
        placement=placement,
        new_process=new_process,
    )


async def drain(name: Which) -> None:
    """`ActorSystem.drain` on the process's own system."""
    await get_system().drain(name)


async def stop(name: Which, grace: float = STOP_GRACE) -> None:
    """`ActorSystem.stop` on the process's own system."""
    await get_system().stop(name, grace)


async def kill(name: Which) -> None:
    """`ActorSystem.kill` on the process's own system."""
    await get_system().kill(name)


async def refer(actorid: ActorId | str) -> ActorRef:
    """`ActorSystem.refer` on the process's own system."""
    return await get_system().refer(actorid)


async def resolve(
    name: str, *, cls: Any = None, node_id: str | int | NodeId | None = None, timeout: float | None = None
) -> ActorProxy:
    """`ActorSystem.resolve` on the process's own system."""
    return await get_system().resolve(name, cls=cls, node_id=node_id, timeout=timeout)


def mount(instance: Any, *, name: str, public: bool = True) -> None:
    """Makes any object an actor of the process's own system; `ActorSystem.mount` says how."""
    get_system().mount(instance, name, public)


def unmount(name: str) -> None:
    """Stops what was mounted under `name`; nothing happens when there is no system or no such name."""
    system = _current()
    if system is None:
        return
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is system.loop:
        system.background(system.stop(name))
    else:
        asyncio.run_coroutine_threadsafe(system.stop(name), system.loop).result(30)
