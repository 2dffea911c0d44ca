"""The two packages share one Python package, however each is installed.

`make bench-layout` does the same with real installs.
"""

import importlib.util
import itertools
import pathlib
import shutil
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(importlib.util.find_spec("pulsing").submodule_search_locations[0])  # type: ignore[union-attr,index]


@pytest.mark.parametrize(("main", "extra"), list(itertools.product(("wheel", "editable"), repeat=2)))
def test_every_mix_of_wheel_and_editable_finds_both(
    main: str, extra: str, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "import pulsing._bench, pulsing._core as c; print(pulsing._bench.__file__, c.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    site, sources = tmp_path / "site", {name: tmp_path / name for name in ("main", "extra")}
    # A wheel's files lie in site-packages; an editable install puts its source folder on the path after it.
    homes = {
        "main": site if main == "wheel" else sources["main"],
        "extra": site if extra == "wheel" else sources["extra"],
    }
    site.mkdir()
    shutil.copytree(
        PACKAGE, homes["main"] / "pulsing", ignore=shutil.ignore_patterns("*.so", "__pycache__"), dirs_exist_ok=True
    )
    (homes["extra"] / "pulsing").mkdir(parents=True, exist_ok=True)
    shutil.copy(where[1], homes["main"] / "pulsing")
    shutil.copy(where[0], homes["extra"] / "pulsing")
    (site / "installed.pth").write_text("".join(f"{home}\n" for home in homes.values() if home != site))
    # Without this Python's own site: only the folders under test, and those of dependencies that hold no `pulsing`.
    others = [path for path in sys.path if "-packages" in path and not (pathlib.Path(path) / "pulsing").exists()]
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); sys.path.extend({others!r})\n"
        "import pulsing._bench, pulsing._core; print(pulsing._bench.__file__, pulsing._core.__file__)"
    )
    found = subprocess.run([sys.executable, "-SPc", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert [pathlib.Path(path).parent.parent for path in found.stdout.split()] == [homes["extra"], homes["main"]]
