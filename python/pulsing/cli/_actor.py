"""`pulsing actor`: one node, one actor, until a signal."""

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pulsing.cli import _constructor, _load, _logging, _settings
from pulsing.cli._errors import FailureError, MisuseError

if TYPE_CHECKING:
    from pulsing.core import ActorId, ActorSystem

DEFAULT_NAME = "worker"
_FIRST_HINT = 1.0
_LOOK_EVERY = 0.5
_YOUNG = 10_000
"""Objects that the collector lets come up before it looks at them. A request has some 25, which live as long as it: at
CPython's own 700 (2,000 since 3.14) those of 64 requests are all looked at, for a tenth of a small Worker's CPU."""

_KEPT = 64 << 20
"""Bytes of free memory that a heap keeps at its end: twice what 64 prompts of 220 KB take in a Worker's process. By
itself glibc gives them back after each, and to get them again, page by page, is over half of a Worker's CPU."""
_FILES = 65_536
"""Open files that are enough: Linux gives a process 1,024, and of those each client of a Router takes one.
Not all that the system allows, which may be a thousand million: there is code that walks through them."""

_MAPPED = 32 << 20
"""Bytes from which memory is the system's again as soon as it is free: as far as glibc goes by itself, in time."""


def class_help(path: str) -> str:
    """What `pulsing actor CLASS --help` says about the class."""
    return _constructor.help_text(_constructor_of(path)[1])


def run(
    path: str,
    name: str | None,
    flags: Mapping[str, Any],
    config: str | None,
    tokens: Sequence[str],
    defines: Sequence[str],
    options: Collection[str],
) -> None:
    """Starts the actor and serves until SIGTERM or SIGINT.

    Args:
        path: full path of the class.
        name: name to serve under; None takes the class's `default_name`, else `worker`.
        flags: node settings from the command line, None for what was not given.
        config: TOML file of settings.
        tokens: the command line after `--`.
        defines: values of `-D`.
        options: canonical names of the options before `--`.

    Raises:
        MisuseError: what was asked for cannot be meant.
        FailureError: the node or the actor did not come up, or the actor ended by itself.
    """
    # What is left to the default here must not come from another file there.
    settings = {**_settings.resolve(flags, config), "config": config}
    found, constructor = _constructor_of(path)
    arguments = _constructor.arguments(constructor, tokens, defines, options)
    if name is None:
        name = str(getattr(_load.actor_class(found, path), "default_name", DEFAULT_NAME))
    _logging.configure(settings["log_level"], settings["log_format"])
    say = _logging.speaker(settings["log_format"])
    collect_less()
    keep_memory(os.environ)
    open_more_files()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(found, name, settings, arguments, say))


def collect_less() -> None:
    """Has the collector look at young objects less often, unless the actor's module told it not to, or less still."""
    young, *older = gc.get_threshold()
    if 0 < young < _YOUNG:
        gc.set_threshold(_YOUNG, *older)


def open_more_files() -> int:
    """Raises this process's limit of open files as far as it may without being asked; the limit that it has then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    # Some containers refuse even what the hard limit allows; then it is as it was.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def keep_memory(environ: Mapping[str, str]) -> bool:
    """Has glibc's allocator keep what large messages need again at once. False: it is another one, or was told already.

    Args:
        environ: Where ``MALLOC_TRIM_THRESHOLD_`` and the like are looked up; who sets one of them has all as it says.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h; 1 says that it was taken.
    return bool(mallopt(-1, _KEPT) and mallopt(-3, _MAPPED))


def _constructor_of(path: str) -> tuple[Any, _constructor.Constructor]:
    found = _load.load_class(path)
    return found, _constructor.constructor_of(_load.actor_class(found, path), path)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(
    found: Any, name: str, settings: dict[str, Any], arguments: dict[str, Any], say: Callable[[str], None]
) -> None:
    import pulsing as pul

    signalled = _first_signal(say)
    try:
        running = await _unless(signalled, _start(found, name, settings, arguments, say))
        if running is None:
            return
        system, actor_id = running
        say(f"{name} started at {system.addr}")
        while not signalled.done():
            await asyncio.wait([signalled], timeout=_LOOK_EVERY)
            if not signalled.done() and system.cell(actor_id) is None:
                raise FailureError(f"{name} ended by itself")
    finally:
        await pul.shutdown()


async def _start(
    found: Any, name: str, settings: dict[str, Any], arguments: dict[str, Any], say: Callable[[str], None]
) -> "tuple[ActorSystem, ActorId]":
    import pulsing as pul
    from pulsing.core import ActorClass
    from pulsing.exceptions import ConfigError, InvalidNameError, PulsingError

    passphrase = None if settings["cert"] else _settings.passphrase(settings["passphrase_file"])
    try:
        async with _telling_what_it_waits_for(settings["seeds"], say):
            system = await pul.init(
                settings["addr"],
                seeds=settings["seeds"],
                passphrase=passphrase,
                config=settings["config"],
                **_settings.of_the_node(settings),
            )
    except ConfigError as error:
        raise MisuseError(str(error)) from error
    except PulsingError as error:
        raise FailureError(str(error)) from error
    try:
        if isinstance(found, ActorClass):
            proxy = await found.spawn(name=name, public=True, **arguments)
            return system, proxy.ref.actor_id
        ref = await system.spawn(lambda: found(**arguments), name=name, public=True)
    except InvalidNameError as error:
        raise MisuseError(str(error)) from error
    except ConfigError as error:
        # Of the actor's own settings, such as a Router's; a file of them that cannot be read is no misuse.
        kind = FailureError if isinstance(error.__cause__, OSError) else MisuseError
        raise kind(f"{name} did not start: {error}") from error
    except Exception as error:
        # Constructors and on_start hooks raise what they like; the user wants its words, and the place at debug level.
        _logging.trace_of(error)
        raise FailureError(f"{name} did not start: {type(error).__name__}: {error}") from error
    return system, ref.actor_id


@asynccontextmanager
async def _telling_what_it_waits_for(seeds: Sequence[str], say: Callable[[str], None]) -> AsyncIterator[None]:
    """Tells it once, early: somebody may look at the terminal. Every 5 s the runtime says why it still waits."""
    telling = None
    if seeds:
        loop = asyncio.get_running_loop()
        telling = loop.call_later(_FIRST_HINT, say, f"waiting for seeds {', '.join(seeds)}")
    try:
        yield
    finally:
        if telling is not None:
            telling.cancel()


def _first_signal(say: Callable[[str], None]) -> asyncio.Future[int]:
    """Resolves with the first SIGTERM or SIGINT; the second ends the process with 128 plus its number."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()

    def caught(number: int) -> None:
        if first.done():
            os._exit(128 + number)
        say(f"{signal.Signals(number).name}: stopping; another one ends it at once")
        first.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, caught, number)
    return first


async def _unless(signalled: asyncio.Future[int], work: Any) -> Any:
    """The result of `work`, or None when a signal comes first: `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({signalled, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None
