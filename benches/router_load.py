"""Load from wrk (Debian's package): closed loop, so many connections, each with one request after the other."""

import dataclasses
import json
import re
import shutil
import subprocess
import tempfile
from typing import Any

from router_house import MODEL, Process


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of request.

    Attributes:
        key: Short name, also in the JSON.
        title: As tables call it.
        stream: Whether the answer is streamed.
        size: Bytes of the prompt.
        command: What the mock engine is told, if anything.
    """

    key: str
    title: str
    stream: bool
    size: int
    command: str = ""

    def body(self) -> str:
        """The request."""
        text = f"mock:{self.command} " if self.command else ""
        messages = [{"role": "user", "content": text + "x" * (self.size - len(text))}]
        request: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": self.stream}
        return json.dumps(request, separators=(",", ":"))


SHAPES = [
    Shape("plain", "200 B prompt, 1 token", stream=False, size=100),
    Shape("stream", "32-token stream", stream=True, size=100, command="tokens=32"),
    Shape("paced", "32-token stream, 5 ms a token", stream=True, size=100, command="tokens=32,pause=5"),
    Shape("large", "220 KB prompt, 1 token", stream=False, size=220_000),
]


def check() -> None:
    """Says how to get wrk where it is missing.

    Raises:
        SystemExit: It is missing.
    """
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing: apt-get install wrk")


def wrk(port: int, text: str, connections: int, seconds: float) -> dict[str, float]:
    """One run: requests, requests/s, p50 and p99 in milliseconds, and what failed."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n')
        script.write(f"wrk.body = [==[{text}]==]\n")
        script.write("done = function(s, l, r) io.write(string.format('R %d %d %d %d\\n', s.requests, s.duration, ")
        script.write("l:percentile(50), l:percentile(99))) local e = s.errors io.write(string.format('E %d %d\\n', ")
        script.write("e.status, e.connect + e.read + e.write + e.timeout)) end\n")
        script.flush()
        words = ["wrk", f"-t{min(2, connections)}", f"-c{connections}", f"-d{max(1, round(seconds))}s"]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        out = subprocess.run([*words, "-s", script.name, url], check=True, capture_output=True, text=True).stdout
    result = re.search(r"R (\d+) (\d+) (\d+) (\d+)\nE (\d+) (\d+)", out)
    if result is None:
        raise SystemExit(f"wrk said something else: {out}")
    requests, micros, p50, p99, status, other = map(int, result.groups())
    return {
        "requests": requests,
        "rate": requests / (micros / 1e6),
        "p50_ms": p50 / 1000,
        "p99_ms": p99 / 1000,
        "failed": status + other,
    }


def measured(port: int, text: str, connections: int, seconds: float, router: Process | None) -> dict[str, float]:
    """One run with the router's CPU per request and its memory after it."""
    before = router.cpu() if router else 0.0
    run = wrk(port, text, connections, seconds)
    if router:
        run["cpu_us"] = (router.cpu() - before) / max(1.0, run["requests"]) * 1e6
        run["rss_mb"] = router.rss_mb()
    return run
