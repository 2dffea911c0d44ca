"""What stands behind and beside the Router in a run: mock engines, Workers, our Routers and the peers' routers."""

import contextlib
import dataclasses
import http.client
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import runtime_meter as meter
import runtime_venv as venv

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "mock"

# The wheels as published; both are what PyPI calls the latest.
PEERS = {"sglang-router": "sglang-router==0.3.2", "vllm-router": "vllm-router==0.1.17"}


def peer_python(name: str) -> pathlib.Path:
    """Python of a peer's environment, made from PyPI at its first use."""
    return venv.venv(name, [PEERS[name]])


def mock_engine() -> pathlib.Path:
    """The mock engine's program, built in release."""
    target = venv.target(venv.ROOT)
    command = ["cargo", "build", "-q", "--release", "-p", "pulsing-bench", "--example", "mock_engine"]
    venv.run(*command, cwd=venv.ROOT, env={**os.environ, "CARGO_TARGET_DIR": str(target)})
    return target / "release" / "examples" / "mock_engine"


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def get(port: int, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""


def wait_for(what: str, port: int, path: str, limit: float = 60.0) -> None:
    """Until a GET is answered 200.

    Raises:
        SystemExit: It is not, within `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while get(port, path)[0] != 200:
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: GET {path} on port {port} is not answered 200 within {limit:.0f} s")
        time.sleep(0.05)


class Process:
    """A process with its CPU and memory, its children's included.

    Args:
        command: Program and arguments.
        log: Where its output goes; None: nowhere.
    """

    def __init__(self, command: list[str], log: pathlib.Path | None = None) -> None:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "127.0.0.1"}
        out = subprocess.DEVNULL if log is None else log.open("ab")
        self.popen = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if not isinstance(out, int):
            out.close()

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self.popen.pid

    def cpu(self) -> float:
        """Seconds on a core so far."""
        return sum(meter.ran(pid) for pid in meter.family(self.pid))

    def rss_mb(self) -> float:
        """Resident memory in MB (10^6 bytes)."""
        return sum(meter.rss_of(pid) for pid in meter.family(self.pid))

    def peak_mb(self) -> float:
        """Its largest resident memory so far, in MB, children left out."""
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+)", status)
        return int(found[1]) * 1024 / 1e6 if found else 0.0

    def signal(self, number: int) -> None:
        """Sends a signal to the process itself, if it lives."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def stop(self) -> None:
        """Ends it, with force if it does not end by itself."""
        self.signal(signal.SIGCONT)
        children = [pid for pid in meter.family(self.pid) if pid != self.pid]
        self.signal(signal.SIGTERM)
        try:
            self.popen.wait(15)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def actor(python: pathlib.Path, path: str, name: str, node: list[str], *arguments: str) -> list[str]:
    """Command of one `pulsing actor`."""
    return [
        str(python),
        "-m",
        "pulsing.cli",
        "actor",
        path,
        "--name",
        name,
        *node,
        "--log_level",
        "warn",
        "--",
        *arguments,
    ]


@dataclasses.dataclass
class Front:
    """A router under test.

    Attributes:
        name: How tables call it.
        port: Where it serves.
        process: The router itself.
        health: Path that is answered 200 when it serves.
    """

    name: str
    port: int
    process: Process
    health: str


def peer_command(name: str, policy: str, port: int, metrics: int, engines: list[int], *more: str) -> list[str]:
    """Command of a peer's router with its defaults, but for policy and ports."""
    module = f"{name.replace('-', '_')}.launch_router"
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    return [str(peer_python(name)), "-m", module, *where, "--policy", policy, *more, "--worker-urls", *urls]


@contextlib.contextmanager
def peer(name: str, policy: str, engines: list[int], *more: str, log: pathlib.Path | None = None) -> Iterator[Front]:
    """A peer's router in front of engines."""
    port, metrics = free_ports(2)
    process = Process(peer_command(name, policy, port, metrics, engines, *more), log)
    try:
        wait_for(f"{name} {policy}", port, "/health")
        yield Front(f"{name} {policy}", port, process, "/health")
    finally:
        process.stop()


@contextlib.contextmanager
def ours_with_seed(
    python: pathlib.Path, policy: str, engines: list[int], *more: str, log: pathlib.Path | None = None
) -> Iterator[tuple[Front, str]]:
    """Our Router in a cluster of its own, with an EngineWorker (a process each) for each engine; and the address of its
    node, for Workers to join."""
    node, port = free_ports(2)
    seed = f"127.0.0.1:{node}"
    settings = ["--http_host", "127.0.0.1", "--http_port", str(port), "--model_name", MODEL, "--scheduler_type", policy]
    with contextlib.ExitStack() as stack:
        router = Process(actor(python, "pulsing.serving.Router", "router", ["--addr", seed], *settings, *more), log)
        stack.callback(router.stop)
        for engine in engines:
            url = ["--url", f"http://127.0.0.1:{engine}"]
            process = Process(actor(python, "pulsing.serving.EngineWorker", "worker", ["--seeds", seed], *url), log)
            stack.callback(process.stop)
        wait_healthy(port, len(engines))
        yield Front(f"Pulsing {policy}", port, router, "/health"), seed


@contextlib.contextmanager
def ours(
    python: pathlib.Path, policy: str, engines: list[int], workers: list[str] | None = None, *, label: str | None = None
) -> Iterator[Front]:
    """Our Router in front of engines, or of actor Workers (classes; one process each)."""
    with contextlib.ExitStack() as stack:
        front, seed = stack.enter_context(ours_with_seed(python, policy, engines))
        for worker in workers or []:
            stack.callback(Process(actor(python, worker, "worker", ["--seeds", seed])).stop)
        wait_healthy(front.port, len(engines) + len(workers or []))
        front.name = label or front.name
        yield front


def wait_healthy(port: int, count: int, limit: float = 60.0) -> None:
    """Until our Router sees that many ready workers."""
    deadline = time.monotonic() + limit
    while True:
        found = re.search(rb'"healthy_workers":\s*(\d+)', get(port, "/health")[1])
        if found is not None and int(found[1]) >= count:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the Router on port {port} has no {count} ready workers within {limit:.0f} s")
        time.sleep(0.05)


@contextlib.contextmanager
def engine(program: pathlib.Path, ports: list[int], *words: str) -> Iterator[Process]:
    """The mock engine, on all of these ports."""
    process = Process([str(program), ",".join(map(str, ports)), "--name", MODEL, *words])
    try:
        for port in ports:
            wait_for("the mock engine", port, "/health")
        yield process
    finally:
        process.stop()


@contextlib.contextmanager
def python_engine(python: pathlib.Path, port: int) -> Iterator[Process]:
    """The same answers from Python: `trivial_engine.py`."""
    process = Process([str(python), str(HERE / "trivial_engine.py"), str(port)])
    try:
        wait_for("the Python engine", port, "/v1/models")
        yield process
    finally:
        process.stop()


def under_test(chosen: pathlib.Path | None) -> pathlib.Path:
    """Python with the release wheel of this tree, or the one that was chosen."""
    return chosen or venv.ours()


def described(python: pathlib.Path, *, peers: bool) -> dict[str, str]:
    """Versions of all that takes part."""
    found = dict(venv.versions(python, "uvloop"))
    for name in PEERS if peers else ():
        found |= venv.versions(peer_python(name), name)
    return found
