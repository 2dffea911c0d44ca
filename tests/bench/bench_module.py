"""`pulsing._bench`: the installed one, or one built from this checkout."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]


def with_module(environ: Mapping[str, str], folder: pathlib.Path) -> dict[str, str]:
    """`environ` in which `pulsing._bench` can be imported; built into `folder` unless it is installed."""
    if importlib.util.find_spec("pulsing._bench") is not None:
        return dict(environ)
    # The path works because the package looks for further `pulsing` folders on it.
    path = os.pathsep.join(filter(None, [str(build(folder)), environ.get("PYTHONPATH")]))
    return {**environ, "PYTHONPATH": path}


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the module as cargo does, without a wheel; `folder` is what goes on the path."""
    command = ["cargo", "build", "--profile", "ci", "-p", "pulsing-bench-py", "--features", "extension-module"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    library = "lib_bench.dylib" if sys.platform == "darwin" else "lib_bench.so"
    (folder / "pulsing").mkdir()
    shutil.copy(target / "ci" / library, folder / "pulsing" / "_bench.abi3.so")
    return folder
