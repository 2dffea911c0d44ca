"""The README's commands beside the tutorial: engine servers, fleets."""

import json
import pathlib
import re
import time
import urllib.request
from collections.abc import Callable

from terminals import ROOT, Readme, Shell, get_json, wait_for

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# As a module: its program is not on PATH in every environment that has the package.
SERVE = "python3 -m transformers.cli.transformers serve"


def ask(shell: Shell, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{shell.api}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: str = json.load(answer)["choices"][0]["finish_reason"]
    return found


def test_an_engine_server_joins(terminals: Callable[[], Shell], readme: Readme, tiny: pathlib.Path) -> None:
    shell = terminals()
    (router,) = readme.lines(r"^pulsing actor .*--worker_name worker$")
    engine, worker = readme.lines("", mark="engine server")
    assert engine.startswith(f"transformers serve {MODEL} ")
    shell.start("router", router)
    shell.start("worker", worker)
    shell.start("engine", engine.replace(f"transformers serve {MODEL}", f"{SERVE} {tiny} --device cpu"))
    shell.wait_ready(1)
    assert ask(shell, "gpt2") == "length"
    shell.kill("engine")
    wait_for("nobody to be ready", lambda: get_json(f"{shell.api}/ready")[0] == 503, 20)
    assert shell.stop() == {"router": 0, "worker": 0}


def test_a_fleet_from_the_example(terminals: Callable[[], Shell], readme: Readme, tiny: pathlib.Path) -> None:
    shell = terminals()
    render, up, ps, down = readme.lines("", mark="fleet")
    (shell.logs / "examples").mkdir()
    text = shell.here((ROOT / "examples" / "fleet.yaml").read_text())
    program = "program: [python3, -m, transformers.cli.transformers, serve]"
    assert text.count(MODEL) == text.count("num_cells: 2") == 1
    text = text.replace(MODEL, str(tiny)).replace("num_cells: 2", "num_cells: 1")
    text = text.replace("engine: transformers", f"engine: transformers\n    {program}")
    (shell.logs / "examples" / "fleet.yaml").write_text(text)
    shell.env.update(PULSING_FLEET_DIR=str(shell.logs / "state"), OMP_NUM_THREADS="1")

    rendered = shell.run(render)
    assert rendered.returncode == 0, rendered.stderr
    assert str(tiny) in rendered.stdout
    launcher = shell.start("fleet", up)

    def joined() -> bool:
        assert launcher.poll() is None, shell.log("fleet")
        return re.search(r"^inference-engine\S* +ready +yes", shell.run(ps).stdout, re.MULTILINE) is not None

    wait_for("the engine to have joined", joined)
    wait_for("the Router to have it", lambda: get_json(f"{shell.api}/ready")[0] == 200)
    assert ask(shell, "qwen") == "length"
    begun = time.monotonic()
    ended = shell.run(down)
    assert ended.returncode == 0, ended.stderr
    assert launcher.wait(20) == 0, shell.log("fleet")
    # The engine was told to end and did; nobody waited for a limit.
    assert time.monotonic() - begun < 30
    assert get_json(f"{shell.api}/ready") == (0, None)
