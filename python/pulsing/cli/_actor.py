"""`pulsing actor`: one node, one actor, until a signal."""

import asyncio
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from pulsing.cli import _constructor, _load, _settings
from pulsing.cli._errors import FailureError

DEFAULT_NAME = "worker"
_SAY_EVERY = 5.0

T = TypeVar("T")


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
        MisuseError: before anything was started.
        FailureError: the node or the actor did not come up, or the actor died.
    """
    settings = _settings.resolve(flags, config)
    found, constructor = _constructor_of(path)
    arguments = _constructor.arguments(constructor, tokens, defines, options)
    actor_name = name if name is not None else getattr(_load.actor_class(found, path), "default_name", DEFAULT_NAME)
    _configure_logging(settings["log_level"], settings["log_format"])
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(found, path, actor_name, settings, arguments))
    except FailureError:
        raise
    except KeyboardInterrupt:
        # asyncio turns a SIGINT that came before our handlers into this; nothing was started then.
        sys.exit(130)


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


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
