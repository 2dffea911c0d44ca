"""Which methods a class offers and how each one runs (R12, R14), and the envelope a call travels in."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any] | type)

# Envelope of a pickled call: (operation, name, args, kwargs).
OP_CALL = 0
"""Call method `name`."""
OP_MESSAGE = 1
"""Give args[0] to `receive`."""
OP_GET = 2
"""Read the public attribute `name`."""
OP_AUTO = 3
"""`tell("text")` on an untyped proxy: method `name` if there is one and no `receive`, else a message."""

HOOKS = frozenset(
    {"receive", "on_start", "on_stop", "on_terminated", "metadata", "delayed", "set_metadata", "on_protocol_call"}
)
"""Public names of an actor class that are no remote methods."""


class MethodSpec:
    """How one method runs.

    Attributes:
        name: Its attribute name.
        kind: "sync", "async", "gen" or "agen".
        blocking: Runs in a thread.
        exclusive: One at a time with the actor's other exclusive methods; others interleave.
    """

    __slots__ = ("blocking", "exclusive", "kind", "name")

    def __init__(self, name: str, kind: str, blocking: bool, exclusive: bool) -> None:
        self.name = name
        self.kind = kind
        self.blocking = blocking
        self.exclusive = exclusive


def hook(function: F) -> F:
    """Marks a method of the runtime's own on `Actor`: a class may have a remote method of that name instead."""
    marked: Any = function
    marked._pulsing_hook = True
    return function


def serial(target: F) -> F:
    """Marks an async method, or all of a class, to run one at a time instead of interleaving."""
    marked: Any = target
    marked._pulsing_serial = True
    return target


def blocking(target: F) -> F:
    """Marks a sync method, or all sync methods of a class and its constructor, to run in a thread.

    The event loop then never stalls; the actor itself stays busy until the thread returns, which nothing can cut short.
    """
    if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        raise TypeError(f"@pul.blocking is for sync methods and classes; {target.__name__} is async already")
    marked: Any = target
    marked._pulsing_blocking = True
    return target


def _kind(function: Any) -> str:
    if inspect.isasyncgenfunction(function):
        return "agen"
    if inspect.iscoroutinefunction(function):
        return "async"
    if inspect.isgeneratorfunction(function):
        return "gen"
    return "sync"


def spec_of(cls: type, name: str) -> MethodSpec:
    """How attribute `name` of `cls` runs."""
    function = inspect.getattr_static(cls, name)
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    kind = _kind(inspect.unwrap(function) if callable(function) else function)
    blocks = bool(getattr(function, "_pulsing_blocking", False) or getattr(cls, "_pulsing_blocking", False))
    blocks = blocks and kind in {"sync", "gen"}
    one_at_a_time = (
        kind == "sync"
        or name == "receive"
        or bool(getattr(function, "_pulsing_serial", False))
        or bool(getattr(cls, "_pulsing_serial", False))
        or blocks
    )
    return MethodSpec(name, kind, blocks, one_at_a_time)


_tables: weakref.WeakKeyDictionary[type, dict[str, MethodSpec]] = weakref.WeakKeyDictionary()


def methods_of(cls: type) -> dict[str, MethodSpec]:
    """The remote methods of `cls`: public callables that are no hooks of the runtime."""
    table = _tables.get(cls)
    if table is None:
        table = {}
        for name in dir(cls):
            if name.startswith("_") or name in HOOKS:
                continue
            attribute = inspect.getattr_static(cls, name, None)
            if getattr(attribute, "_pulsing_hook", False):
                continue
            if isinstance(attribute, (staticmethod, classmethod)) or (
                callable(attribute) and not isinstance(attribute, type)
            ):
                table[name] = spec_of(cls, name)
        _tables[cls] = table
    return table


_receive: weakref.WeakKeyDictionary[type, MethodSpec | None] = weakref.WeakKeyDictionary()


def receive_of(cls: type) -> MethodSpec | None:
    """How `receive` of `cls` runs; None if it has none."""
    if cls not in _receive:
        _receive[cls] = spec_of(cls, "receive") if callable(getattr(cls, "receive", None)) else None
    return _receive[cls]
