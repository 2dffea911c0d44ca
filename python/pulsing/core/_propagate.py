"""What travels with a call beside its arguments: its trace context, and context variables that the user chose.

The trace context is a W3C ``traceparent``. It comes from `trace`, else from OpenTelemetry where that is loaded and has
an active span, else from the call that is being handled. A chosen variable travels if the caller has set it. A handler
sees them in its own context; calls never see each other's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from sys import modules
from typing import TYPE_CHECKING, Any, TypeVar

from pulsing.core._context import CallContext, current

if TYPE_CHECKING:
    from pulsing.core._delivery import Delivery
    from pulsing.core._system import ActorSystem

T = TypeVar("T")

OTEL = "opentelemetry.trace"
"""Loaded by whoever traces with OpenTelemetry; without it nothing here looks further."""

_HEADERS = ""
"""Key, among the variables' names, of what OpenTelemetry's propagators say beside ``traceparent``."""
_UNSET: Any = object()
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class _Chosen:
    """Whether anything but the trace of the handled call travels, and which variables do."""

    __slots__ = ("active", "variables")

    def __init__(self) -> None:
        self.active = False
        self.variables: dict[str, ContextVar[Any]] = {}


chosen = _Chosen()

_begun: ContextVar[tuple[CallContext | None, str] | None] = ContextVar("pulsing_trace", default=None)
"""What `trace` set, and the call it was set in: an actor spawned meanwhile copies the variable, but not the call."""


def propagate(variable: ContextVar[T]) -> ContextVar[T]:
    """Lets a context variable travel with every call, local and remote, in both roles: caller and callee.

    Call it at import time in every process that should take part; a process that has not does not see the variable. A
    handler has the value that its caller had set; if the caller had set none, the one of where the actor was spawned.
    Changes that the handler makes stay with it.

    Args:
        variable: Its values must be picklable if they are to reach other processes. Its name is what both sides know it
            by.

    Returns:
        The variable itself.

    Raises:
        TypeError: Not a context variable.
        ValueError: Another variable of that name travels already.
    """
    if not isinstance(variable, ContextVar):
        raise TypeError(f"propagate takes a contextvars.ContextVar, not {variable!r}")
    before = chosen.variables.setdefault(variable.name, variable)
    if before is not variable or variable.name == _HEADERS:
        raise ValueError(f"another context variable named {variable.name!r} travels with calls already: rename one")
    chosen.active = True
    return variable


def traceparent() -> str | None:
    """The W3C ``traceparent`` that a call made here and now carries; None: it belongs to no trace."""
    return gather(current.get())[0] if chosen.active or OTEL in modules else _own(current.get())


@contextmanager
def trace(parent: str | None = None) -> Iterator[str]:
    """Calls made in the block belong to a trace.

    Args:
        parent: A W3C ``traceparent``, e.g. from the headers of an HTTP request; None: the one that is current, else one
            of a trace of its own, sampled.

    Yields:
        The ``traceparent``.

    Raises:
        ValueError: Not a ``traceparent``.
    """
    if parent is None:
        parent = traceparent() or f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    elif not _TRACEPARENT.fullmatch(parent):
        raise ValueError(f"traceparent {parent!r}: expected version-traceid-parentid-flags in hex, as W3C has it")
    chosen.active = True
    token = _begun.set((current.get(), parent))
    try:
        yield parent
    finally:
        _begun.reset(token)


def _own(context: CallContext | None) -> str | None:
    begun = _begun.get()
    if begun is not None and begun[0] is context:
        return begun[1]
    return None if context is None else context.trace


def gather(context: CallContext | None) -> tuple[str | None, dict[str, Any]]:
    """The trace context and the variables that a call made here and now carries."""
    values: dict[str, Any] = {}
    for name, variable in chosen.variables.items():
        value = variable.get(_UNSET)
        if value is not _UNSET:
            values[name] = value
    parent = _own(context)
    if OTEL in modules:
        from opentelemetry.propagate import inject

        headers: dict[str, str] = {}
        inject(headers)
        active = headers.pop("traceparent", None)
        begun = _begun.get()
        if active is not None and (begun is None or begun[0] is not context):
            parent = active
        if headers:
            values[_HEADERS] = headers
    return parent, values


def pack(values: dict[str, Any]) -> dict[str, bytes]:
    """What a call carries, for another process; each value by itself, for a variable may be unknown there.

    Raises:
        TypeError: A value cannot be pickled.
    """
    from pulsing.core._pickle import dumps_whole

    packed = {}
    for name, value in values.items():
        try:
            packed[name] = dumps_whole(value)
        except TypeError as error:
            from pulsing.core._unsendable import unsendable

            what = [(f"context variable {name!r}", value)]
            raise unsendable(error, "another process", what) from error.__cause__
    return packed


def arrive(packed: dict[str, bytes] | None, system: ActorSystem) -> dict[str, Any] | None:
    """What a call from elsewhere gives its handler; None: nothing, in the usual case."""
    if packed is None:
        return {} if OTEL in modules else None
    from pulsing.core._pickle import loads

    known = chosen.variables
    return {name: loads(data, (), system) for name, data in packed.items() if name in known or name == _HEADERS}


def enter(d: Delivery) -> None:
    """Gives the handler, in whose own context this runs, what its call carries."""
    carried = d.carried or {}
    for name, value in carried.items():
        variable = chosen.variables.get(name)
        if variable is not None:
            variable.set(value)
    if OTEL in modules:
        from opentelemetry.context import Context, attach
        from opentelemetry.propagate import extract

        headers = dict(carried.get(_HEADERS, {}))
        if d.trace is not None:
            headers["traceparent"] = d.trace
        # Without a parent, too: the actor's context has the span that was active when it was spawned.
        attach(extract(headers, context=Context()))
