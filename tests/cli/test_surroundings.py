"""What surrounds a command and is not as usual: closed descriptors, full disks, a directory that is gone, odd bytes."""

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pulsing as pul
from pulsing.exceptions import ConfigError

FULL = pathlib.Path("/dev/full")
"""Linux has it."""
COMMAND = [sys.executable, "-m", "pulsing.cli"]
NODE = ["actor", "pulsing.serving.Router", "--addr", "127.0.0.1:0", "--", "--http_port", "0"]


@contextmanager
def running(shell: str, *line: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that a shell becomes, with what `shell` says of its surroundings."""
    process = subprocess.Popen(["/bin/sh", "-c", f'{shell} exec "$@"', "sh", *COMMAND, *line])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1), (0, 1, 2)], ids=str)
def test_descriptors_that_are_closed_are_nobody_elses(closed: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    redirections = " ".join(f"{number}>&-" for number in closed if number) + (" 0<&-" if 0 in closed else "")
    with running(f"exec {redirections};", *NODE, "--access_log", str(log)) as process:
        # The Router opens its log at the start, after sockets and event queues.
        while not log.exists():
            assert process.poll() is None
        if sys.platform == "linux":
            assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in closed} == {os.devnull}
        process.send_signal(signal.SIGTERM)
        # uvloop aborts a process that closes one of the three.
        assert process.wait(30) == 0


@pytest.mark.parametrize("line", [["--version"], ["actor", "--help"], ["fleet", "render", "fleet.yaml"]], ids=" ".join)
def test_results_that_find_no_room_are_a_failure_with_its_reason(line: list[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "fleet.yaml").write_text("fleet: f\ncommands: [{name: c, run: ['true']}]\n")
    if not FULL.exists():
        return
    with FULL.open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *line], check=False, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, b"Error: No space left on device\n")


def test_a_directory_that_is_gone_is_no_place_to_import_from(
    pulsing: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = pulsing("actor", "pulsing.serving.Router", "--help")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        ["--addr", "\udcff"],
        ["--advertise", "\udcff:1", "--addr", "127.0.0.1:0"],
        ["--seeds", "127.0.0.1:1,\udcff:1"],
        ["--cluster", "\udcff"],
        ["--addr", "127.0.0.1:0", "--", "--http_host", "\udcff"],
        ["--addr", "127.0.0.1:0", "--", "--model_name", "caf\udce9"],
        ["--addr", "127.0.0.1:0", "--", "--models", "a=\udcff"],
        ["--addr", "127.0.0.1:0", "--", "--access_log", "/tmp/\udcff"],
        ["--addr", "127.0.0.1:0", "--", "--otlp_endpoint", "http://\udcff"],
    ],
    ids=lambda line: ascii(line[-2:]),
)
def test_a_setting_in_bytes_that_are_no_text_is_misuse(pulsing: Callable[..., Any], line: list[str]) -> None:
    done = pulsing("actor", "pulsing.serving.Router", *line)
    assert (done.code, done.out) == (2, "")
    assert re.search(r"Error: .*expected text in UTF-8", done.err)


def test_the_same_in_a_program() -> None:
    for wrong in ({"addr": "\udcff:1"}, {"seeds": ["\udcff:1"]}, {"cluster": "\udcff"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*expected text in UTF-8"):
            pul.SystemConfig(**wrong)


@pytest.mark.parametrize("code", ["0", "", "'done'"])
def test_a_module_that_ends_the_program_is_no_success(
    pulsing: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "cli_script.py").write_text(f"import sys\nsys.exit({code})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = pulsing("actor", "cli_script.X")
    assert (done.code, done.out) == (1, "")
    assert "cannot import cli_script: it ends the program" in done.err
