"""The table of `tests/README.md` says the truth: each of its tests exists, where it says."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROWS = re.findall(r"^\| .+ \| `(\S+)` \|$", (ROOT / "tests/README.md").read_text(), re.MULTILINE)


def _python(text: str) -> set[str]:
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def _rust(text: str) -> set[str]:
    return set(re.findall(r"#\[(?:tokio::)?test[^\]]*\]\s*(?:async )?fn (\w+)", text))


@pytest.mark.parametrize("row", ROWS)
def test_the_test_of_a_scenario_exists(row: str) -> None:
    path, _, name = row.partition("::")
    text = (ROOT / path).read_text()
    assert name in (_rust(text) if path.endswith(".rs") else _python(text))


def test_every_scenario_has_its_test() -> None:
    scenarios = (ROOT / "tests/README.md").read_text().partition("| trouble | test |")[2]
    assert len(re.findall("^\\| [^-]", scenarios, re.MULTILINE)) == len(ROWS) >= 49
