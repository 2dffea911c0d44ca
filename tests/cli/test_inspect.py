"""`pulsing inspect` shows what nodes answer; when they do not it says so, exits 1 or 2, and stdout stays empty."""

import http.server
import json
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ROUTER = {"name": "my-llm", "actor_id": "a" * 32, "class": "pulsing.serving.Router", "metadata": {"kind": "router"}}
WORKER = {
    "name": "worker",
    "actor_id": "b" * 32,
    "class": "pulsing.serving.TransformersWorker",
    "metadata": {"kind": "worker", "state": "loading", "model": "gpt2"},
}
INTERNAL = {"name": "system/core", "actor_id": "c" * 32, "class": "pulsing.core.System", "metadata": {}}
METRICS = (
    '# HELP pulsing_actors x\npulsing_actors{node_id="1"} 2\npulsing_cluster_members{node_id="1",state="alive"} 3\n'
)


class Node:
    """Answers like a node whose documents the test sets."""

    def __init__(self) -> None:
        node = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                document = node.documents.get(self.path)
                text = document if isinstance(document, str) else json.dumps(document)
                self.send_response(404 if document is None else 200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.addr = f"127.0.0.1:{self.server.server_port}"
        self.documents: dict[str, Any] = {}

    def member(self, *, me: bool, state: str = "alive") -> dict[str, Any]:
        return {"node_id": f"{self.server.server_port:032x}", "addr": self.addr, "state": state, "me": me}


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes of one cluster: the first has the Router and an internal actor, the second the Worker."""
    one, two = Node(), Node()
    gone = {"node_id": "d" * 32, "addr": "127.0.0.1:1", "state": "left", "me": False}
    one.documents = {
        "/cluster/members": [one.member(me=True), two.member(me=False), gone],
        "/actors": {
            "node_id": f"{one.server.server_port:032x}",
            "addr": one.addr,
            "local": [{**ROUTER, "public": True, "internal": False}, {**INTERNAL, "public": False, "internal": True}],
            "cluster": [
                {**ROUTER, "node_id": "1", "addr": one.addr},
                {**WORKER, "node_id": "2", "addr": two.addr},
                {**INTERNAL, "actor_id": "f" * 32, "node_id": "2", "addr": two.addr},
            ],
        },
        "/metrics": METRICS,
    }
    two.documents = {
        "/cluster/members": [one.member(me=False), two.member(me=True)],
        "/actors": {
            "node_id": f"{two.server.server_port:032x}",
            "addr": two.addr,
            "local": [
                {**WORKER, "public": True, "internal": False, "metadata": {**WORKER["metadata"], "state": "ready"}}
            ],
            "cluster": [],
        },
        "/metrics": METRICS,
    }
    threads = [threading.Thread(target=node.server.serve_forever, args=(0.01,)) for node in (one, two)]
    for thread in threads:
        thread.start()
    yield one, two
    for node, thread in zip((one, two), threads, strict=True):
        node.server.shutdown()
        node.server.server_close()
        thread.join()


Pulsing = Callable[..., Any]


def test_cluster(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    done = pulsing("inspect", "cluster", "--seeds", f"127.0.0.1:1,{nodes[0].addr}")
    assert done.code == 0
    assert "3 nodes (2 alive, 1 left)" in done.out
    assert nodes[1].addr in done.out
    listing = json.loads(pulsing("inspect", "cluster", "--seeds", nodes[0].addr, "--json-output").out)
    assert [member["state"] for member in listing] == ["alive", "alive", "left"]


def test_m6_seeds_are_read_as_nodes_read_them(
    pulsing: Pulsing, nodes: tuple[Node, Node], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "seeds"
    file.write_text(f"{nodes[0].addr} # the first\n")
    assert "3 nodes" in pulsing("inspect", "cluster", "--seeds", f"127.0.0.1:1,file://{file}").out
    for seed, words in [("srv://x:1", "srv:// is no kind of seed"), (f"file://{file}.not", "cannot be opened")]:
        done = pulsing("inspect", "cluster", "--seeds", seed)
        assert (done.code, done.out) == (2, "")
        assert f'--seeds: "{seed}"' in done.err
        assert words in done.err


def test_actors_of_one_node(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    done = pulsing("inspect", "actors", "--endpoint", nodes[0].addr)
    assert done.code == 0
    assert "2 actors under 2 names" in done.out
    assert "loading" in done.out
    assert "system/core" not in done.out
    assert "system/core" in pulsing("inspect", "actors", "--endpoint", nodes[0].addr, "--all_actors", "True").out
    assert "kind=worker" in pulsing("inspect", "actors", "--endpoint", nodes[0].addr, "--detailed").out


def test_actors_of_all_nodes_are_told_by_their_own(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    rows = json.loads(pulsing("inspect", "actors", "--seeds", nodes[0].addr, "--json_output", "True").out)
    assert [(row["name"], row["metadata"].get("state")) for row in rows] == [("my-llm", None), ("worker", "ready")]
    only = json.loads(pulsing("inspect", "actors", "--seeds", nodes[0].addr, "--json", "--filter", "TRANSFORMERS").out)
    assert [row["name"] for row in only] == ["worker"]
    cut = pulsing("inspect", "actors", "--seeds", nodes[0].addr, "--top", "1")
    assert "... and 1 more" in cut.out


def test_names_with_their_instances_and_nodes(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    for at in range(6):
        more = {**WORKER, "actor_id": f"{at:032x}", "node_id": f"{at:032x}", "addr": f"10.0.0.{at}:8000"}
        nodes[0].documents["/actors"]["cluster"].append(more)
    shown = pulsing("inspect", "actors", "--seeds", nodes[0].addr)
    assert shown.code == 0
    assert "8 actors under 2 names" in shown.out
    worker = next(line for line in shown.out.splitlines() if line.startswith("worker"))
    assert re.split(r"  +", worker)[1:4] == ["7", "6 loading, 1 ready", "pulsing.serving.TransformersWorker"]
    assert worker.endswith("10.0.0.4:8000 and 2 more")


def test_metrics(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    values = json.loads(pulsing("inspect", "metrics", "--seeds", nodes[0].addr, "--json_output").out)
    assert values[nodes[1].addr] == {"pulsing_actors": 2.0, 'pulsing_cluster_members{state="alive"}': 3.0}
    assert "# HELP" in pulsing("inspect", "metrics", "--seeds", nodes[0].addr, "--raw").out
    whole = pulsing("inspect", "metrics", "--seeds", nodes[0].addr)
    assert whole.out == f"# Node {nodes[0].addr}\n{METRICS}# Node {nodes[1].addr}\n{METRICS}"


def test_key_figures_hold_what_a_router_counts(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    router = one.documents["/actors"]["cluster"][0]
    router["node_id"] = one.documents["/cluster/members"][0]["node_id"]
    # A Router that listens on every interface is asked at its node's host; here the other node plays its HTTP server.
    router["metadata"] = {"kind": "router", "http": f"0.0.0.0:{two.server.server_port}"}
    two.documents["/metrics"] = (
        METRICS + 'pulsing_router_in_flight 0\npulsing_router_requests_total{route="chat_completions",status="200"} 4\n'
        'pulsing_router_requests_total{route="models",status="200"} 9\n'
    )
    done = pulsing("inspect", "metrics", "--seeds", one.addr, "--raw", "False")
    assert (done.code, done.err) == (0, "")
    header, first, second = (re.split(r"  +", line) for line in done.out.splitlines())
    assert [header[at] for at in (0, 2, 8, 9)] == ["Node", "Actors", "Members", "Requests"]
    assert [first[at] for at in (0, 8, 9)] == [one.addr, "3 alive, 3 alive", "4"]
    assert [second[at] for at in (0, 8, 9)] == [two.addr, "3 alive", "4"]
    router["metadata"]["http"] = "127.0.0.1:1"
    hidden = pulsing("inspect", "metrics", "--seeds", one.addr, "--raw=false")
    assert hidden.code == 0
    assert "the requests of a Router are not shown: cannot connect to 127.0.0.1:1" in hidden.err
    assert re.search(rf"^{one.addr} .* -$", hidden.out, re.MULTILINE)


def test_watch_prints_differences(pulsing: Pulsing, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    def later(_: float) -> None:
        nodes[0].documents["/cluster/members"] = [nodes[0].member(me=True), nodes[1].member(me=False, state="suspect")]

    monkeypatch.setattr("pulsing.cli._inspect.time.sleep", later)
    done = pulsing("inspect", "watch", "--seeds", nodes[0].addr, "--max_rounds", "2", "--kind", "cluster")
    assert done.code == 0
    assert "alive -> suspect" in done.out
    assert "- node 127.0.0.1:1" in done.out


def test_watch_of_counters(pulsing: Pulsing, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    def later(_: float) -> None:
        nodes[1].documents["/metrics"] = METRICS.replace("} 2", "} 5")

    monkeypatch.setattr("pulsing.cli._inspect.time.sleep", later)
    done = pulsing("inspect", "watch", "--seeds", nodes[0].addr, "--max-rounds=2", "--kind", "metrics")
    assert done.code == 0
    changes = [line for line in done.out.splitlines() if line[9] in "+-~"]
    assert [line[9:] for line in changes] == [f"~ metrics {nodes[1].addr} actors: 2 -> 5"]


def test_watch_ends_at_a_node_that_fails(
    pulsing: Pulsing, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    suspect = nodes[1].member(me=False, state="suspect")

    def later(_: float) -> None:
        nodes[0].documents["/cluster/members"] = [nodes[0].member(me=True), suspect]
        nodes[1].documents.clear()

    monkeypatch.setattr("pulsing.cli._inspect.time.sleep", later)
    before = dict(nodes[1].documents)
    done = pulsing("inspect", "watch", "--seeds", nodes[0].addr, "--max_rounds", "3")
    assert done.code == 1
    assert f"{nodes[1].addr} answers 404" in done.err
    assert "alive -> suspect" in done.out
    nodes[1].documents.update(before)
    nodes[0].documents["/cluster/members"] = [nodes[0].member(me=True), nodes[1].member(me=False)]
    effort = pulsing("inspect", "watch", "--seeds", nodes[0].addr, "--max_rounds", "3", "--best_effort")
    assert effort.code == 1
    assert f"{nodes[1].addr} answers 404" in effort.err
    assert f"- metrics {nodes[1].addr} actors: 2" in effort.out


def test_a_silent_member_is_a_failure_unless_asked_otherwise(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    lost = {"node_id": "e" * 32, "addr": "127.0.0.1:1", "state": "alive", "me": False}
    nodes[0].documents["/cluster/members"] = [nodes[0].member(me=True), lost]
    done = pulsing("inspect", "actors", "--seeds", nodes[0].addr)
    assert (done.code, done.out) == (1, "")
    assert "1 of 2 nodes does not answer" in done.err
    effort = pulsing("inspect", "actors", "--seeds", nodes[0].addr, "--best_effort")
    assert effort.code == 1
    assert "my-llm" in effort.out
    assert "127.0.0.1:1" in effort.err
    rows = pulsing("inspect", "actors", "--seeds", nodes[0].addr, "--best-effort=True", "--json")
    assert rows.code == 1
    assert "my-llm" in [row["name"] for row in json.loads(rows.out)]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["inspect", "cluster", "--seeds", "127.0.0.1:1"], 2, "cannot connect to 127.0.0.1:1"),
        (["inspect", "actors", "--endpoint", "127.0.0.1:1"], 2, "cannot connect to 127.0.0.1:1"),
        (["inspect", "actors", "--seeds", "127.0.0.1:1"], 2, "cannot connect to 127.0.0.1:1"),
        (["inspect", "metrics", "--seeds", "127.0.0.1:1", "--best_effort"], 2, "cannot connect to 127.0.0.1:1"),
        (["inspect", "watch", "--seeds", "127.0.0.1:1"], 2, "cannot connect to 127.0.0.1:1"),
        (["inspect", "cluster"], 2, "give --seeds"),
        (["inspect", "cluster", "--seeds", ","], 2, "give --seeds"),
        (["inspect", "actors"], 2, "give --endpoint"),
        (["inspect", "actors", "--endpoint", "a", "--seeds", "b"], 2, "not both"),
        (["inspect", "watch", "--seeds", "a", "--kind", "nodes"], 2, "cluster, actors, metrics or all"),
        (["inspect", "actors", "--endpoint", "127.0.0.1:1", "--timeout", "x"], 2, "--timeout"),
        (["inspect"], 2, "a command is missing"),
        (["inspect", "nodes"], 2, "Commands: cluster"),
    ],
)
def test_failures(pulsing: Pulsing, argv: list[str], code: int, words: str) -> None:
    done = pulsing(*argv)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_something_else_behind_the_port(pulsing: Pulsing, nodes: tuple[Node, Node]) -> None:
    nodes[0].documents["/cluster/members"] = "<html>"
    done = pulsing("inspect", "cluster", "--seeds", nodes[0].addr)
    assert (done.code, done.out) == (2, "")
    assert "does not answer as a Pulsing node" in done.err
    nodes[0].documents.clear()
    done = pulsing("inspect", "cluster", "--seeds", nodes[0].addr)
    assert (done.code, done.out) == (2, "")
    assert "answers 404" in done.err


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none_is_misuse(pulsing: Pulsing, limit: str) -> None:
    done = pulsing("inspect", "cluster", "--seeds", "127.0.0.1:1", f"--timeout={limit}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Error: --timeout is a number of seconds above 0"), done.err


def test_what_actors_say_of_themselves_cannot_move_the_terminal(
    pulsing: Callable[..., Any], nodes: tuple[Node, Node]
) -> None:
    rude = "\x1b]0;owned\x07\nmy-fake-row\x9b2J\u202e"
    one, two = nodes
    for node in nodes:
        for actor in node.documents["/actors"]["cluster"] + node.documents["/actors"]["local"]:
            actor["class"] = rude
            actor["metadata"] = {"state": rude, "model": rude}
    watched = ("inspect", "watch", "--seeds", one.addr, "--kind", "actors", "--max_rounds", "1")
    for command in (
        ("inspect", "actors", "--seeds", one.addr),
        ("inspect", "actors", "--seeds", one.addr, "--detailed"),
        ("inspect", "actors", "--endpoint", two.addr),
        watched,
    ):
        done = pulsing(*command)
        assert done.code == 0, done.err
        assert "\\x1b" in done.out
        assert not [char for char in done.out if char in "\x1b\x07\x9b\u202e"], command
        assert not [line for line in done.out.splitlines() if line.startswith("my-fake-row")]


@pytest.mark.parametrize(
    "said",
    [
        {},
        [],
        None,
        "text",
        [5],
        [{"addr": 5}],
        [{"node_id": "1", "addr": "127.0.0.1:1", "state": ["alive"], "me": True}],
        {"node_id": "1", "addr": "a", "local": [], "cluster": [{"name": None}]},
        {"node_id": "1", "addr": "a", "local": [{"actor_id": "1", "class": "c", "metadata": {"a": 1}}], "cluster": []},
        "[" * 100_000,
        "<html>",
    ],
    ids=lambda said: str(said)[:40],
)
@pytest.mark.parametrize(
    "command",
    ["cluster", "actors", "actors --detailed", "actors --endpoint", "metrics --raw False", "watch --max_rounds 1"],
)
def test_somebody_elses_server_is_told_from_a_node(
    pulsing: Callable[..., Any], nodes: tuple[Node, Node], command: str, said: Any
) -> None:
    one = nodes[0]
    for path in ("/cluster/members", "/actors", "/metrics"):
        # What is an answer to one of them stays it.
        if not (said == [] and path == "/cluster/members"):
            one.documents[path] = said if isinstance(said, str) else json.dumps(said)
    where = [one.addr] if command.endswith("--endpoint") else ["--seeds", one.addr]
    done = pulsing("inspect", *command.split(), *where)
    if done.code == 0:
        # The members, and none of the wrong documents, were asked for.
        assert command == "cluster"
        return
    assert done.code in (1, 2)
    assert done.err.startswith("Error: ")
    assert one.addr in done.err
    assert len(done.err) < 1000
    assert not done.out


@pytest.mark.parametrize("interval", ["inf", "1e300"])
def test_an_interval_that_no_clock_counts_is_misuse(pulsing: Callable[..., Any], interval: str) -> None:
    done = pulsing("inspect", "watch", "--seeds", "127.0.0.1:1", "--interval", interval)
    assert done.code == 2
    assert done.err.startswith(f"Error: --interval is a number of seconds up to 86400, not {float(interval):g}")
