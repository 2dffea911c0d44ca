"""What the Router costs: requests/s, latency, CPU and memory in front of a trivial worker.

    python benches/router.py [--seconds 5] [--rounds 3]

Load comes from wrk (Debian's package) on the same machine. Rows: the trivial engine asked directly, the Router in
front of the same engine (through an EngineWorker), and the Router in front of an actor Worker with the same generator.
"""

import argparse
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
TICK = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    def __init__(self, *words: str) -> None:
        env = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
        self.popen = subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.DEVNULL)

    def cpu(self) -> float:
        fields = pathlib.Path(f"/proc/{self.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def rss_mb(self) -> float:
        status = pathlib.Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self) -> None:
        self.popen.terminate()
        self.popen.wait(30)


def body(*, stream: bool, size: int) -> str:
    messages = [{"role": "user", "content": "x" * size}]
    return json.dumps({"model": "m", "messages": messages, "stream": stream}, separators=(",", ":"))


def wait_ready(port: int, path: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"nothing ready on port {port}")


def wrk(port: int, text: str, connections: int, seconds: int) -> tuple[float, float, float]:
    """Requests/s, p50 and p99 in milliseconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n')
        script.write(f"wrk.body = [==[{text}]==]\n")
        script.write("done = function(s, l, r) io.write(string.format('R %d %d %d %d\\n', s.requests, s.duration, ")
        script.write("l:percentile(50), l:percentile(99))) io.write(string.format('E %d\\n', s.errors.status)) end\n")
        script.flush()
        words = ["wrk", f"-t{min(2, connections)}", f"-c{connections}", f"-d{seconds}s", "-s", script.name]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        out = subprocess.run([*words, url], check=True, capture_output=True, text=True).stdout
    result = re.search(r"R (\d+) (\d+) (\d+) (\d+)\nE (\d+)", out)
    assert result, out
    requests, micros, p50, p99, errors = map(int, result.groups())
    if errors:
        raise SystemExit(f"{errors} requests failed")
    return requests / (micros / 1e6), p50 / 1000, p99 / 1000


class House:
    """A trivial engine, a trivial Worker, and a Router in front of each."""

    def __init__(self, tokens: int) -> None:
        self.engine_port, node, self.engine_http, self.actor_http = (free_port() for _ in range(4))
        self.seed = f"127.0.0.1:{node}"
        self.engine = Process(str(HERE / "trivial_engine.py"), str(self.engine_port), str(tokens))
        wait_ready(self.engine_port, "/v1/models")
        self.actor_router = self.router("r1", self.actor_http, "worker", "--addr", self.seed)
        self.engine_router = self.router("r2", self.engine_http, "engine", "--seeds", self.seed)
        url = f"http://127.0.0.1:{self.engine_port}"
        self.worker = self.actor(
            "trivial_worker.TrivialWorker", "worker", ["--seeds", self.seed], "--tokens", str(tokens)
        )
        self.proxy = self.actor("pulsing.serving.EngineWorker", "engine", ["--seeds", self.seed], "--url", url)
        wait_ready(self.actor_http, "/ready")
        wait_ready(self.engine_http, "/ready")

    def actor(self, path: str, name: str, node: list[str], *arguments: str) -> Process:
        words = ["-m", "pulsing.cli", "actor", path, "--name", name, *node, "--log_level", "warn", "--", *arguments]
        return Process(*words)

    def router(self, name: str, port: int, worker_name: str, *node: str) -> Process:
        arguments = ["--http_port", str(port), "--model_name", "m", "--worker_name", worker_name]
        return self.actor("pulsing.serving.Router", name, list(node), *arguments)

    def paths(self) -> list[tuple[str, int, Process | None, Process]]:
        """Label, port, Router, and who generates."""
        return [
            ("engine directly", self.engine_port, None, self.engine),
            ("Router -> engine", self.engine_http, self.engine_router, self.engine),
            ("Router -> actor Worker", self.actor_http, self.actor_router, self.worker),
        ]

    def stop(self) -> None:
        for process in (self.proxy, self.worker, self.engine_router, self.actor_router, self.engine):
            process.stop()


def measure(port: int, router: Process | None, text: str, connections: int, seconds: int, rounds: int) -> list[str]:
    """Cells: requests/s (lowest..highest), p50, p99, CPU of the Router per request."""
    runs, cpu = [], []
    wrk(port, text, connections, 1)
    for _ in range(rounds):
        before = router.cpu() if router else 0.0
        runs.append(wrk(port, text, connections, seconds))
        spent = (router.cpu() if router else 0.0) - before
        cpu.append(spent / (runs[-1][0] * seconds) * 1e6)
    rate, p50, p99 = (statistics.median(column) for column in zip(*runs, strict=True))
    rates = [run[0] for run in runs]
    shown = f"{statistics.median(cpu):.0f}" if router else "-"
    return [f"{rate:.0f} ({min(rates):.0f}..{max(rates):.0f})", f"{p50:.2f}", f"{p99:.2f}", shown]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing: apt-get install wrk")
    columns = ["shape", "connections", "path", "requests/s", "p50 ms", "p99 ms", "Router CPU us/request"]
    print("|", " | ".join([*columns, "RSS MB: Router, worker"]), "|")
    print("|", " | ".join("---" for _ in range(len(columns) + 1)), "|")
    for label, tokens, stream, size in [
        ("200 B, 1 token", 1, False, 100),
        ("32-token stream", 32, True, 100),
        ("220 KB prompt", 1, False, 220_000),
    ]:
        house = House(tokens)
        text = body(stream=stream, size=size)
        try:
            for connections in (1, 64):
                for path, port, router, backend in house.paths():
                    cells = measure(port, router, text, connections, options.seconds, options.rounds)
                    rss = f"{router.rss_mb():.0f}" if router else "-"
                    row = [label, str(connections), path, *cells, f"{rss}, {backend.rss_mb():.0f}"]
                    print("|", " | ".join(row), "|", flush=True)
        finally:
            house.stop()


if __name__ == "__main__":
    main()
