"""Exit and fork: what happens to systems that nobody shut down (R13)."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, NoReturn

from pulsing import _core
from pulsing.exceptions import ConfigError, PulsingRuntimeError

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

_LEAVE_SECONDS = 0.5
_THREADS_SECONDS = 1.0

_systems: weakref.WeakSet[ActorSystem] = weakref.WeakSet()
_owner: int | None = None
"""The process that prepared; a forked child is another one."""
_logging: tuple[str, str] | None = None


def prepare() -> None:
    """Installs the exit hook, once; refuses a forked child.

    Raises:
        PulsingRuntimeError: This process was forked from one that had started Pulsing.
    """
    global _owner  # noqa: PLW0603 - the process has one
    check_fork()
    if _owner is None:
        _owner = os.getpid()
        atexit.register(_at_exit)


def start_logging(level: str | None = None, form: str | None = None) -> None:
    """Starts the runtime's own log, once a process; later calls change nothing.

    Args:
        level: As in ``PULSING_LOG``, which it defaults to: error, warn, info, debug, trace, or a filter such as
            ``info,pulsing_core::net=debug``. Default: warn.
        form: "text" or "json"; default: ``PULSING_LOG_FORMAT``, else text.

    Raises:
        ConfigError: Neither.
    """
    global _logging  # noqa: PLW0603 - the process has one log
    environ = os.environ
    level = level or environ.get("PULSING_LOG") or environ.get("PULSING_LOG_LEVEL") or "warn"
    form = form or environ.get("PULSING_LOG_FORMAT") or "text"
    try:
        _core.init_logging(level, form)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _logging = _logging or (level, form)


def logging_settings() -> tuple[str, str] | None:
    """What the log was started with, for the processes that belong to this one."""
    return _logging


def check_fork() -> None:
    """Refuses a forked child.

    Raises:
        PulsingRuntimeError: As above.
    """
    if _owner is not None and _owner != os.getpid():
        _refuse()


def _refuse() -> NoReturn:
    raise PulsingRuntimeError(
        "this process was forked from one that had started Pulsing, whose threads do not exist here; start it with "
        "multiprocessing's 'spawn' or 'forkserver' method, or fork before the first pul.init()"
    )


def track(system: ActorSystem) -> None:
    """Remembers a running system."""
    _systems.add(system)


def untrack(system: ActorSystem) -> None:
    """Forgets a system that has left."""
    _systems.discard(system)


def _at_exit() -> None:
    if _owner != os.getpid():
        return
    _core.leave_all([system.core for system in list(_systems) if not system.is_shut_down], _LEAVE_SECONDS)
    _core.stop_runtime(_THREADS_SECONDS)
