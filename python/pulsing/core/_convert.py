"""Text and JSON values into what an annotation asks for."""

import collections.abc
import dataclasses
import enum
import json
import math
import pathlib
import re
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

from pulsing.core._shown import shown

TRUE_WORDS = {"true", "1", "yes", "on"}
FALSE_WORDS = {"false", "0", "no", "off"}
_NONE_WORDS = {"none", "null"}

_SEQUENCES: dict[Any, Any] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Set: frozenset,
}
# An IPv6 address with its port, as the first of a list of addresses; JSON has no such beginning.
_BRACKETED = re.compile(r"\s*\[[0-9a-fA-F]*:[0-9a-fA-F:.]*(%[^\]]*)?\]")
_MAPPINGS = {dict, collections.abc.Mapping, collections.abc.MutableMapping}
# In a union the strictest reading that fits wins: "1" for `int | str` is a number, for `bool | int` too.
_UNION_ORDER: list[Any] = [int, float, bool]


class ConvertError(ValueError):
    """The value does not fit; the text says what would."""


def describe(annotation: Any) -> str:
    """An annotation the way a user would write it."""
    if annotation is Any:
        return "text or JSON"
    if annotation is type(None):
        return "none"
    origin = get_origin(annotation)
    if origin is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if _is_union(annotation):
        return " | ".join(describe(member) for member in get_args(annotation))
    if origin is typing.Annotated:
        return describe(get_args(annotation)[0])
    if origin is not None:
        inner = ", ".join("..." if arg is ... else describe(arg) for arg in get_args(annotation))
        return f"{_name(origin)}[{inner}]"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "|".join(member.name.lower() for member in annotation)
    return _name(annotation)


def from_text(annotation: Any, text: str) -> Any:
    """Reads `text` as the command line gives it.

    Raises:
        ConvertError: it does not fit the annotation.
    """
    annotation = _plain(annotation)
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return _literal(annotation, text)
    if _is_union(annotation):
        return _union(annotation, text)
    if annotation is Any or annotation is object:
        return _json_or_text(text)
    if annotation is str:
        return text
    if annotation is bool:
        return _bool(text)
    if annotation is int:
        return _number(int, text)
    if annotation is float:
        return _number(float, text)
    if annotation is type(None):
        if text.lower() in _NONE_WORDS:
            return None
        raise ConvertError(f"{shown(text)} is not none")
    if origin in _SEQUENCES:
        return _sequence(annotation, origin, text)
    if origin in _MAPPINGS or dataclasses.is_dataclass(annotation):
        return from_json(annotation, _json(text, "an object"))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _enum(annotation, text)
    if isinstance(annotation, type) and issubclass(annotation, pathlib.PurePath):
        return annotation(text)
    raise ConvertError(f"a {describe(annotation)} cannot be given on the command line")


def from_json(annotation: Any, value: Any) -> Any:
    """Checks a value that came as JSON (`-D`) against the annotation.

    Raises:
        ConvertError: it does not fit.
    """
    annotation = _plain(annotation)
    origin = get_origin(annotation) or annotation
    if annotation is Any or annotation is object:
        return value
    if origin is Literal:
        # True == 1 in Python; a choice is taken only with its own type.
        for choice in get_args(annotation):
            if choice == value and type(choice) is type(value):
                return choice
        raise ConvertError(f"{shown(value)} is none of {describe(annotation)}")
    if _is_union(annotation):
        for member in get_args(annotation):
            try:
                return from_json(member, value)
            except ConvertError:
                continue
        raise ConvertError(f"{shown(value)} is not {describe(annotation)}")
    if annotation is type(None) and value is None:
        return None
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if annotation in (bool, int, str) and type(value) is annotation:
        return value
    if origin in _SEQUENCES and isinstance(value, list):
        return _build_sequence(annotation, origin, value, from_json)
    if origin in _MAPPINGS and isinstance(value, dict):
        arguments = get_args(annotation)
        if not arguments:
            return value
        return {from_text(arguments[0], key): from_json(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, dict):
        return _dataclass(annotation, value)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum | pathlib.PurePath) and isinstance(value, str):
        return from_text(annotation, value)
    raise ConvertError(f"{_as_json(value)} is not {describe(annotation)}")


def is_sequence(annotation: Any) -> bool:
    """Whether repeated options add up to one value."""
    annotation = _plain(annotation)
    if _is_union(annotation):
        return any(is_sequence(member) for member in get_args(annotation))
    return (get_origin(annotation) or annotation) in _SEQUENCES


def accepts_flag(annotation: Any) -> bool:
    """Whether a bare `--name` may stand for true."""
    annotation = _plain(annotation)
    if _is_union(annotation):
        return any(accepts_flag(member) for member in get_args(annotation))
    return annotation in (bool, Any, object)


def _plain(annotation: Any) -> Any:
    while get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _name(annotation: Any) -> str:
    return str(getattr(annotation, "__name__", annotation))


def _bool(text: str) -> bool:
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ConvertError(f"{shown(text)} is not a bool (true, false, 1, 0, yes, no, on, off)")


def _number(kind: type[int] | type[float], text: str) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        raise ConvertError(f"{shown(text)} is not {'an int' if kind is int else 'a float'}") from None
    if isinstance(number, float) and math.isnan(number):
        raise ConvertError("nan is not a number a parameter can have")
    return number


def _literal(annotation: Any, text: str) -> Any:
    for choice in get_args(annotation):
        if str(choice) == text:
            return choice
    for choice in get_args(annotation):
        if str(choice).lower() == text.lower():
            return choice
    raise ConvertError(f"{shown(text)} is none of {describe(annotation)}")


def _enum(annotation: type[enum.Enum], text: str) -> enum.Enum:
    for member in annotation:
        if text.lower() in (member.name.lower(), str(member.value).lower()):
            return member
    raise ConvertError(f"{shown(text)} is none of {describe(annotation)}")


def _union(annotation: Any, text: str) -> Any:
    members = [_plain(member) for member in get_args(annotation)]
    if type(None) in members and text.lower() in _NONE_WORDS:
        return None

    def rank(member: Any) -> int:
        if get_origin(member) is Literal or (isinstance(member, type) and issubclass(member, enum.Enum)):
            return 0
        if member in _UNION_ORDER:
            return 1 + _UNION_ORDER.index(member)
        return 99 if member is str else 50

    reasons = []
    for member in sorted((m for m in members if m is not type(None)), key=rank):
        try:
            return from_text(member, text)
        except ConvertError as error:
            reasons.append(str(error))
    raise ConvertError(reasons[0] if len(reasons) == 1 else f"{shown(text)} is not {describe(annotation)}")


def _sequence(annotation: Any, origin: Any, text: str) -> Any:
    if text.lstrip().startswith("[") and not _BRACKETED.match(text):
        return from_json(annotation, _json(text, "a list"))
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return _build_sequence(annotation, origin, parts, from_text)


def _build_sequence(annotation: Any, origin: Any, parts: list[Any], convert: Any) -> Any:
    arguments = get_args(annotation)
    build = _SEQUENCES[origin]
    if origin is tuple and arguments and arguments[-1] is not ...:
        if len(parts) != len(arguments):
            raise ConvertError(f"{len(parts)} values given, {describe(annotation)} has {len(arguments)}")
        return tuple(convert(kind, part) for kind, part in zip(arguments, parts, strict=True))
    kind = arguments[0] if arguments else Any
    return build(convert(kind, part) for part in parts)


def _dataclass(annotation: type[Any], value: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(annotation)
    known = [field.name for field in dataclasses.fields(annotation) if field.init]
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ConvertError(f"{annotation.__name__} has no {shown(unknown[0])}; it has {', '.join(known)}")
    try:
        return annotation(**{key: from_json(hints.get(key, Any), item) for key, item in value.items()})
    except TypeError as error:
        raise ConvertError(f"{annotation.__name__}: {error}") from None


def _as_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}\u2026"


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConvertError(f"{shown(text)} is not {what} in JSON: {error}") from None
    except RecursionError:
        raise ConvertError(f"{shown(text)} is not {what}: it is nested too deeply") from None


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
    except RecursionError:
        raise ConvertError(f"{shown(text)} is nested too deeply") from None
