"""The command under test, with its module: the installed one, or one built from this checkout."""

import os
import subprocess
import sys
from typing import Any

import pytest
from bench_module import with_module
from scripted import Bench


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `pulsing._bench` can be imported."""
    environ = {name: value for name, value in os.environ.items() if name != "PULSING_BENCH_API_KEY"}
    return with_module(environ, tmp_path_factory.mktemp("bench"))


@pytest.fixture
def bench(environment: dict[str, str]) -> Bench:
    """Runs `pulsing bench ...` to its end."""

    def run(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "pulsing.cli", "bench", *arguments]
        return subprocess.run(
            command, env={**environment, **more}, capture_output=True, text=True, timeout=60, check=False
        )

    return run
