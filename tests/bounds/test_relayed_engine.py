"""An engine on the loopback of one host serves a Router on another one, through the EngineWorker's node (S4)."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

from namespaces import Network

ENGINE = pathlib.Path(__file__).parents[1] / "serving" / "engine_server.py"
KIT = pathlib.Path(__file__).parents[1] / "kit"
# Asks for an answer, whole and streamed, until the status is the one that is waited for.
CLIENT = """
import json, sys, time, urllib.error, urllib.request

def ask(stream):
    body = {"model": "pulsing-model", "messages": [{"role": "user", "content": "from far away"}], "stream": stream}
    request = urllib.request.Request(
        "http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status, answer.read().decode()

def tried():
    try:
        return ask(False)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)

wanted, deadline = int(sys.argv[1]), time.monotonic() + 60
while (whole := tried())[0] != wanted and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps({"whole": whole, "streamed": ask(True) if whole[0] == 200 else None}))
"""


@contextlib.contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as running:
        try:
            yield running
        finally:
            running.kill()


def test_s4_a_router_reaches_an_engine_on_another_hosts_loopback(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a passphrase of the tests")
    actor = (sys.executable, "-m", "pulsing.cli", "actor")
    with Network(2) as network, contextlib.ExitStack() as stack:
        near, far = network.inside(0), network.inside(1)
        python = (*far, "env", f"PYTHONPATH={KIT}", sys.executable)
        engine = stack.enter_context(process(*python, str(ENGINE), "9001", "far-model"))
        cluster = ("--passphrase_file", str(secret))
        router = (
            *near,
            *actor,
            "pulsing.serving.Router",
            "--addr",
            network.addr(0),
            *cluster,
            "--",
            "--http_port",
            "8080",
        )
        stack.enter_context(process(*router))
        joined = (
            *actor,
            "pulsing.serving.EngineWorker",
            "--addr",
            network.addr(1),
            "--seeds",
            network.addr(0),
            *cluster,
        )
        stack.enter_context(process(*far, *joined, "--", "--url", "http://127.0.0.1:9001"))

        def told(status: int) -> dict[str, tuple[int, str]]:
            words = [*near, sys.executable, "-c", CLIENT, str(status)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True)
            return dict(json.loads(done.stdout))

        answers = told(200)
        assert answers["whole"][0] == 200, answers
        assert json.loads(answers["whole"][1])["choices"][0]["message"]["content"] == "from far away"
        assert answers["streamed"][0] == 200
        assert "data: [DONE]" in answers["streamed"][1]
        began = time.monotonic()
        engine.kill()
        assert told(503)["whole"][0] == 503
        assert time.monotonic() - began < 20
