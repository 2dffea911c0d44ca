"""`make demo`: from a fresh clone to a streamed answer, and through the death of a worker.

Runs what a user would run: `pulsing actor` three times, HTTP requests, `pulsing inspect`. Standard library only.
"""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from _steps import ROOT, STATE, die, model_file, prepare, say, step

STARTED = time.monotonic()
MODEL_NAME = "smollm2"
READY_LIMIT = 120.0


class Cluster:
    """One Router and its workers, as processes of `pulsing actor`."""

    def __init__(self, bin_: pathlib.Path, model: pathlib.Path) -> None:
        self.pulsing = bin_ / "pulsing"
        self.model = model
        self.node, self.http, *self.workers = free_ports(4)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def actor(self, label: str, *words: str) -> None:
        command = [str(self.pulsing), "actor", *words]
        say("    $ pulsing actor " + " ".join(short(word) for word in words))
        with (STATE / f"{label}.log").open("wb") as log:
            self.processes[label] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )

    def start(self) -> None:
        self.actor(
            "router",
            "pulsing.serving.Router",
            f"--addr=127.0.0.1:{self.node}",
            "--name=my-llm",
            "--",
            f"--http_port={self.http}",
            f"--model_name={MODEL_NAME}",
        )
        for at, port in enumerate(self.workers, 1):
            self.actor(
                f"worker-{at}",
                "pulsing.serving.MistralRsWorker",
                f"--addr=127.0.0.1:{port}",
                f"--seeds=127.0.0.1:{self.node}",
                "--name=worker",
                "--",
                f"--model_name={self.model}",
            )

    def wait_ready(self, count: int) -> None:
        """Until `count` workers say they are ready."""
        deadline = time.monotonic() + READY_LIMIT
        shown = ""
        while True:
            states = self.worker_states()
            line = ", ".join(states) or "no worker yet"
            if line != shown:
                say(f"    workers: {line}")
                shown = line
            if states.count("ready") >= count:
                return
            for label, process in self.processes.items():
                if process.poll() is not None:
                    die(f"{label} ended with exit code {process.returncode}:\n{self.tail(label)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {label}\n{self.tail(label)}" for label in self.processes)
                die(f"No {count} ready workers within {READY_LIMIT:.0f} s.\n{logs}")
            time.sleep(0.1)

    def worker_states(self) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.node, timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/actors")
                listing = json.load(connection.getresponse())
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                return []
        return sorted(
            row["metadata"].get("state", "?") for row in listing["cluster"] if row["metadata"].get("kind") == "worker"
        )

    def ask(self, question: str) -> None:
        """Prints the answer token by token."""
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": question}],
            "stream": True,
            "max_tokens": 60,
        }
        say(f"    > {question}")
        say("    ", end="")
        began = time.monotonic()
        first = 0.0
        tokens = 0
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                die(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
            done = False
            for raw in response:
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        die(f"The stream ended with an error: {event['error']}")
                    for choice in event["choices"]:
                        text = choice["delta"].get("content") or ""
                        if text:
                            first = first or time.monotonic()
                            tokens += 1
                            say(text.replace("\n", "\n    "), end="")
            if not done or not tokens:
                die("The stream ended without its [DONE], or without a token.")
        took = time.monotonic() - began
        say(f"\n    ({tokens} pieces, the first after {first - began:.2f} s, all after {took:.1f} s)")

    def kill(self, label: str) -> None:
        self.processes.pop(label).send_signal(signal.SIGKILL)

    def inspect(self, *words: str) -> None:
        say("    $ pulsing inspect " + " ".join(words))
        done = subprocess.run([self.pulsing, "inspect", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            die(done.stderr)
        say("".join(f"    {line}\n" for line in done.stdout.splitlines()), end="")

    def stop(self, grace: float = 30.0) -> dict[str, int]:
        """SIGTERM to all, workers first; exit codes."""
        codes = {}
        for process in reversed(self.processes.values()):
            process.terminate()
        deadline = time.monotonic() + grace
        for label, process in self.processes.items():
            try:
                codes[label] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                codes[label] = process.wait()
        self.processes.clear()
        return codes

    def tail(self, label: str) -> str:
        return "\n".join((STATE / f"{label}.log").read_text(errors="replace").splitlines()[-15:])


def short(word: str) -> str:
    """A path's last part is enough to read."""
    key, equals, value = word.partition("=")
    return f"{key}{equals}.../{os.path.basename(value)}" if value.startswith("/") else word


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main() -> None:
    bin_ = prepare()
    cluster = Cluster(bin_, model_file())
    try:
        with step("One Router, two Workers"):
            cluster.start()
            cluster.wait_ready(2)
        with step("A question, answered in a stream"):
            cluster.ask("What is the capital of France? Answer in one sentence.")
            say(f"    first answer {time.monotonic() - STARTED:.0f} s after `make demo`")
        with step("kill -9 of one Worker, and another question at once"):
            cluster.kill("worker-1")
            cluster.ask("Name three colours.")
        with step("What the cluster looks like now"):
            cluster.inspect("cluster", "--seeds", f"127.0.0.1:{cluster.node}")
            cluster.inspect("actors", "--endpoint", f"127.0.0.1:{cluster.node}")
    finally:
        with step("Stop"):
            codes = cluster.stop()
    if any(codes.values()):
        die(f"Not everything stopped cleanly (exit codes {codes}); logs are in {STATE.name}/.")
    say("\nThat was Pulsing. README.md shows the same, command by command.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
