"""A fleet of real engine servers behind a Router that finds them by name: killed, restarted, stopped, abandoned."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Self

import openai
import pytest
from terminals import ROOT, free_ports, get_json

sys.path.append(str(ROOT / "tests" / "fleet"))
from fleet_support import Fleet, alive, port_of, until

CELLS = ("inference-engine-tiny/0", "inference-engine-tiny/1")
# As a module: its program is not on PATH in every environment that has the package.
ENGINE = {
    "engine": "transformers",
    "program": ["python3", "-m", "transformers.cli.transformers", "serve"],
    "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
}
FAST = {"restart": {"backoff": 0.2, "jitter": 0.0}, "stop": {"drain": 10.0, "term": 20.0}}
MESSAGES = [{"role": "user", "content": "hello"}]


def written(folder: pathlib.Path, **file: Any) -> Fleet:
    fleet = Fleet(folder)
    # JSON is YAML.
    fleet.file.write_text(json.dumps({**FAST, **file}))
    return fleet


@pytest.fixture(scope="module")
def front(tiny: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The example of the repository, with the tiny model and free ports."""
    (port,) = free_ports(1)
    text = (ROOT / "examples" / "fleet.yaml").read_text()
    assert text.count("Qwen/Qwen2.5-0.5B-Instruct") == 1
    assert text.count("port: 8080") == 1
    text = text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny)).replace("port: 8080", f"port: {port}")
    text = text.replace("fleet: qwen", f"fleet: test\nrestart: {json.dumps(FAST['restart'])}")
    text = text.replace("engine: transformers", f"program: {json.dumps(ENGINE['program'])}\n    engine: transformers")
    text = text.replace("groups:", f"env: {json.dumps(ENGINE['env'])}\n    groups:")
    fleet = Fleet(tmp_path_factory.mktemp("front"))
    fleet.file.write_text(text)
    fleet.up()
    yield fleet
    fleet.close()


def api(front: Fleet) -> str:
    return f"http://{front.wait('front/0')['addrs']['0']['primary']}"


def served(fleet: Fleet, cell: str) -> int:
    """Chats that the last start of a cell has answered or begun to."""
    return fleet.log(cell).count("POST /v1/chat/completions")


class Load:
    """Clients that ask one question after the other, without streaming; nothing is tried twice."""

    def __init__(self, url: str, clients: int = 2) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        body = json.dumps({"model": "qwen", "messages": MESSAGES, "max_tokens": 8}).encode()
        while not self._over.is_set():
            request = urllib.request.Request(
                f"{self._url}/v1/chat/completions", body, {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    json.load(answer)["choices"][0]["message"]["content"].encode()
                self.answers += 1
            except urllib.error.HTTPError as error:
                with error:
                    self.failures.append(f"{error.code}: {error.read().decode()}")
            except (OSError, ValueError, KeyError) as error:
                self.failures.append(repr(error))


def guardians_of(launcher: int) -> list[int]:
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"_guardian.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]


def joined_in_ps(fleet: Fleet) -> dict[str, str]:
    """Cell -> what `pulsing fleet ps` says of its being joined."""
    table = fleet.run("ps")
    assert table.returncode == 0, table.stderr
    return {cell: re.split(r"\s+", line)[2] for line in table.stdout.splitlines() for cell in [line.split()[0]]}


def test_ps_shows_what_the_router_sees(front: Fleet) -> None:
    cells = [front.wait(name, joined=True) for name in CELLS]
    assert {**joined_in_ps(front)} == {"CELL": "JOINED", CELLS[0]: "yes", CELLS[1]: "yes", "front/0": "-"}
    url = api(front)
    until(lambda: get_json(f"{url}/ready")[1]["healthy_workers"] == 2, "the Router has both")
    # An engine that hangs has not gone, and serves nobody all the same.
    os.kill(cells[0]["pids"]["0"], signal.SIGSTOP)
    try:
        until(lambda: front.cell(CELLS[0])["reason"] == "its EngineWorker is failed", "it is seen to hang")
        assert joined_in_ps(front)[CELLS[0]] == "no"
        assert get_json(f"{url}/ready")[1]["healthy_workers"] == 1
    finally:
        os.kill(cells[0]["pids"]["0"], signal.SIGCONT)
    assert front.wait(CELLS[0], joined=True)["generation"] == 1


def test_the_official_client_gets_plain_and_streamed_answers(front: Fleet) -> None:
    with openai.OpenAI(base_url=f"{api(front)}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        plain = client.chat.completions.create(model="qwen", messages=MESSAGES, max_tokens=12, temperature=0)
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 12
        stream = client.chat.completions.create(
            model="qwen", messages=MESSAGES, max_tokens=12, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == plain.choices[0].message.content


def test_a_killed_cell_comes_back_and_nobody_notices(front: Fleet) -> None:
    before = [front.wait(name, joined=True) for name in CELLS]
    with Load(api(front)) as load:
        until(lambda: all(served(front, name) > 3 for name in CELLS), "both serve")
        os.kill(before[0]["pids"]["0"], signal.SIGKILL)
        until(lambda: front.cell(CELLS[0])["joined"] is False, "it is seen to be gone")
        at_gone = load.answers
        after = front.wait(CELLS[0], generation=2, joined=True)
        meanwhile = load.answers - at_gone
        until(lambda: served(front, CELLS[0]) > 3, "the new one serves")
    assert load.failures == []
    assert meanwhile > 5
    assert not alive(before[0]["pids"]["0"])
    assert (after["restarts"], front.cell(CELLS[1])["pids"]) == (1, before[1]["pids"])
    assert "worker 0 was killed by SIGKILL" in front.said.read_text()


class Story(threading.Thread):
    """One long streamed answer."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.finish: str | None = None
        self._url = url

    def run(self) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
            stream = client.chat.completions.create(
                model="qwen",
                messages=MESSAGES,
                max_tokens=1900,
                stream=True,
                extra_body={"generation_config": '{"eos_token_id": null}'},
            )
            for chunk in stream:
                self.finish = next((choice.finish_reason for choice in chunk.choices), self.finish)


def test_down_leaves_before_it_stops(front: Fleet, tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    url, seed = api(front), front.cell("front/0")["addrs"]["0"]["node"]
    sections = [{**ENGINE, "model": str(tiny), "name": "more"}]
    more = written(tmp_path, fleet="more", join={"seeds": seed}, engines=sections)
    more.up()
    stories = [Story(url) for _ in range(6)]
    try:
        cell = more.wait("inference-engine-more/0", joined=True, fleet="more")
        log = pathlib.Path(cell["logs"]["0"])
        until(lambda: get_json(f"{url}/ready")[1]["healthy_workers"] == 3, "the Router has it")
        for story in stories:
            story.start()
        # Nothing but stories is asked yet, so what it received is one of them, and a long one.
        until(lambda: "[Request received]" in log.read_text(), "it serves")
        with Load(url) as load:
            down = more.run("down")
            at_down = load.answers
            for story in stories:
                story.join(120)
            until(lambda: load.answers > at_down + 3, "the others go on serving")
    finally:
        more.close()
    assert down.returncode == 0, down.stderr
    assert "Waiting for connections to close" in log.read_text(), "nothing ran on it when it was told to stop"
    assert [story.finish for story in stories] == ["length"] * len(stories)
    assert load.failures == []
    assert more.processes("more") == []


def test_nothing_survives_a_killed_launcher(front: Fleet) -> None:
    cells = [front.wait(name, joined=True) for name in CELLS]
    assert front.launcher is not None
    guardians = guardians_of(front.launcher.pid)
    # Two engines, two EngineWorkers, the Router; and what they have started themselves.
    assert len(guardians) == 3
    assert len(front.processes()) >= 5
    front.launcher.kill()
    front.launcher.wait()
    until(lambda: not front.processes(), "all processes gone", within=5.0)
    until(lambda: not any(alive(pid) for pid in guardians), "all guardians gone", within=1.0)
    assert get_json(f"http://127.0.0.1:{port_of(cells[0])}/health") == (0, None)
    shown = front.run("ps")
    assert shown.returncode == 1
    assert "does not run" in shown.stderr


def test_a_model_that_is_not_there_is_told_in_the_engines_words(tmp_path: pathlib.Path) -> None:
    missing = tmp_path / "no" / "model"
    fleet = written(tmp_path, fleet="test", engines=[{**ENGINE, "model": str(missing), "restart": {"when": "never"}}])
    begun = time.monotonic()
    ended: subprocess.CompletedProcess[str] = fleet.run("up")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "worker 0 exited with 1" in ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("  | ")]
    assert any(str(missing) in line for line in told), ended.stderr
    assert time.monotonic() - begun < 40
