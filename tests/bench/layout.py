"""`make bench-layout`: installs both packages for real, in every mix of wheel and editable, and uses them.

Builds from a copy of the checkout, so that no extension of the checkout itself is touched; takes minutes.
"""

import itertools
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = ROOT / "target" / "bench-layout"
SOURCE = WORK / "source"
MANIFESTS = {"pulsing": "crates/pulsing-py/Cargo.toml", "pulsing-bench": "crates/pulsing-bench-py/Cargo.toml"}


def run(*command: str | pathlib.Path, **more: str) -> str:
    """Runs to a good end, or ends this with what the command said."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=SOURCE,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def copy_source() -> None:
    """What git knows of, and what it would be told of."""
    SOURCE.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            goal = SOURCE / name
            goal.parent.mkdir(parents=True, exist_ok=True)
            # Equal files keep their time: cargo builds only what changed.
            if not goal.exists() or goal.read_bytes() != (ROOT / name).read_bytes():
                shutil.copyfile(ROOT / name, goal)


def tool() -> pathlib.Path:
    """maturin: beside this Python, on the path, or installed for this."""
    beside = pathlib.Path(sys.executable).parent / "maturin"
    found = beside if beside.exists() else shutil.which("maturin")
    if found:
        return pathlib.Path(found)
    tools = WORK / "tools"
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin" / "pip", "install", "--quiet", "maturin>=1.9,<2")
    return tools / "bin" / "maturin"


def install(package: str, how: str, venv: pathlib.Path, maturin: pathlib.Path, wheels: dict[str, pathlib.Path]) -> None:
    """Installs one package as a user would."""
    if how == "wheel":
        run(venv / "bin" / "pip", "install", "--quiet", wheels[package])
    elif package == "pulsing":
        run(maturin, "develop", "--profile", "ci", VIRTUAL_ENV=str(venv))
    else:
        run(maturin, "develop", "--profile", "ci", "--manifest-path", MANIFESTS[package], VIRTUAL_ENV=str(venv))


def main() -> None:
    """All four mixes, in both orders of installation."""
    copy_source()
    maturin = tool()
    wheels = {}
    for package, manifest in MANIFESTS.items():
        out = WORK / "wheels" / package
        shutil.rmtree(out, ignore_errors=True)
        extra = () if package == "pulsing" else ("--manifest-path", manifest)
        run(maturin, "build", "--profile", "ci", "--out", out, *extra)
        wheels[package] = next(out.glob("*.whl"))
    for hows in itertools.product(("wheel", "editable"), repeat=2):
        for order in itertools.permutations(zip(MANIFESTS, hows, strict=True)):
            # An editable build leaves its extension in the source: none may help another mix.
            for left in SOURCE.rglob("*.abi3.so"):
                left.unlink()
            venv = WORK / "venv"
            # maturin hands pip a dependency group, which the pip that comes with CPython 3.11 does not know.
            run(sys.executable, "-m", "venv", "--clear", "--upgrade-deps", venv)
            for package, how in order:
                install(package, how, venv, maturin, wheels)
            python = venv / "bin" / "python"
            run(python, "-P", "-c", "import pulsing, pulsing._core, pulsing._bench as b; b.Run")
            assert "MODEL" in run(venv / "bin" / "pulsing", "bench", "--help")
            run(venv / "bin" / "pip", "uninstall", "--quiet", "-y", "pulsing-bench")
            refused = subprocess.run(
                [venv / "bin" / "pulsing", "bench", "gpt2", "--url", "http://localhost:1"],
                cwd=WORK,
                capture_output=True,
                text=True,
                check=False,
            )
            assert refused.returncode == 2, refused
            assert "pulsing._bench module not found" in refused.stderr
            sys.stdout.write("ok: " + ", then ".join(f"{package} as {how}" for package, how in order) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
