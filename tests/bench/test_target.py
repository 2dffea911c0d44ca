"""What the benchmarks and the upgrade test build is of the tree they name."""

import importlib.util
import os
import pathlib
import subprocess
from types import ModuleType

import pytest

BENCHES = pathlib.Path(__file__).resolve().parents[2] / "benches"


def harness(name: str) -> ModuleType:
    """A module of `benches/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, BENCHES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree(folder: pathlib.Path, says: str) -> pathlib.Path:
    """A crate, last touched long ago, as what an archive of an old commit holds."""
    (folder / "src").mkdir(parents=True)
    (folder / "Cargo.toml").write_text('[package]\nname = "told"\nversion = "0.0.0"\nedition = "2024"\n[workspace]\n')
    (folder / "src" / "main.rs").write_text(f'fn main() {{ println!("{says}"); }}\n')
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return folder


def test_one_target_directory_serves_two_trees(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "target"))
    venv = harness("runtime_venv")

    def told(folder: pathlib.Path) -> str:
        place = venv.target(folder)
        subprocess.run(["cargo", "build", "-q", "--release", "--offline"], cwd=folder, check=True)
        return subprocess.run([place / "release" / "told"], check=True, capture_output=True, text=True).stdout.strip()

    one, other = tree(tmp_path / "one", "one"), tree(tmp_path / "other", "other")
    assert [told(one), told(other), told(other), told(one)] == ["one", "other", "other", "one"]
