"""The guide's files are fleets, and its commands run as written."""

import pathlib
import re
import subprocess
import sys

import pytest
from fleet_support import Fleet

from pulsing.fleet import load
from pulsing.fleet._placement import rendered_statically

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "fleet.md").read_text()
EXAMPLE = (ROOT / "examples" / "fleet.yaml").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize(
    ("text", "suffix"),
    [(EXAMPLE, ".yaml"), *((one, ".yaml") for one in blocks("yaml")), *((one, ".py") for one in blocks("python"))],
)
def test_every_file_of_the_guide_renders(tmp_path: pathlib.Path, text: str, suffix: str) -> None:
    path = tmp_path / f"fleet{suffix}"
    path.write_text(text)
    layout = rendered_statically(load(path))
    assert all(layout.commands(cell) for cell in layout.cells)
    assert [layout.join_argv(cell) for cell in layout.cells]


def test_the_commands_of_the_guide(fleet: Fleet) -> None:
    fleet.file.write_text(blocks("yaml")[0])
    lines = blocks("bash")[0].splitlines()
    assert [line.split()[2] for line in lines] == ["render", "up", "ps", "logs", "down"]
    for line in lines:
        words = [sys.executable, "-m", "pulsing.cli", *line.split()[1:]]
        if "up" in words:
            with fleet.said.open("ab") as said:
                fleet.launcher = subprocess.Popen(
                    words, stdout=said, stderr=said, env=fleet.env(None), cwd=fleet.directory
                )
            for cell in (0, 1):
                fleet.wait(f"files/{cell}", fleet="demo")
        else:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=40, check=False, env=fleet.env(None), cwd=fleet.directory
            )
            assert done.returncode == 0, done.stderr
    assert fleet.processes("demo") == []
