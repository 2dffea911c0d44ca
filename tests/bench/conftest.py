"""The command under test, with its module: the installed one, or one built from this checkout."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from scripted import Bench

ROOT = pathlib.Path(__file__).resolve().parents[2]


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the module as cargo does, without a wheel; `folder` is what goes on the path."""
    command = ["cargo", "build", "--profile", "ci", "-p", "pulsing-bench-py", "--features", "extension-module"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    library = "lib_bench.dylib" if sys.platform == "darwin" else "lib_bench.so"
    (folder / "pulsing").mkdir()
    shutil.copy(target / "ci" / library, folder / "pulsing" / "_bench.abi3.so")
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `pulsing._bench` can be imported."""
    environ = {name: value for name, value in os.environ.items() if name != "PULSING_BENCH_API_KEY"}
    if importlib.util.find_spec("pulsing._bench") is None:
        folder = build(tmp_path_factory.mktemp("bench"))
        # The path works because the package looks for further `pulsing` folders on it.
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))
    return environ


@pytest.fixture
def bench(environment: dict[str, str]) -> Bench:
    """Runs `pulsing bench ...` to its end."""

    def run(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "pulsing.cli", "bench", *arguments]
        return subprocess.run(
            command, env={**environment, **more}, capture_output=True, text=True, timeout=60, check=False
        )

    return run
