"""What a user adds to an engine's command line."""

import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

OverrideValue = str | int | float | bool | list[Any] | dict[str, Any]


def split(
    overrides: Mapping[str, OverrideValue],
    builder: Callable[..., list[str]],
    reserved: Collection[str],
    aliases: Mapping[str, str],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parts overrides into keywords of the builder, type-checked, and further arguments of the engine.

    Args:
        overrides: names in snake or kebab case.
        builder: a command builder.
        reserved: arguments the launcher decides.
        aliases: other names that the engine has for an argument.

    Raises:
        ValueError: one touches what the launcher decides, or its value does not fit.
    """
    hints = typing.get_type_hints(builder)
    known = set(inspect.signature(builder).parameters) - {"extra"}
    keywords: dict[str, Any] = {}
    extra: list[str] = []
    seen: set[str] = set()
    for written, value in overrides.items():
        name = written.lstrip("-").replace("-", "_")
        name = aliases.get(name, name)
        if name in seen:
            raise ValueError(f"override {written!r} is given twice, in two spellings")
        seen.add(name)
        # Engines take an unfinished name for the argument that begins so.
        if name in reserved or (name not in known and any(one.startswith(name) for one in reserved)):
            raise ValueError(
                f"override {written!r} is not possible: the launcher decides it, because it must know every address"
                " and GPU"
            )
        if name in known:
            if not _fits(value, hints[name]):
                raise ValueError(f"override {written!r} is {value!r}; {builder.__name__} takes {_words(hints[name])}")
            keywords[name] = value
        else:
            extra += _flag(written, name, value)
    return keywords, tuple(extra)


def _fits(value: object, hint: Any) -> bool:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            if value in typing.get_args(option):
                return True
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif isinstance(option, type) and isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return True
    return False


def _words(hint: Any) -> str:
    return str(hint.__name__ if isinstance(hint, type) else hint).replace(" | None", "")


def _flag(written: str, name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        raise ValueError(
            f"override {written!r} is false: engines spell that differently; name the opposite, as in no_{name}: true"
        )
    if value is None:
        raise ValueError(f"override {written!r} has no value; leave it out for the engine's default")
    if isinstance(value, list):
        if not value:
            raise ValueError(f"override {written!r} is an empty list")
        return [flag, *(_text(item) for item in value)]
    return [flag, _text(value)]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
