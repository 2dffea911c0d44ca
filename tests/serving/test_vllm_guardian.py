"""What is left of an engine goes with its worker, however that one went."""

import os
import subprocess
import sys
from pathlib import Path

import pulsing.serving


def test_the_guardian_ends_what_carries_the_mark_and_removes_the_folder(tmp_path: Path) -> None:
    mark = f"PULSING_ENGINE_OF={os.getpid()}-test"
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "events").touch()
    program = Path(pulsing.serving.__file__).with_name("_vllm_guardian.py")
    name, _, value = mark.partition("=")
    words = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with subprocess.Popen(words, env={**os.environ, name: value}, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"up\n"
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), mark, str(folder)], stdin=subprocess.PIPE
        )
        assert guardian.stdin is not None
        # As the system does when the worker is gone.
        guardian.stdin.close()
        assert engine.wait(30) == -9
        assert guardian.wait(30) == 0
    assert not folder.exists()
