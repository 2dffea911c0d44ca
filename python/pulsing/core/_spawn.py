"""What an actor is made from and how it is to live: the two halves of every spawn, here or on another node."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pulsing.core._checks import check_flag, clean_name
from pulsing.core._errors import text_of
from pulsing.core._ids import ActorId
from pulsing.core._pickle import dumps_whole, is_main, loads
from pulsing.core._proxy import ActorProxy, method_names
from pulsing.core._refs import ActorRef
from pulsing.core._remote import ActorClass, import_class
from pulsing.core._shown import shown
from pulsing.core._supervision import RestartPolicy, check_limits
from pulsing.core._threads import run_in_thread
from pulsing.exceptions import CodeNotFoundError, ConfigError

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Code that travels by value is byte code, which other versions of Python cannot run."""

Source = tuple[str, Any]
"""("import", (module, qualname)), or ("value", (version of Python, pickle))."""


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """How an actor lives.

    Args:
        name: Name to serve under.
        public: Publish the name; None: when there is one.
        policy: How it is supervised.
        mailbox: Messages that may wait (16 to 1,000,000).
        max_concurrency: Handlers that may interleave.
        unique: The name is for this actor alone in the whole cluster.
        new_process: It lives in a process of its own.

    Raises:
        ConfigError: A unique actor without a public name.
        TypeError, ValueError: Numbers and flags that make no sense.
    """

    name: str | None = None
    public: bool | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    mailbox: int | None = None
    max_concurrency: int | None = None
    unique: bool = False
    new_process: bool = False

    def __post_init__(self) -> None:
        if self.name is not None:
            clean_name(self.name)
        if self.public is not None:
            check_flag("public", self.public)
        check_flag("unique", self.unique)
        check_flag("new_process", self.new_process)
        if self.unique and (self.name is None or self.public is False):
            raise ConfigError("unique=True: a unique actor needs a name, and a public one")
        check_limits(self.mailbox, self.max_concurrency)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What makes an actor's instance: a class or a factory, and its arguments."""

    make: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def blocking(self) -> bool:
        """Whether it runs in a thread."""
        return bool(getattr(self.make, "_pulsing_blocking", False))

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{getattr(self.make, '__module__', '?')}.{getattr(self.make, '__qualname__', repr(self.make))}"

    def build(self) -> Any:
        """Makes an instance."""
        return self.make(*self.args, **self.kwargs)

    def source(self) -> Source:
        """`make` as it travels.

        Raises:
            TypeError: It cannot be pickled.
        """
        made = self.make
        if inspect.isclass(made) and not is_main(made):
            return "import", (made.__module__, made.__qualname__)
        return "value", (PYTHON, dumps_whole(made))


class Given:
    """A factory that gives out one instance."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __call__(self) -> Any:
        return self._actor


def blueprint(actor: Any, policy: RestartPolicy) -> Blueprint:
    """What `spawn` makes of its argument: a class or a factory as it is, an instance as what gives it out.

    Raises:
        TypeError: Nothing that can be an actor, or supervision without a factory.
    """
    if isinstance(actor, (ActorProxy, ActorRef)):
        raise TypeError(f"{shown(actor)} is an actor already")
    if isinstance(actor, ActorClass):
        return Blueprint(actor.cls)
    if inspect.isclass(actor) or inspect.isroutine(actor) or (callable(actor) and not _is_actor(actor)):
        return Blueprint(actor)
    if policy.restarts:
        raise TypeError(
            f"restart_policy={policy.policy!r} needs a zero-argument factory, such as the class or a lambda: a "
            f"{type(actor).__name__} that failed cannot be made again"
        )
    check_actor(actor)
    return Blueprint(Given(actor))


def check_actor(actor: Any) -> None:
    """Raises TypeError for an instance that nobody could call, or that is plain data."""
    if isinstance(actor, _DATA):
        raise TypeError(
            f"{shown(actor)} cannot be an actor: it is data. Pass an instance of a class of yours, or the class"
        )
    if not _is_actor(actor):
        raise TypeError(f"{shown(actor)} cannot be an actor: it has neither receive() nor public methods")


_DATA = (str, bytes, bytearray, memoryview, int, float, complex, list, tuple, dict, set, frozenset)


def _is_actor(actor: Any) -> bool:
    return callable(getattr(actor, "receive", None)) or bool(method_names(type(actor)))


async def arrived(source: Source, node: str) -> Callable[..., Any]:
    """The class or factory that another node sent.

    Args:
        source: What came.
        node: How errors name this node.

    Raises:
        CodeNotFoundError: It cannot be made here; the message names module, node and way out.
    """
    how, what = source
    if how == "import":
        module, qualname = what
        if module in sys.modules:
            return _imported(module, qualname, node)
        import contextvars

        # What a module loads may take seconds, which the loop's other actors would stand still.
        found: Callable[..., Any] = await run_in_thread(contextvars.copy_context(), _imported, module, qualname, node)
        return found
    version, pickled = what
    if version != PYTHON:
        raise CodeNotFoundError(
            f"the class or factory travels by value from Python {version}, and node {node} runs Python {PYTHON}, which "
            "cannot run its byte code: put it into a module that both can import, or run the same Python on both",
            node=node,
        )
    try:
        made: Callable[..., Any] = loads(pickled)
    except (ImportError, AttributeError) as error:
        raise unreadable(error, "the class or factory", node) from error
    return made


def _imported(module: str, qualname: str, node: str) -> type:
    return import_class(module, qualname, node).cls


def unreadable(error: ImportError | AttributeError, what: str, node: str) -> CodeNotFoundError:
    """The error for a pickle that needs code which is not here."""
    module = getattr(error, "name", None) if isinstance(error, ImportError) else None
    return CodeNotFoundError(
        f"{what} cannot be read on node {node}: {text_of(error)}; install "
        f"{f'module {module!r}' if module else 'that code'} there too, or define what is sent in the main program, "
        "from where it travels by value",
        module=module,
        node=node,
    )


@dataclass(frozen=True, slots=True)
class Order:
    """A spawn as it is asked of another node. The id is the asker's, who can take the actor back by it."""

    source: Source
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: SpawnOptions
    actor: ActorId
