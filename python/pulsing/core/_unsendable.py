"""Why an object cannot leave the process: the part of it that stands in the way, by its path."""

from __future__ import annotations

import pickle
import types
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pulsing.core._errors import text_of
from pulsing.core._pickle import dumps_whole
from pulsing.core._proxy import MethodCall

_BUDGET = 2000
"""Attempts at pickling parts before the search settles for what it has found: a hint, not worth seconds."""

_TELLING = (TypeError, AttributeError, pickle.PicklingError)
"""What the pickle module raises of objects that it cannot pickle."""


def _is_stream(value: Any) -> bool:
    return isinstance(value, (types.GeneratorType, types.CoroutineType, AsyncIterator, MethodCall))


def unsendable(error: TypeError, where: str, parts: list[tuple[str, Any]]) -> TypeError:
    """`error` of pickling `parts`, naming the one at fault and the path inside it.

    Args:
        error: What pickling all of them raised.
        where: What they were on their way to.
        parts: Name and object of each.
    """
    search = _Search()
    for name, part in parts:
        why = search.refusal(part)
        if why is not None:
            if isinstance(why, RecursionError):
                # No part of it is at fault, and its path would fill pages.
                return TypeError(f"cannot send {name} to {where}: it is nested too deeply to be pickled")
            path, culprit, why = search.deepest(name, part, why)
            return TypeError(f"cannot send {path} to {where}: {_reason(culprit, why)}")
    return error


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and value of each argument of a call."""
    named = [(f"argument {at}", one) for at, one in enumerate(args)]
    return named + [(f"argument {key!r}", one) for key, one in kwargs.items()]


def _reason(culprit: Any, why: BaseException) -> str:
    if _is_stream(culprit):
        kind = type(culprit).__name__
        return f"a stream ({kind}) travels as an argument of its own, not inside other objects or answers"
    # Of these the text says all; "'key'" of a KeyError says nothing without its type.
    return text_of(why) if isinstance(why, _TELLING) else f"{type(why).__name__}: {text_of(why)}".removesuffix(": ")


def _source(error: BaseException) -> BaseException:
    """What the pickle module and ours have put into words of their own; else the error itself."""
    while isinstance(error, _TELLING) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


class _Search:
    def __init__(self) -> None:
        self._left = _BUDGET
        self._seen: set[int] = set()

    def refusal(self, part: Any) -> BaseException | None:
        """What pickling `part` raises."""
        self._left -= 1
        try:
            dumps_whole(part)
        except Exception as error:  # noqa: BLE001 - whatever the object's own pickling raises
            return _source(error)
        return None

    def deepest(self, path: str, part: Any, why: BaseException) -> tuple[str, Any, BaseException]:
        """The innermost part that cannot be pickled although all of its own parts can."""
        while True:
            self._seen.add(id(part))
            for step, inner in _inside(part):
                if self._left <= 0:
                    return path, part, why
                if id(inner) in self._seen:
                    continue
                deeper = self.refusal(inner)
                if deeper is not None:
                    path, part, why = path + step, inner, deeper
                    break
            else:
                return path, part, why


def _inside(whole: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with how it is reached."""
    if _is_stream(whole):
        return
    if isinstance(whole, dict):
        for key, value in whole.items():
            yield f".key({key!r})", key
            yield f"[{key!r}]", value
    elif isinstance(whole, (list, tuple, deque)):
        for at, value in enumerate(whole):
            yield f"[{at}]", value
    elif isinstance(whole, (set, frozenset)):
        for value in whole:
            yield f".item({value!r})", value
    if isinstance(whole, types.FunctionType):
        yield from _captured(whole)
    elif isinstance(whole, types.MethodType):
        yield ".__self__", whole.__self__
    elif isinstance(whole, type):
        for name, value in vars(whole).items():
            if not name.startswith("__") or isinstance(value, types.FunctionType):
                yield f".{name}", value
    else:
        state = getattr(whole, "__dict__", None)
        if isinstance(state, dict):
            for name, value in state.items():
                yield f".{name}", value
        for cls in type(whole).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and hasattr(whole, name):
                    yield f".{name}", getattr(whole, name)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"'s variable {name!r}", cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for at, value in enumerate(function.__defaults__ or ()):
        yield f"'s default {at}", value
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"'s global {name!r}", function.__globals__[name]
