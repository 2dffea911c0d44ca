"""`pulsing actor`: every misuse is told before anything starts; a node starts, says where, and stops as asked."""

import gc
import json
import os
import pathlib
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pulsing.cli._actor import collect_less

MODULE = '''
import abc
import asyncio
import pulsing as pul
from pulsing.core import Actor

class Echo(Actor):
    """Says it back.

    Args:
        prefix: what stands before it.
        times: how often.
    """
    def __init__(self, prefix: str, times: int = 1, tags: "list[str] | None" = None) -> None:
        self.prefix, self.times, self.tags = prefix, times, tags
    def metadata(self):
        return {"prefix": self.prefix, "times": str(self.times), "tags": ",".join(self.tags or [])}
    async def receive(self, msg):
        return self.prefix + str(msg) * self.times

class Named(Actor):
    default_name = "own-name"

@pul.remote
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start
    def add(self, n: int) -> int:
        self.value += n
        return self.value

class Failing(Actor):
    def __init__(self) -> None:
        raise ValueError("no such engine")

class FailingStart(Actor):
    async def on_start(self, actor_id) -> None:
        raise RuntimeError("engine did not come up")

class Slow(Actor):
    async def on_stop(self) -> None:
        print("stopping slowly", flush=True)
        await asyncio.sleep(60)

class Abstract(Actor):
    @abc.abstractmethod
    def must(self) -> None: ...

class Plain:
    pass

NOT_A_CLASS = 3
'''

Pulsing = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("actors")
    (made / "cli_actors.py").write_text(MODULE)
    (made / "cli_broken.py").write_text("1 / 0\n")
    (made / "cli_needy.py").write_text("import torch_that_is_not_there\n")
    return made


@pytest.fixture
def here(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is a place to import from."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["actor"], 2, "CLASS is missing"),
        (["actor", "Echo"], 2, "is no class path"),
        (["actor", "cli_actors.Ecko", "--", "--prefix", "x"], 2, "did you mean cli_actors.Echo?"),
        (["actor", "cli_actor.Echo"], 2, "there is no module cli_actor - did you mean cli_actors?"),
        (["actor", "pulsing.servin.Router"], 2, "did you mean pulsing.serving?"),
        (["actor", "pulsing.serving.Ruter"], 2, "did you mean pulsing.serving.Router?"),
        (["actor", "cli_actors.Plain"], 2, "must derive from pulsing.core.Actor or carry @pulsing.remote"),
        (["actor", "cli_actors.NOT_A_CLASS"], 2, "is no class but a int"),
        (["actor", "cli_actors.Abstract"], 2, "it lacks must"),
        (["actor", "cli_broken.X"], 1, "cannot import cli_broken: ZeroDivisionError: division by zero"),
        (["actor", "cli_needy.X"], 1, "torch_that_is_not_there"),
        (["actor", "cli_actors.Echo", "--prefix", "x"], 2, "put it after --"),
        (["actor", "cli_actors.Echo", "--sedes", "x"], 2, "did you mean --seeds?"),
        (["actor", "cli_actors.Echo", "--addr"], 2, "--addr"),
        (["actor", "cli_actors.Echo"], 2, "needs --prefix"),
        (["actor", "cli_actors.Echo", "--", "--prefix", "x", "--time", "2"], 2, "did you mean times?"),
        (["actor", "cli_actors.Echo", "--", "--prefix", "x", "--times", "two"], 2, "'two' is not an int"),
        (["actor", "cli_actors.Echo", "--", "--prefix", "x", "--seeds", "a"], 2, "put it before --"),
        (["actor", "cli_actors.Echo", "-D", "x=1"], 2, "-D knows no 'x'"),
        (["actor", "cli_actors.Echo", "stray", "--", "--prefix", "x"], 2, "stray"),
        (["actor", "cli_actors.Named", "--log_level", "loud"], 2, "none of error|warn|info|debug|trace"),
        (["actor", "cli_actors.Named", "--addr", "nonsense"], 2, "nonsense"),
        (["actor", "cli_actors.Named", "--addr", "127.0.0.1:0", "--name", "a b"], 2, '"a b" is no actor name'),
    ],
)
def test_what_cannot_be_meant(pulsing: Pulsing, argv: list[str], code: int, words: str) -> None:
    done = pulsing(*argv)
    assert (done.code, done.out) == (code, ""), done.err
    assert words in done.err


@pytest.mark.usefixtures("here")
def test_help_lists_the_constructor(pulsing: Pulsing) -> None:
    done = pulsing("actor", "cli_actors.Echo", "--help")
    assert done.code == 0
    assert "--join_timeout" in done.out
    assert "--prefix <str>  (required)\n      what stands before it." in done.out
    assert "--times <int>  (default: 1)" in done.out
    counter = pulsing("actor", "cli_actors.Counter", "--help")
    assert "--start <int>  (default: 0)" in counter.out


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("pulsing.serving.Router", ["http_host", "http_port", "model_name", "worker_name", "scheduler_type"]),
        (
            "pulsing.serving.TransformersWorker",
            ["model_name", "device", "dtype", "preload", "max_new_tokens", "capacity"],
        ),
        ("pulsing.serving.worker.TransformersWorker", ["model_name", "chat_template"]),
        ("pulsing.serving.MistralRsWorker", ["model_name", "preload"]),
        ("pulsing.serving.VllmWorker", ["model"]),
        ("pulsing.serving.vllm.VllmWorker", ["model"]),
    ],
)
def test_documented_classes_and_their_parameters(pulsing: Pulsing, path: str, parameters: list[str]) -> None:
    done = pulsing("actor", path, "--help")
    assert done.code == 0, done.err
    for name in parameters:
        assert re.search(rf"^  --{name}\w* <", done.out, re.MULTILINE), done.out


class Node:
    """A `pulsing actor` process."""

    def __init__(self, folder: pathlib.Path, *argv: str, **variables: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PULSING_")} | variables
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pulsing.cli", "actor", *argv],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.seen = ""

    def until(self, pattern: str, limit: float = 30.0) -> re.Match[str]:
        """Reads stderr until it has `pattern`."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + limit
        while True:
            found = re.search(pattern, self.seen)
            if found:
                return found
            line = self.process.stderr.readline()
            self.seen += line
            if not line or time.monotonic() > deadline:
                pytest.fail(f"{pattern!r} did not come:\n{self.seen}")

    def end(self, limit: float = 30.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=limit)
        return self.process.returncode, out, self.seen + err


@pytest.fixture
def start(folder: pathlib.Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def run(*argv: str, **variables: str) -> Node:
        nodes.append(Node(folder, *argv, **variables))
        return nodes[-1]

    yield run
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
        node.process.communicate()


def actors(addr: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{addr}/actors", timeout=10) as response:
        return {row["name"]: row for row in json.load(response)["local"] if not row["internal"]}


def test_an_actor_starts_serves_and_stops(start: Callable[..., Node]) -> None:
    define = '-Dactor.extra_kwargs={"prefix": "from-D", "times": 2}'
    node = start("cli_actors.Echo", "--addr", "127.0.0.1:0", define, "--", "--prefix=x", "--tags", "a,b")
    addr = node.until(r"started at (\S+)")[1]
    row = actors(addr)["worker"]
    assert row["class"] == "cli_actors.Echo"
    assert row["public"] is True
    assert row["metadata"] == {"prefix": "x", "times": "2", "tags": "a,b"}
    node.process.send_signal(signal.SIGTERM)
    code, out, _ = node.end()
    assert (code, out) == (0, "")


def test_names_and_remote_classes(start: Callable[..., Node]) -> None:
    named = start("cli_actors.Named", "--addr", "127.0.0.1:0")
    addr = named.until(r"started at (\S+)")[1]
    assert "own-name" in actors(addr)
    counter = start("cli_actors.Counter", "--seeds", addr, "--name", "mine", "--", "--start", "5")
    assert "mine" in str(actors(counter.until(r"started at (\S+)")[1]))
    for node in (counter, named):
        node.process.send_signal(signal.SIGINT)
        assert node.end()[:2] == (0, "")


def test_the_file_that_is_named_is_the_only_one(start: Callable[..., Node], tmp_path: pathlib.Path) -> None:
    other, named = tmp_path / "other.toml", tmp_path / "named.toml"
    other.write_text("no_such_key = 1\n")
    named.write_text('addr = "127.0.0.1:0"\nmailbox = 32\n')
    node = start("cli_actors.Named", "--config", str(named), PULSING_CONFIG=str(other))
    node.until("started at 127.0.0.1")
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 0
    code, _, err = start("cli_actors.Named", PULSING_CONFIG=str(other)).end()
    assert code == 2
    assert f"{other}: unknown key 'no_such_key'" in err


def test_a_value_that_an_actors_own_setting_cannot_have_is_misuse(start: Callable[..., Node]) -> None:
    router = ("pulsing.serving.Router", "--addr", "127.0.0.1:0", "--name", "r", "--")
    for words, expected, error in (
        (("--http_port", "99999"), 2, "http_port=99999"),
        (("--config", "no-such-file.toml"), 1, "cannot read the configuration file"),
    ):
        code, out, err = start(*router, *words).end()
        assert (code, out) == (expected, ""), err
        assert error in err


def test_m6_a_node_says_where_it_is_reached(start: Callable[..., Node]) -> None:
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        told = f"localhost:{elsewhere.getsockname()[1]}"
        node = start("cli_actors.Named", "--addr", "0.0.0.0:0", "--advertise", told)
        node.until(f"started at {told.replace('localhost', '127.0.0.1')}$")
        node.process.send_signal(signal.SIGTERM)
        assert node.end()[:2] == (0, "")
    for flag, value, words in [
        ("--advertise", "0.0.0.0:80", "nobody can connect to it"),
        ("--seeds", "k8s://pulsing", "the port is missing; expected k8s://service.namespace:port"),
        ("--addr", "::1:80", "brackets, as in [::1]:80"),
    ]:
        code, out, err = start("cli_actors.Named", flag, value).end()
        assert (code, out) == (2, "")
        assert value in err
        assert words in err


def test_a_second_signal_ends_at_once(start: Callable[..., Node]) -> None:
    node = start("cli_actors.Slow", "--addr", "127.0.0.1:0")
    node.until("started at")
    node.process.send_signal(signal.SIGTERM)
    assert node.process.stdout is not None
    assert node.process.stdout.readline() == "stopping slowly\n"
    node.process.send_signal(signal.SIGTERM)
    assert node.end(5.0)[0] == 143


def test_a_signal_stops_it_when_nobody_reads_its_stderr(start: Callable[..., Node]) -> None:
    node = start("cli_actors.Named", "--addr", "127.0.0.1:0")
    addr = node.until(r"started at (\S+)")[1]
    assert node.process.stderr is not None
    node.process.stderr.close()
    # Rust logs each of these into the same closed pipe; the next one still finds its way.
    for _ in range(2):
        other = start("cli_actors.Named", "--seeds", addr, "--name", "other")
        other.until("started at")
        other.process.send_signal(signal.SIGTERM)
        assert other.end()[0] == 0
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20.0) in (0, 120)


def test_waiting_for_seeds_says_so_and_ends_on_a_signal(start: Callable[..., Node]) -> None:
    with socket.socket() as taken:
        # Bound and not listening: whoever dials is refused, and nobody else takes the port meanwhile.
        taken.bind(("127.0.0.1", 0))
        seed = f"127.0.0.1:{taken.getsockname()[1]}"
        node = start("cli_actors.Named", "--addr", "127.0.0.1:0", "--seeds", seed)
        node.until(f"waiting for seeds {seed}")
        # Once; from then on the runtime tells every 5 s, with the reason.
        node.until(rf"WARN .*still waiting for the cluster after 5 s: {seed} \(.*refused")
        assert node.seen.count("waiting for seeds") == 1
        node.process.send_signal(signal.SIGTERM)
        assert node.end()[:2] == (0, "")


def test_failures_end_with_1_and_the_reason(start: Callable[..., Node]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        seed = f"127.0.0.1:{taken.getsockname()[1]}"
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            busy = f"127.0.0.1:{listening.getsockname()[1]}"
            for argv, words in [
                (["cli_actors.Named", "--addr", busy], f"cannot listen on {busy}"),
                (["cli_actors.Named", "--seeds", seed, "--join_timeout", "0.5"], seed),
                (["cli_actors.Failing", "--addr", "127.0.0.1:0"], "ValueError: no such engine"),
                (["cli_actors.FailingStart", "--addr", "127.0.0.1:0"], "RuntimeError: engine did not come up"),
            ]:
                code, out, err = start(*argv).end()
                assert (code, out) == (1, ""), err
                assert words in err
                assert "Traceback" not in err


def test_json_logs_are_json(start: Callable[..., Node]) -> None:
    node = start("cli_actors.Named", "--addr", "127.0.0.1:0", "--log_format=json", "--log-level", "debug", "--insecure")
    node.until("started at")
    node.process.send_signal(signal.SIGTERM)
    code, _, err = node.end()
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    assert any("insecure" in json.dumps(line["fields"]).lower() for line in lines)
    assert all({"timestamp", "level", "target"} <= line.keys() for line in lines)


def test_a_cluster_with_a_secret(start: Callable[..., Node], pulsing: Pulsing, tmp_path: pathlib.Path) -> None:
    secret, wrong, empty = (tmp_path / name for name in ("secret", "wrong", "empty"))
    secret.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    empty.write_text("\n")
    node = start("cli_actors.Named", "--addr", "127.0.0.1:0", "--passphrase-file", str(secret))
    addr = node.until(r"started at (\S+)")[1]
    member = start("cli_actors.Counter", "--seeds", addr, "--passphrase-file", str(secret))
    member.until("started at")
    shown = pulsing("inspect", "cluster", "--seeds", addr, "--passphrase_file", str(secret))
    assert "2 nodes (2 alive)" in shown.out, shown.err
    for argv, words in [
        (("--passphrase_file", str(wrong)), "check the passphrase"),
        ((), "--passphrase-file"),
    ]:
        refused = pulsing("inspect", "cluster", "--seeds", addr, *argv)
        assert (refused.code, refused.out) == (2, "")
        assert words in refused.err
        code, out, err = start("cli_actors.Named", "--seeds", addr, "--name", "stranger", *argv).end()
        assert (code, out) == (1, "")
        assert words in err
    assert start("cli_actors.Named", "--passphrase-file", str(empty)).end()[0] == 2
    assert start("cli_actors.Named", "--passphrase-file", str(secret), "--insecure").end()[0] == 2
    for one in (member, node):
        one.process.send_signal(signal.SIGTERM)
        assert one.end()[0] == 0


@pytest.mark.parametrize(("told", "becomes"), [(700, 10_000), (2_000, 10_000), (50_000, 50_000), (0, 0)])
def test_the_collector_looks_less_often_unless_it_was_told_to(told: int, becomes: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(told, 7, 8)
        collect_less()
        assert gc.get_threshold()[:2] == (becomes, 7)
    finally:
        gc.set_threshold(*before)


PROMPTS = """
import os, resource
from pulsing.cli._actor import keep_memory
kept = keep_memory({name: "1" for name in [%r] if name})
def prompts():
    [bytes(220_000) for _ in range(64)]
prompts()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    prompts()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("told", ["", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_memory_of_large_prompts_is_kept_unless_the_environment_says_otherwise(told: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROMPTS % told], env=environ, check=True, capture_output=True, text=True
    )
    kept, faults = done.stdout.split()
    assert kept == str(not told and platform.libc_ver()[0] == "glibc")
    if kept == "True":
        # Once 64 prompts are some 3,500 pages.
        assert int(faults) < 3_500


@pytest.mark.parametrize(("soft", "hard", "then"), [(64, 500, 500), (300, 300, 300), (64, 100_000, 65_536)])
def test_a_node_may_have_as_many_open_files_as_the_system_allows(soft: int, hard: int, then: int) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < hard:
        hard, then = allowed, min(then, allowed)
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from pulsing.cli._actor import open_more_files
print(open_more_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(then), str(then), str(hard)]
