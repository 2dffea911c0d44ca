"""The process's own system, and the functions that use it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from pulsing.core._config import NodeSettings, SystemConfig
from pulsing.core._ending import Which
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._lifecycle import check_fork, start_logging
from pulsing.core._name_watch import NameWatch
from pulsing.core._placement import Placement
from pulsing.core._proxy import ActorProxy
from pulsing.core._refs import ActorRef
from pulsing.core._settings import BY_NAME, given, nearest
from pulsing.core._settings import passphrase as read_passphrase
from pulsing.core._system import ActorSystem
from pulsing.exceptions import ConfigError, PulsingRuntimeError

_PKI = ("cert", "key", "ca")
_system: ActorSystem | None = None
_starting: asyncio.Future[ActorSystem] | None = None
_starting_with: SystemConfig | None = None


def _config(
    addr: str | None,
    seeds: Sequence[str] | None,
    head_addr: str | None,
    is_head_node: bool,
    settings: Mapping[str, Any],
) -> SystemConfig:
    if head_addr is not None and is_head_node:
        raise ConfigError("Cannot set both head_addr and is_head_node: a head has no head")
    known = [one.name for one in dataclasses.fields(SystemConfig)]
    for name in settings:
        if name not in known:
            raise TypeError(f"unknown setting {name!r}{nearest(name, known)}; there are: {', '.join(known)}")
    # Whatever it is goes on as it is: SystemConfig says in words what is wrong with it.
    named: Any = () if seeds is None else seeds
    config = SystemConfig(addr=addr, seeds=named, **settings)
    return config.with_head_addr(head_addr) if head_addr is not None else config


async def init(
    addr: str | None = None,
    *,
    seeds: Sequence[str] | None = None,
    passphrase: str | None = None,
    passphrase_file: str | os.PathLike[str] | None = None,
    head_addr: str | None = None,
    is_head_node: bool = False,
    config: str | os.PathLike[str] | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
    **settings: Unpack[NodeSettings],
) -> ActorSystem:
    """Starts the process's own system, or returns it if it runs with the same settings.

    What is not given here comes from ``PULSING_*`` variables, then from the file, then from the defaults;
    `docs/reference/settings.md` lists all.

    Args:
        addr: ``host:port`` to listen on; None: a free port on the interface that reaches the first seed.
        seeds: Nodes to join, as for `SystemConfig`; none: this is the first node.
        passphrase: Secret of the cluster: mutual TLS between all who know it.
        passphrase_file: File with that secret.
        head_addr: One more seed; every node can be one, so that there is no special head.
        is_head_node: Accepted for older programs; changes nothing.
        config: TOML file of settings; default: ``PULSING_CONFIG``, if set.
        log_level: How much the runtime itself logs on stderr; default: ``PULSING_LOG``, else "warn". Python's part logs
            to ``logging.getLogger("pulsing")``.
        log_format: "text" or "json".
        **settings: As for `SystemConfig`.

    Raises:
        TypeError: An unknown setting.
        PulsingRuntimeError: It runs with other settings, or on another event loop.
        BindError, JoinError, RefusedError, ConfigError: As they say.
    """
    global _system, _starting, _starting_with  # noqa: PLW0603 - the process has one
    check_fork()
    for name, value in (("passphrase_file", passphrase_file), ("log_level", log_level), ("log_format", log_format)):
        if value is not None:
            BY_NAME[name].check(value)
    values = given(config, os.environ)
    usual = values.pop("log_level", None), values.pop("log_format", None)
    level, form = log_level or os.environ.get("PULSING_LOG") or usual[0], log_format or usual[1]
    if level is not None or form is not None:
        start_logging(level, form)
    secret = values.pop("passphrase_file", None)
    certified = any(settings.get(name) is not None for name in _PKI)
    if passphrase is not None or passphrase_file is not None or settings.get("insecure"):
        # Who says here how the cluster is kept together is not contradicted by the environment.
        for name in _PKI:
            values.pop(name, None)
    values.update(settings)
    if passphrase is None and (passphrase_file is not None or not (settings.get("insecure") or certified)):
        passphrase = read_passphrase(secret if passphrase_file is None else passphrase_file, os.environ)
    values["passphrase"] = passphrase
    usual_addr, usual_seeds = values.pop("addr", None), values.pop("seeds", None)
    wanted = _config(
        usual_addr if addr is None else addr,
        usual_seeds if seeds is None else seeds,
        head_addr,
        is_head_node,
        values,
    )
    loop = asyncio.get_running_loop()
    running = _current()
    if running is None and _starting is not None and not _starting.get_loop().is_closed():
        if _starting.get_loop() is not loop:
            raise PulsingRuntimeError(
                "pul.init() runs on another event loop of this process; use pul.actor_system() here"
            )
        _same(_starting_with, wanted)
        return await asyncio.shield(_starting)
    if running is not None:
        if running.loop is not loop:
            raise PulsingRuntimeError(
                "pul.init() was called on another event loop of this process; pul.actor_system() starts a second system"
            )
        _same(running.config, wanted)
        return running
    _starting_with = wanted
    _starting = loop.create_task(ActorSystem.create(wanted))
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


async def shutdown(grace: float | None = None) -> None:
    """Ends the process's own system; nothing happens when there is none.

    Args:
        grace: Seconds that running handlers get to finish; default: the system's `stop_grace`.
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
    **settings: Unpack[NodeSettings],
) -> ActorSystem:
    """Starts a system of its own, apart from `init`'s, and from what the environment says.

    Args:
        addr: As for `init`, and so are the others.
        seeds: Nodes to join.
        passphrase: Secret of the cluster.
        head_addr: One more seed.
        is_head_node: Changes nothing.
        **settings: As for `SystemConfig`.

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
    max_restarts: int | None = None,
    min_backoff: float | None = None,
    max_backoff: float | None = None,
    restart_window: float | None = None,
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


async def stop(name: Which, grace: float | None = None) -> None:
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


def watch_name(name: str) -> NameWatch:
    """`ActorSystem.watch_name` on the process's own system: ``async for change in pul.watch_name("worker")``."""
    return get_system().watch_name(name)


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
