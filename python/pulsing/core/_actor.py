"""The base class of raw actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from pulsing.core._dispatch import OP_CALL, hook
from pulsing.core._ids import ActorId
from pulsing.exceptions import PulsingRuntimeError, PulsingUnsupportedError

if TYPE_CHECKING:
    from pulsing.core._cell import Cell
    from pulsing.core._proxy import ActorProxy
    from pulsing.core._refs import ActorRef
    from pulsing.core._watch import Ended, Watch

_log = logging.getLogger("pulsing")


class _Delayed:
    """`self.delayed(seconds)`: its attributes are the actor's methods, called later, as `tell`."""

    __slots__ = ("_cell", "_delay")

    def __init__(self, cell: Cell, delay: float) -> None:
        self._cell = cell
        self._delay = delay

    def __getattr__(self, name: str) -> Callable[..., asyncio.Task[None]]:
        if name.startswith("_"):
            raise AttributeError(name)
        cell = self._cell
        if name not in cell.methods:
            raise AttributeError(f"actor {cell.label} has no method {name!r}")
        delay = self._delay

        def schedule(*args: Any, **kwargs: Any) -> asyncio.Task[None]:
            async def later() -> None:
                await asyncio.sleep(delay)
                await cell.system.ref_of(cell)._tell(OP_CALL, name, args, kwargs)

            return cell.system.background(later())

        return schedule


def nothing() -> None:
    """What the runtime's marks on an instance become when it is pickled: the copy is no actor."""


class Delayer:
    """`self.delayed` of a running actor."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __call__(self, delay: float) -> Any:
        """Calls one of the actor's own methods after `delay` seconds: ``task = self.delayed(2.0).tick()``.

        The message goes through the mailbox like any other. `task.cancel()` takes it back.

        Raises:
            ValueError: `delay` is negative.
        """
        if delay < 0:
            raise ValueError(f"delayed({delay}): expected seconds, 0 or more")
        return _Delayed(self._cell, delay)

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()


def adopt_tools(instance: Any, cell: Cell) -> None:
    """Gives an instance what actors have, as far as its class leaves the names free."""
    with contextlib.suppress(AttributeError, TypeError):
        object.__setattr__(instance, "_pulsing_cell", cell)
    if isinstance(instance, Actor):
        return
    for name in _TOOLS:
        if getattr(instance, name, None) is None:
            with contextlib.suppress(AttributeError, TypeError):
                tool = Delayer(cell) if name == "delayed" else Tool(cell, name)
                object.__setattr__(instance, name, tool)


_TOOLS = ("delayed", "watch", "unwatch", "link", "unlink")


class Tool:
    """`self.watch` and its like on an instance that is no `Actor`."""

    __slots__ = ("_cell", "_name")

    def __init__(self, cell: Cell, name: str) -> None:
        self._cell = cell
        self._name = name

    def __call__(self, target: Any) -> Any:
        from pulsing.core._watch import tools_of

        return getattr(tools_of(self._cell), self._name)(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()


def cell_of(actor: Any) -> Cell:
    """The running actor behind an instance.

    Raises:
        PulsingRuntimeError: The instance is not spawned.
    """
    cell = getattr(actor, "_pulsing_cell", None)
    if cell is None:
        raise PulsingRuntimeError(f"this {type(actor).__name__} is not running as an actor: spawn it first")
    return cast("Cell", cell)


class Actor(ABC):  # noqa: B024 - receive is optional: an actor may offer methods only
    """An actor that takes messages in `receive`, and calls of its public methods.

    All but `receive` and the hooks below are called through a proxy, as with ``@pul.remote``.
    """

    async def receive(self, msg: Any) -> Any:
        """Handles one message; what it returns is the answer. May be sync, or return a generator to answer with a
        stream.

        Raises:
            PulsingUnsupportedError: The class does not override it.
        """
        methods = ", ".join(sorted(cell_of(self).methods)) or "none"
        raise PulsingUnsupportedError(
            f"{type(self).__qualname__} takes no messages: it has no receive(). Its methods: {methods}"
        )

    def on_start(self, actor_id: ActorId) -> Any:  # noqa: B027 - optional hook
        """Runs before the first message; may be async. What it raises, `spawn` raises, and it gets the system's
        `start_timeout`.
        """

    def on_stop(self) -> Any:  # noqa: B027 - optional hook
        """Runs after the last message, once for each instance; may be async. It gets the system's `stop_timeout`."""

    def on_terminated(self, ended: Ended) -> Any:  # noqa: B027 - optional hook
        """Runs when an actor has ended that this one watches; may be async. It passes messages that wait (R4)."""

    @hook
    def watch(self, target: ActorRef | ActorProxy) -> Watch:
        """Watches an actor: when it has ended, `on_terminated` runs. Watching twice changes nothing; the watch survives
        restarts of this actor and ends with it.

        Args:
            target: A reference or proxy.
        """
        from pulsing.core._watch import tools_of

        return tools_of(cell_of(self)).watch(target)

    @hook
    def unwatch(self, target: ActorRef | ActorProxy) -> None:
        """Ends a watch; nothing happens when there is none."""
        from pulsing.core._watch import tools_of

        tools_of(cell_of(self)).unwatch(target)

    @hook
    async def link(self, target: ActorRef | ActorProxy) -> None:
        """Links this actor to another, as `pul.link` does; from `on_start` it takes effect once the actor is ready."""
        from pulsing.core._watch import tools_of

        await tools_of(cell_of(self)).link(target)

    @hook
    async def unlink(self, target: ActorRef | ActorProxy) -> None:
        """Undoes `link`."""
        from pulsing.core._watch import tools_of

        await tools_of(cell_of(self)).unlink(target)

    def metadata(self) -> dict[str, str]:
        """What is published with the name (1 KB in all); read once, at the start."""
        return {}

    def delayed(self, delay: float) -> Any:
        """Calls one of the actor's own methods after `delay` seconds: ``self.delayed(2.0).tick()``.

        Returns an object with the actor's methods; each returns the task that will send the message.
        """
        return Delayer(cell_of(self))(delay)

    def set_metadata(self, **values: str) -> None:
        """Replaces published metadata keys, at any time; without effect before the actor is spawned.

        Raises:
            ConfigError: More than 1 KB in all.
        """
        cell = getattr(self, "_pulsing_cell", None)
        if cell is not None:
            cell.system.set_metadata(cell, values)


DEFAULT_HOOKS = frozenset({Actor.on_start, Actor.on_stop})
"""Hooks that do nothing."""
