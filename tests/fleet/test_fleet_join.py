"""Cells join through the real EngineWorker, and are served by a real Router."""

import json
import pathlib
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from fleet_support import Fleet, engine, until

JOIN = {"seeds": "${spec.front.node}", "name": "worker"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def router(port: int | None = None) -> dict[str, Any]:
    return {"name": "front", "port": port, "model_name": "alias", "worker_name": "worker", "ready": {"every": 0.05}}


def ask(fleet: Fleet) -> tuple[int, str]:
    """(status, what the engine said) of one chat through the Router."""
    url = f"http://{fleet.cell('front/0')['addrs']['0']['primary']}/v1/chat/completions"
    body = {"model": "alias", "messages": [{"role": "user", "content": "x"}]}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ready(fleet: Fleet) -> bool:
    """Whether the Router has somebody to send requests to."""
    try:
        with urllib.request.urlopen(f"http://{fleet.cell('front/0')['addrs']['0']['primary']}/ready", timeout=30):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def inspect(*argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pulsing.cli", "inspect", "actors", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)


def test_certificates_reach_router_and_engine_workers(fleet: Fleet) -> None:
    openssl = [
        'openssl req -x509 -newkey ed25519 -noenc -subj "/CN=authority" -keyout ca.key -out ca.pem',
        'openssl req -new -newkey ed25519 -noenc -subj "/CN=nodes" -keyout node.key -out node.csr',
        "printf 'subjectAltName=IP:127.0.0.1' > node.ext",
        "openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -extfile node.ext -out node.pem",
    ]
    subprocess.run(["sh", "-ec", "\n".join(openssl)], cwd=fleet.directory, check=True, capture_output=True)
    names = {"cert": "node.pem", "key": "node.key", "ca": "ca.pem"}
    fleet.write(engine("--model", "m", join=JOIN), routers=[router()], **names)
    fleet.up()
    cell = fleet.wait("chat/0", joined=True)
    assert ask(fleet) == (200, str(cell["pids"]["0"]))
    seed = fleet.cell("front/0")["addrs"]["0"]["node"]
    flags = [word for name, file in names.items() for word in (f"--{name}", str(fleet.directory / file))]
    assert cell["addrs"]["0"]["primary"] in inspect("--seeds", seed, "--detailed", "True", *flags).stdout
    assert inspect("--seeds", seed, "--timeout", "3").returncode != 0, "no certificate"


@pytest.mark.parametrize("how", ["file", "flags"])
def test_a_secret_reaches_router_and_engine_workers(fleet: Fleet, how: str) -> None:
    (fleet.directory / "secret").write_text("correct horse\n")
    # In the file, a path is one beside the file, wherever the launcher runs.
    said = {"cluster": "mine", "passphrase_file": "secret"} if how == "file" else {}
    flags = [] if how == "file" else ["--passphrase-file", str(fleet.directory / "secret"), "--cluster", "mine"]
    fleet.write(engine("--model", "m", join=JOIN), routers=[router()], **said)
    fleet.up(*flags)
    cell = fleet.wait("chat/0", joined=True)
    assert ask(fleet) == (200, str(cell["pids"]["0"]))
    seed = fleet.cell("front/0")["addrs"]["0"]["node"]
    whole = ["--passphrase_file", str(fleet.directory / "secret"), "--cluster", "mine"]
    seen = inspect("--seeds", seed, "--detailed", "True", *whole)
    assert seen.returncode == 0, seen.stderr
    assert "ready" in seen.stdout
    assert cell["addrs"]["0"]["primary"] in seen.stdout
    assert inspect("--seeds", seed, "--passphrase_file", whole[1]).returncode != 0, "another cluster's name"
    assert inspect("--seeds", seed, "--cluster", "mine", "--timeout", "3").returncode != 0, "no secret"
    assert fleet.run("down").returncode == 0
    assert fleet.processes() == []


def test_another_secret_is_told_in_the_engine_workers_words(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    (fleet.directory / "secret").write_text("one")
    fleet.write(routers=[router()], passphrase_file="secret")
    fleet.up()
    seed = fleet.wait("front/0")["addrs"]["0"]["node"]
    (tmp_path / "other").mkdir()
    other = Fleet(tmp_path / "other")
    (other.directory / "secret").write_text("two")
    other.write(engine("--model", "m", join={"seeds": seed}), passphrase_file="secret")
    other.up()
    try:
        until(lambda: "it belongs to another cluster" in other.said.read_text(), "the reason is shown")
        assert other.cell("chat/0")["joined"] is False
        assert "chat/0 g1 ready not joined: join process exited with 1" in other.said.read_text()
    finally:
        other.close()


def test_a_secret_that_is_not_there_is_told_before_anything_starts(fleet: Fleet) -> None:
    fleet.write(engine("--model", "m", join=JOIN), routers=[router()], passphrase_file="none")
    refused = fleet.run("up")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"cannot read --passphrase_file {fleet.directory / 'none'}" in refused.stderr
    assert not (fleet.state / "test" / "logs").exists()


def test_wrong_seeds_are_named(fleet: Fleet) -> None:
    seed = f"127.0.0.1:{free_port()}"
    fleet.write(engine("--model", "m", join={"seeds": seed}))
    fleet.up()
    until(lambda: "no seed says" in fleet.cell("chat/0").get("reason", ""), "the reason is known")
    cell = fleet.cell("chat/0")
    assert (cell["state"], cell["joined"]) == ("ready", False)
    assert f"cannot connect to {seed}: Connection refused" in cell["reason"]
    shown = fleet.run("ps")
    assert shown.returncode == 0
    assert f"cannot connect to {seed}" in shown.stdout
    assert (
        f"chat/0 g1 ready not joined: no seed says who has joined: cannot connect to {seed}" in fleet.said.read_text()
    )
    # An EngineWorker that still waits for its seeds leaves at once.
    assert fleet.run("down").returncode == 0
    assert fleet.processes() == []


def test_an_engine_that_lists_no_model_has_not_joined(fleet: Fleet) -> None:
    fleet.write(engine(join=JOIN), routers=[router()])
    fleet.up()
    until(lambda: fleet.cell("chat/0").get("reason") == "its EngineWorker is loading", "the reason is known")
    assert fleet.cell("chat/0")["joined"] is False
    status, words = ask(fleet)
    assert status == 503
    assert "GET /v1/models is answered 404" in words


def test_halves_join_as_what_they_are_and_the_router_pairs_them(fleet: Fleet) -> None:
    halves = [
        engine("--model", "m", name=role, half={"role": role, "pd": "sequential"}, join=JOIN)
        for role in ("prefill", "decode")
    ]
    fleet.write(*halves, routers=[router()])
    fleet.up()
    prefill, decode = (fleet.wait(f"{role}/0", joined=True) for role in ("prefill", "decode"))
    assert "--role prefill --pd sequential" in " ".join(prefill["argv"]["join"])
    until(lambda: ready(fleet), "the Router has a pair")
    # The one that generates answers.
    assert ask(fleet) == (200, str(decode["pids"]["0"]))


def test_down_waits_for_the_requests_that_run(fleet: Fleet) -> None:
    go, events = fleet.directory / "go", fleet.directory / "events"
    chat = engine("--model", "m", "--answer_when", str(go), "--events", str(events), join=JOIN)
    fleet.write(chat, routers=[router()], stop={"drain": 20.0, "term": 5.0})
    fleet.up()
    pid = fleet.wait("chat/0", joined=True)["pids"]["0"]
    got: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: got.append(ask(fleet)))
    asking.start()
    port = fleet.cell("chat/0")["addrs"]["0"]["primary"]

    def running() -> bool:
        with urllib.request.urlopen(f"http://{port}/metrics", timeout=5) as answer:
            return b"running 1" in answer.read()

    until(running, "the request runs")
    assert fleet.launcher is not None
    fleet.launcher.terminate()
    fleet.wait("chat/0", "stopping")
    # It has left: the Router has nobody for new requests, and says so at once.
    until(lambda: not ready(fleet), "it has left")
    assert ask(fleet)[0] == 503
    assert not events.exists(), "the engine was stopped with a request on it"
    go.touch()
    asking.join(20)
    assert got == [(200, str(pid))]
    assert fleet.launcher.wait(20) == 0
    assert events.read_text() == "engine told to stop\n"
    assert fleet.processes() == []


def test_a_killed_router_finds_its_engines_again(fleet: Fleet) -> None:
    fleet.write(engine("--model", "m", join=JOIN), routers=[router()])
    fleet.up()
    cell = fleet.wait("chat/0", joined=True)
    assert fleet.launcher is not None
    subprocess.run(["kill", "-9", str(fleet.wait("front/0")["pids"]["0"])], check=True)
    fleet.wait("front/0", generation=2)
    until(lambda: ask(fleet) == (200, str(cell["pids"]["0"])), "the new Router serves")
    assert fleet.wait("chat/0", joined=True)["pids"] == cell["pids"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"engine": "vllm", "model": "m", "program": ["no-vllm", "serve"]}, "no program no-vllm on PATH"),
        (
            {"engine": "sglang", "model": "m", "program": ["python3", "-m", "no_such_engine"]},
            "  | {python}: No module named no_such_engine",
        ),
        (
            {"engine": "llama_cpp", "model": "/no.gguf", "program": ["python3", "-c", "exit('no file ' + '/no.gguf')"]},
            "  | no file /no.gguf",
        ),
        (
            # Nothing of it reaches the terminal of who runs the fleet.
            {
                "engine": "vllm",
                "model": "m",
                "program": ["python3", "-c", r"exit('\x1b[31;1mred\x1b[0m\x1b]0;t\x07 \x1bc')"],
            },
            "  | red \\x1bc\n",
        ),
    ],
)
def test_what_an_engine_said_last_is_shown(fleet: Fleet, section: dict[str, Any], words: str) -> None:
    fleet.write(engines=[section], restart={"when": "never"})
    ended = fleet.run("up")
    assert (ended.returncode, ended.stdout) == (1, "")
    python = str(pathlib.Path(sys.executable).parent / "python3")
    assert words.format(python=python) in ended.stderr
    if "  |" in words:
        assert "worker 0 exited with 1" in ended.stderr
        shown = fleet.run("ps", "--json_output")
        assert json.loads(shown.stdout)["cells"][0]["last_words"]
