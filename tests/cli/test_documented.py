"""What the documentation shows can be typed: commands and their options, Python and the names it uses."""

import ast
import contextlib
import importlib
import pathlib
import re
import shlex
import textwrap

import pytest
import typer

import pulsing as pul
from pulsing.cli import _actor, _argv, _constructor
from pulsing.cli._errors import FailureError
from pulsing.cli.main import app

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path, *languages: str) -> list[str]:
    """What stands between fences of these languages."""
    return [textwrap.dedent(body) for language, body in BLOCK.findall(page.read_text()) if language in languages]


def commands() -> list[str]:
    """Every command line that a page shows."""
    lines = []
    for page in PAGES:
        for body in blocks(page, "", "bash", "sh"):
            for line in re.sub(r"\\\n\s*", " ", body).splitlines():
                # What stands far to the right says what the command is for.
                shown = re.split(r" #|\s{3,}", line.strip())[0]
                if re.match(r"pulsing (actor|inspect|bench|fleet) (?!\|)", shown):
                    lines.append(shown)
    return sorted(set(lines))


@pytest.mark.parametrize("line", commands())
def test_a_command_takes_what_it_is_shown_with(line: str) -> None:
    head, tail = _argv.split(shlex.split(line)[1:])
    command = typer.main.get_command(app)
    words = _argv.normalise(head, command)
    context = None
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    context = command.make_context("pulsing", words)
    path = context.params.get("cls")
    if path is not None and path.startswith("pulsing."):
        constructor = _actor._constructor_of(path)[1]
        # An engine that is not installed here cannot say what it takes.
        with contextlib.suppress(FailureError):
            _constructor.arguments(constructor, tail or [], context.params["define"] or [], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_is_python_and_its_names_exist(page: pathlib.Path) -> None:
    for body in blocks(page, "python"):
        compile(body, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for module, names in re.findall(r"^from (pulsing\S*) import (.*)$", body, re.MULTILINE):
            for name in re.findall(r"\w+", names):
                assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for name in re.findall(r"\bpul\.(\w+(?:\.\w+)?)", page.read_text()):
        found = pul
        for part in name.split("."):
            assert hasattr(found, part), f"pul.{name}"
            found = getattr(found, part)
