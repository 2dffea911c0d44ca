"""Fleet files and the command line: what is meant, and what is refused in words."""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fleet_support import ENGINE

from pulsing.cli.main import main
from pulsing.fleet import Deployment, FleetFileError, Launcher, load

FULL = """
fleet: qa
host: 127.0.0.1
gpus: [0, 1, 2, 3]
join: {seeds: "${spec.front.node}", name: worker}
restart: {budget: 9}
engines:
  - engine: vllm
    model: Qwen/Qwen3-8B
    groups: [{num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_model_len: 8192}}]
    restart: {backoff: 1.0}
    ready: {within: 3600}
  - {engine: transformers, model: Qwen/Qwen2.5-0.5B, groups: [{num_cells: 2}], join: false}
routers:
  - {name: front, port: 8080, model_name: qwen, worker_name: worker}
session_servers:
  - {program: [python3, -m, sessions], router: front}
commands:
  - {name: cron, run: [sleep, "60"]}
"""


def file(tmp_path: pathlib.Path, text: str, name: str = "fleet.yaml") -> pathlib.Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_everything_a_file_can_say(tmp_path: pathlib.Path) -> None:
    fleet = load(file(tmp_path, FULL))
    assert [pool.spec.name for pool in fleet.pools] == [
        "inference-engine-Qwen3-8B",
        "inference-engine-Qwen2.5-0.5B",
        "front",
        "session-server",
        "cron",
    ]
    vllm = fleet.pool("inference-engine-Qwen3-8B")
    assert (vllm.restart.budget, vllm.restart.backoff, vllm.ready.within) == (9, 1.0, 3600)
    # Engines join, what stands in front of them does not.
    assert [pool.join is not None for pool in fleet.pools] == [True, False, False, False, False]
    assert fleet.pool("cron").ready.port is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fleet: [", "no YAML"),
        ("- a", "a fleet is a mapping"),
        ("fleet: x", "fleet x runs nothing"),
        ("commands: []", "fleet: Field required"),
        ("fleet: x\nenginse: []", "enginse: Extra inputs are not permitted"),
        ("fleet: x\nengines: [{engine: ollama, model: m}]", "engines.0.engine: Input should be 'vllm'"),
        (
            "fleet: x\nengines: [{engine: vllm, model: m, groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]",
            "does not divide",
        ),
        (
            "fleet: x\nengines: [{engine: vllm, model: m, groups: [{num_gpu: 3}]}]",
            "engines.0:\n  num_gpu: Extra inputs",
        ),
        ("fleet: x\nengines: [{engine: vllm, model: m, groups: [{overrides: {port: 1}}]}]", "override 'port' is not"),
        ("fleet: x\nengines: [{engine: vllm, model: m, groups: [{num_gpus: '3'}]}]", "valid integer"),
        ("fleet: x\ncommands: [{name: a, run: [b], restart: {budget: -1}}]", "budget"),
        ("fleet: x\ncommands: [{name: a, run: [b], ready: {port: http}}]", "its ports are: none"),
        ("fleet: x\ncommands: [{name: a, run: [b], join: {seeds: 'a:1'}}]", "needs a port that answers"),
        ("fleet: x\ncommands: [{name: a, run: [b]}, {name: a, run: [b]}]", "two specs are named 'a'"),
    ],
)
def test_files_refused(tmp_path: pathlib.Path, text: str, words: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(FleetFileError) as refused:
        load(path)
    assert words in str(refused.value)
    assert str(refused.value).startswith(str(path))


PYTHON = """
from pulsing.fleet import CommandWorkerSpec, Deployment, Pool, Ready

fleet = Deployment(
    name="py",
    pools=(Pool(spec=CommandWorkerSpec(name="x", launch_command=lambda c: ["true"]), ready=Ready(port=None)),),
)
"""


def test_python_files(tmp_path: pathlib.Path) -> None:
    assert load(file(tmp_path, PYTHON, "fleet.py")).name == "py"
    for text, words in (
        ("fleet = 1", "`fleet` is int"),
        ("1/0", "ZeroDivisionError"),
        ("x = 1", "`fleet` is NoneType"),
    ):
        with pytest.raises(FleetFileError, match=words):
            load(file(tmp_path, text, "other.py"))
    with pytest.raises(FleetFileError, match="no such file"):
        load(tmp_path / "none.py")
    with pytest.raises(FleetFileError, match=r"a fleet is a \.yaml or a \.py file"):
        load(tmp_path / "fleet.toml")


@pytest.fixture
def pulsing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Callable[..., tuple[Any, str, str]]:
    """`pulsing("fleet", ...)` -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("PULSING_FLEET_DIR", str(tmp_path / "state"))

    def run(*argv: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        captured = capfd.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_render(tmp_path: pathlib.Path, pulsing: Callable[..., tuple[Any, str, str]]) -> None:
    path = str(file(tmp_path, FULL))
    code, out, err = pulsing("fleet", "render", path)
    assert (code, err) == (0, "")
    assert (
        "# inference-engine-Qwen3-8B/1/0  GPUs 2,3\nCUDA_VISIBLE_DEVICES=2,3 vllm serve Qwen/Qwen3-8B --host 127.0.0.1"
        " --port 8001 --tensor-parallel-size 2 --max-model-len 8192\n"
    ) in out
    assert "pulsing actor pulsing.serving.EngineWorker --seeds 127.0.0.1:9004 --name worker -- --url http://" in out
    code, out, _ = pulsing("fleet", "render", path, "--json_output", "True")
    cells = json.loads(out)["cells"]
    assert [cell["cell"] for cell in cells][:2] == ["inference-engine-Qwen3-8B/0", "inference-engine-Qwen3-8B/1"]
    assert cells[0]["workers"][0]["gpus"] == [0, 1]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["fleet"], 2, "a command is missing"),
        (["fleet", "start"], 2, "pulsing fleet has no command 'start'"),
        (["fleet", "up"], 2, "FILE is missing, as in: pulsing fleet up fleet.yaml"),
        (["fleet", "up", "{good}", "--sede", "x"], 2, "pulsing fleet up has no option --sede"),
        (["fleet", "up", "{bad}"], 2, "runs nothing"),
        (["fleet", "render", "{slot}"], 2, "${nothing} names nothing; known are ${host}"),
        (["fleet", "up", "{slot}"], 1, "${nothing} names nothing"),
        (["fleet", "render", "{open}"], 2, "'${host' has a ${ without its }"),
        (["fleet", "render", "{twice}"], 2, "'commands' stands twice"),
        (["fleet", "up", "{program}"], 1, "no program no-such-engine on PATH"),
        (["fleet", "up", "{gpus}"], 1, "needs 1 GPUs, and this machine offers 0"),
        (["fleet", "ps", "{good}"], 1, "fleet x has never run here"),
        (["fleet", "logs", "{good}"], 1, "fleet x has never run here"),
        (["fleet", "down", "{good}"], 0, "fleet x does not run"),
    ],
)
def test_exit_codes(
    tmp_path: pathlib.Path, pulsing: Callable[..., tuple[Any, str, str]], argv: list[str], code: int, words: str
) -> None:
    files = {
        "good": "fleet: x\ncommands: [{name: a, run: [sleep, '1']}]",
        "bad": "fleet: x",
        "slot": "fleet: x\ncommands: [{name: a, run: [sleep, '${nothing}']}]",
        "open": "fleet: x\ncommands: [{name: a, run: [sleep, '${host']}]",
        "twice": "fleet: x\ncommands: [{name: a, run: [sleep, '1']}]\ncommands: [{name: b, run: [sleep, '1']}]",
        "program": "fleet: x\ncommands: [{name: a, run: [no-such-engine]}]",
        "gpus": "fleet: x\ngpus: []\ncommands: [{name: a, run: [sleep], scheduling: {num_gpus_per_worker: 1}}]",
    }
    paths = {name: str(file(tmp_path, text, f"{name}.yaml")) for name, text in files.items()}
    got, out, err = pulsing(*(word.format(**paths) for word in argv))
    assert (got, out) == (code, "")
    assert words in err


async def _up_and_down(deployment: Deployment, root: pathlib.Path) -> list[str]:
    launcher = Launcher(deployment, state_root=root)
    await launcher.start()
    try:
        await launcher.wait_ready()
        return [f"{cell.name} {cell.state}" for cell in launcher.cells]
    finally:
        await launcher.stop()
        await launcher.close()


def test_from_python(tmp_path: pathlib.Path) -> None:
    import asyncio

    section = {
        "name": "chat",
        "run": [sys.executable, ENGINE, "--port", "${port.primary}"],
        "ports": [{"name": "primary", "static_port": 8000, "allow_dynamic": True}],
    }
    deployment = load(file(tmp_path, json.dumps({"fleet": "x", "commands": [section]})))
    assert asyncio.run(_up_and_down(deployment, tmp_path / "state")) == ["chat/0 ready"]


def test_ray_is_named_when_it_is_not_there(
    tmp_path: pathlib.Path, pulsing: Callable[..., tuple[Any, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = file(tmp_path, "fleet: x\nbackend: ray\ncommands: [{name: a, run: [sleep, '1']}]")
    code, out, err = pulsing("fleet", "up", str(path))
    assert (code, out) == (1, "")
    assert "backend ray needs Ray: pip install 'pulsing[ray]'" in err
