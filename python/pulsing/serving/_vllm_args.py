"""vLLM's engine arguments: which there are, without importing vLLM, and their values as vLLM reads them."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["INSTALL", "check", "check_half", "convert", "engine_arguments"]

INSTALL = "vLLM is not installed here; install it with: pip install 'pulsing[vllm]'"

# What the Worker decides itself, from its own parameters.
_OWN = frozenset({"model", "served_model_name"})
# Text that must stay text although it may look like a number or a word of JSON: a revision 1234, a name "null".
_TEXT = {"str": str, "str | None": str, "bool": bool, "float": float}


def engine_arguments() -> Mapping[str, Any]:
    """Names of the installed vLLM's engine arguments, each with the type to read its text as (``Any``: as it looks).

    The names are read from the source of vLLM's argument class: importing vLLM takes ten seconds and more, too long to
    be told of a misspelling.

    Raises:
        ModuleNotFoundError: vLLM is not installed; the message says which command installs it.
    """
    # find_spec runs nothing of a package at the top level.
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(INSTALL, name="vllm")
    return _read(Path(next(iter(spec.submodule_search_locations))) / "engine" / "arg_utils.py")


@functools.cache
def _read(file: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.ClassDef) or statement.name not in ("EngineArgs", "AsyncEngineArgs"):
            continue
        for field in statement.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[field.target.id] = _TEXT.get(ast.unparse(field.annotation), Any)
    return {name: kind for name, kind in found.items() if name not in _OWN and not name.startswith("_")}


def check(given: Iterable[str], own: Iterable[str]) -> None:
    """Refuse names that vLLM does not know.

    Args:
        given: names of engine arguments.
        own: names of the Worker's own parameters, which a misspelt name may have meant.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        TypeError: a name is unknown; the message has the most similar one.
    """
    known = engine_arguments()
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, [*own, *known], n=1)
            raise TypeError(
                f"VllmWorker has no parameter {name}, and vLLM no engine argument of that name"
                + (f" - did you mean {close[0]}?" if close else "")
            )


def check_half(role: str, transfer: object) -> None:
    """Refuse a half that could not meet the other one.

    Args:
        role: ``prefill`` or ``decode``.
        transfer: the engine argument ``kv_transfer_config``: a dict, its JSON, or vLLM's own class.

    Raises:
        ValueError: there is none, or it is for the other half.
    """
    own, other = ("kv_producer", "kv_consumer") if role == "prefill" else ("kv_consumer", "kv_producer")
    example = f'{{"kv_connector": "NixlConnector", "kv_role": "{own}"}}'
    if not transfer:
        raise ValueError(
            f"role {role} needs a KV connector, by which vLLM's two halves meet: --kv_transfer_config '{example}'"
        )
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except ValueError as error:
            raise ValueError(f"kv_transfer_config {transfer!r} is no JSON: {error}; as an example: {example}") from None
    kv_role = transfer.get("kv_role") if isinstance(transfer, dict) else getattr(transfer, "kv_role", None)
    if kv_role == other:
        raise ValueError(f"role {role} does not go with kv_role {other} of kv_transfer_config; it is {own} or kv_both")


def convert(given: Mapping[str, Any], parser: Any) -> dict[str, Any]:
    """Values for vLLM's argument class, texts read as vLLM's own command line reads them (``8k``, JSON, choices).

    Args:
        given: engine arguments as they came from a command line or from Python.
        parser: an ``argparse`` parser that holds vLLM's engine options.

    Raises:
        ValueError: vLLM does not take a value; the message names the argument and what it takes.
    """
    # argparse tells its options in no other way.
    options = {action.dest: action for action in parser._actions}
    return {name: _value(name, value, options.get(name)) for name, value in given.items()}


def _value(name: str, value: Any, option: Any) -> Any:
    if option is None or value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        # Settings with parts are read from JSON text on vLLM's command line, and checked there.
        return _read_one(name, json.dumps(value), option) if callable(option.type) else value
    if not isinstance(value, str):
        return value
    if option.nargs in ("+", "*"):
        return [_read_one(name, part.strip(), option) for part in value.split(",")]
    return _read_one(name, value, option)


def _read_one(name: str, text: str, option: Any) -> Any:
    read = option.type
    try:
        value = read(text) if callable(read) else text
    except Exception as error:  # the readers of vLLM raise what they like: ValueError, pydantic's, argparse's
        raise ValueError(f"vLLM does not take {name}={text!r}: {error}") from error
    if option.choices is not None and value not in option.choices:
        raise ValueError(f"vLLM does not take {name}={text!r}; it takes {', '.join(map(str, option.choices))}")
    return value
