"""Runs the command line inside the test's process: fast, and with the real entry point."""

import dataclasses
from collections.abc import Callable

import pytest

from pulsing.cli.main import main


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def pulsing(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`pulsing("inspect", "cluster", ...)`."""

    def run(*argv: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        captured = capfd.readouterr()
        code = ended.value.code
        return Result(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run
