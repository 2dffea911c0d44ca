"""`_core.pyi` says what the extension has: the same names, the same parameters, everything documented."""

from __future__ import annotations

import ast
import inspect
import pathlib
from typing import Any

import pytest

import pulsing
from pulsing import _core

STUB = ast.parse((pathlib.Path(pulsing.__file__).parent / "_core.pyi").read_text())
BODY = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
PLAIN = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def parameters(node: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each parameter but self and cls."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    listed = [(arg.arg, "positional", n >= without) for n, arg in enumerate(positional)]
    listed += [
        (arg.arg, "keyword", default is not None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return [one for one in listed if one[0] not in {"self", "cls"}]


def real(function: Any) -> list[tuple[str, str, bool]]:
    listed = []
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            continue
        kind = "keyword" if one.kind is inspect.Parameter.KEYWORD_ONLY else "positional"
        listed.append((one.name, kind, one.default is not inspect.Parameter.empty))
    return listed


def test_the_same_names() -> None:
    public = {name for name in vars(_core) if not name.startswith("_") and name != "annotations"} | {"__version__"}
    assert public == set(BODY) | PLAIN


@pytest.mark.parametrize("name", [name for name, node in BODY.items() if isinstance(node, ast.FunctionDef)])
def test_functions(name: str) -> None:
    node = BODY[name]
    assert isinstance(node, ast.FunctionDef)
    assert parameters(node) == real(getattr(_core, name))
    assert ast.get_docstring(node)


@pytest.mark.parametrize("name", [name for name, node in BODY.items() if isinstance(node, ast.ClassDef)])
def test_classes(name: str) -> None:
    node, cls = BODY[name], getattr(_core, name)
    assert isinstance(node, ast.ClassDef)
    assert ast.get_docstring(node)
    if issubclass(cls, Exception):
        return
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    members = {key: value for key, value in vars(cls).items() if not key.startswith("__")}
    assert set(members) == {key for key in methods if not key.startswith("__")}
    if "__new__" in methods:
        assert parameters(methods["__new__"]) == real(cls)
    for key, value in members.items():
        stub = methods[key]
        assert ast.get_docstring(stub), f"{name}.{key} has no docstring"
        decorators = {one.id for one in stub.decorator_list if isinstance(one, ast.Name)}
        assert ("property" in decorators) == (inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value))
        assert ("staticmethod" in decorators) == isinstance(value, staticmethod)
        if "property" not in decorators:
            assert parameters(stub) == real(getattr(cls, key))
