"""The environments of the contestants: a venv each, made from PyPI, kept outside the tree, keyed by what is in it."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What a wheel is built from.
SOURCES = ["crates", "python", "proto", "Cargo.toml", "Cargo.lock", "pyproject.toml"]

COMMON = ["uvloop==0.23.0", "numpy==2.4.6"]
PEERS = {
    "peer": ["pulsing==0.1.2", *COMMON],
    "xoscar": ["xoscar==0.12.2", *COMMON],
    "ray": ["ray==2.60.0", *COMMON],
    "echo": COMMON,
}


def cache() -> pathlib.Path:
    """Where environments, wheels and build outputs are kept: $PULSING_BENCH_CACHE, else under the user's cache."""
    chosen = os.environ.get("PULSING_BENCH_CACHE")
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    path = pathlib.Path(chosen) if chosen else base / "pulsing-bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def run(*words: str, cwd: pathlib.Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a command to its end; says what it said when it fails."""
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed ({done.returncode}):\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def venv(name: str, requirements: list[str]) -> pathlib.Path:
    """Python of an environment with exactly `requirements`, made at its first use."""
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    home = cache() / f"{name}-{key}"
    python = home / "bin" / "python"
    # Written last, so that a broken installation is never taken for a whole one.
    complete = home / "complete"
    if not complete.exists():
        print(f"making the environment of {name}: {', '.join(requirements)}", file=sys.stderr, flush=True)
        shutil.rmtree(home, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(home))
        run(str(python), "-m", "pip", "install", "-q", *requirements)
        complete.write_text(run(str(python), "-m", "pip", "freeze"))
    return python


def peer(name: str) -> pathlib.Path:
    """Python of one of the `PEERS`."""
    return venv(name, PEERS[name])


def versions(python: pathlib.Path, *packages: str) -> dict[str, str]:
    """Installed versions of `packages`."""
    code = "import sys, importlib.metadata as m; print(*[m.version(p) for p in sys.argv[1:]])"
    return dict(zip(packages, run(str(python), "-c", code, *packages).split(), strict=True))


def tree_key(tree: pathlib.Path) -> str:
    """What tells one state of the sources from another, committed or not."""
    head = run("git", "rev-parse", "HEAD:crates", "HEAD:python", "HEAD:Cargo.lock", "HEAD:pyproject.toml", cwd=tree)
    changes = run("git", "diff", "HEAD", "--", *SOURCES, cwd=tree)
    fresh = run("git", "ls-files", "--others", "--exclude-standard", "--", *SOURCES, cwd=tree)
    text = head + changes + "".join((tree / name).read_text(errors="replace") for name in fresh.split())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def target(tree: pathlib.Path, name: str = "pulsing") -> pathlib.Path:
    """Where cargo builds the crates of `tree`, without what it built of another tree.

    Cargo takes the crates of two trees for the same ones, and what it built later of either for up to date in the
    other: it compares times of files. A wheel would then be of sources that are not its tree's.
    """
    place = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or cache() / "target")
    mark = place / f"{name}-built-from"
    if not mark.exists() or mark.read_text() != str(tree):
        place.mkdir(parents=True, exist_ok=True)
        mark.unlink(missing_ok=True)
        found = json.loads(run("cargo", "metadata", "-q", "--no-deps", "--format-version", "1", cwd=tree))
        crates = [word for package in found["packages"] for word in ("-p", package["name"])]
        run("cargo", "clean", "-q", "--release", "--target-dir", str(place), *crates, cwd=tree)
        mark.write_text(str(tree))
    return place


def build_wheel(tree: pathlib.Path, key: str, name: str = "pulsing") -> pathlib.Path:
    """The release wheel of a tree."""
    place = cache() / "wheels" / key
    found = list(place.glob(f"{name}-*.whl"))
    if not found:
        print(f"building the release wheel of {tree} ({key})", file=sys.stderr, flush=True)
        env = {**os.environ, "CARGO_TARGET_DIR": str(target(tree, name))}
        env.pop("MATURIN_PEP517_ARGS", None)
        with tempfile.TemporaryDirectory() as out:
            run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, str(tree), env=env)
            place.mkdir(parents=True, exist_ok=True)
            for wheel in pathlib.Path(out).glob(f"{name}-*.whl"):
                shutil.move(wheel, place / wheel.name)
        found = list(place.glob(f"{name}-*.whl"))
    return found[0]


def ours() -> pathlib.Path:
    """Python of an environment with the release wheel of this tree."""
    wheel = build_wheel(ROOT, tree_key(ROOT))
    return venv(f"pulsing-{wheel.parent.name}", [str(wheel), *COMMON])


def locked(*crates: str) -> dict[str, str]:
    """Versions of crates that `pyo3_async/` is built with."""
    text = (ROOT / "benches" / "pyo3_async" / "Cargo.lock").read_text()
    return {name: re.findall(rf'name = "{name}"\nversion = "([^"]+)"', text)[0] for name in crates}


def pyo3_async() -> pathlib.Path:
    """Python of an environment with `pyo3_async/`, a crate outside the workspace."""
    crate = ROOT / "benches" / "pyo3_async"
    files = [crate / name for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml", "src/lib.rs")]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    wheel = build_wheel(crate, f"pyo3-async-{key}", "pyo3_async_bench")
    return venv("pyo3-async", [str(wheel), *COMMON])


def at_commit(commit: str) -> pathlib.Path:
    """Python of an environment with the release wheel of a commit."""
    sha = run("git", "rev-parse", "--short=12", commit, cwd=ROOT).strip()
    with tempfile.TemporaryDirectory() as out:
        tree = pathlib.Path(out) / "tree"
        tree.mkdir()
        place = cache() / "wheels" / sha
        if not list(place.glob("pulsing-*.whl")):
            archive = subprocess.run(["git", "archive", sha], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "x", "-C", str(tree)], input=archive, check=True)
        wheel = build_wheel(tree, sha)
    return venv(f"pulsing-{sha}", [str(wheel), *COMMON])
