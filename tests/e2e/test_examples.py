"""Every example runs by itself and prints what it says."""

import pathlib
import subprocess
import sys

import pytest
from terminals import ROOT, free_ports

EXAMPLES = {
    "counter.py": "2\n5\n",
    "pipeline.py": "".join(f"{n}\n" for n in range(10)) + "the producer stopped\n",
    "engine.py": "HELLO FROM AN ENGINE OF MY OWN\n",
}
# Jobs, which something else starts.
TESTED_ELSEWHERE = {
    "ray_job.py": "tests/integrations/test_ray_real.py",
    "torchrun_job.py": "tests/integrations/test_torchrun_real.py",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: pathlib.Path) -> None:
    arguments = [str(free_ports(1)[0])] if name == "engine.py" else []
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, EXAMPLES[name]), done.stderr


def test_every_example_is_tested_and_listed() -> None:
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert files == {*EXAMPLES, *TESTED_ELSEWHERE}
    assert all(name in (ROOT / test).read_text() for name, test in TESTED_ELSEWHERE.items())
    listing = (ROOT / "examples/README.md").read_text()
    assert all(f"`{name}`" in listing for name in files)
