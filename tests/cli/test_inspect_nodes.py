"""`pulsing inspect` in front of real nodes: processes, some killed or stopped, with and without a secret."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

NODE = """
import asyncio, sys
import pulsing as pul

@pul.remote
class Echo:
    def say(self, text):
        return text
    def count(self, items):
        yield from range(items)

async def talk(names, calls, streams, items):
    for name in names:
        echo = await pul.resolve(name)
        for at in range(calls):
            assert await echo.say(at) == at
        for _ in range(streams):
            assert [item async for item in echo.count(items)] == list(range(items))

async def main():
    name, secret, *seeds = sys.argv[1:]
    system = await pul.init("127.0.0.1:0", seeds=seeds, passphrase=secret or None)
    await Echo.spawn(name=name, public=True)
    print(system.addr, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        words = line.split()
        await talk(words[:-3], *map(int, words[-3:]))
        print("done", flush=True)
    await pul.shutdown()

asyncio.run(main())
"""

Pulsing = Callable[..., Any]


class Node:
    def __init__(self, name: str, secret: str, seeds: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, name, secret, *seeds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addr = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def talk(self, *names: str, calls: int, streams: int, items: int) -> None:
        """Calls these actors, one after the other."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{' '.join(names)} {calls} {streams} {items}\n")
        self.process.stdin.flush()
        assert self.line() == "done"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def until(what: str, condition: Callable[[], Any], limit: float = 30.0) -> Any:
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.05)
    return value


@pytest.fixture
def start() -> Iterator[Callable[..., list[Node]]]:
    """Nodes that know each other; the first is the seed."""
    nodes: list[Node] = []

    def run(secret: str = "", names: Sequence[str] = ("one", "two", "two")) -> list[Node]:
        for name in names:
            nodes.append(Node(name, secret, [node.addr for node in nodes[:1]]))
        return nodes

    yield run
    for node in nodes:
        node.end()


def states(pulsing: Pulsing, seed: str, *options: str) -> dict[str, str]:
    listing = pulsing("inspect", "cluster", "--seeds", seed, "--json_output", *options)
    assert listing.code == 0, listing.err
    return {row["addr"]: row["state"] for row in json.loads(listing.out)}


def all_alive(pulsing: Pulsing, nodes: list[Node], *options: str) -> None:
    wanted = {node.addr: "alive" for node in nodes}
    until("all members", lambda: all(states(pulsing, node.addr, *options) == wanted for node in nodes))
    until(
        "all names",
        lambda: pulsing("inspect", "actors", "--endpoint", nodes[0].addr, *options).out.count("Echo") == len(nodes),
    )


def figures(pulsing: Pulsing, seed: str) -> dict[str, dict[str, str]]:
    done = pulsing("inspect", "metrics", "--seeds", seed, "--raw", "False")
    assert (done.code, done.err) == (0, "")
    header, *rows = (re.split(r"  +", line) for line in done.out.splitlines())
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_what_every_command_shows(pulsing: Pulsing, start: Callable[..., list[Node]]) -> None:
    nodes = start()
    seed = nodes[0].addr
    all_alive(pulsing, nodes)
    cluster = pulsing("inspect", "cluster", "--seeds", seed)
    assert "3 nodes (3 alive)" in cluster.out
    for node in nodes:
        assert re.search(rf"^[0-9a-f]{{32}}  {node.addr} +alive", cluster.out, re.MULTILINE), cluster.out

    names = pulsing("inspect", "actors", "--seeds", seed)
    assert "Actors of 3 nodes: 3 actors under 2 names" in names.out
    (two,) = (re.split(r"  +", line) for line in names.out.splitlines() if line.startswith("two"))
    assert (two[1], sorted(two[4].split(", "))) == ("2", sorted(node.addr for node in nodes[1:]))
    assert "PythonActorService" not in names.out
    assert "PythonActorService" in pulsing("inspect", "actors", "--seeds", seed, "--all-actors").out

    # Every call, stream and item of the nodes is counted, once, whether it stays on its node or not.
    before = figures(pulsing, seed)
    nodes[0].talk("one", calls=5, streams=2, items=3)
    nodes[1].talk("one", calls=7, streams=1, items=4)

    def grown() -> dict[str, tuple[int, ...]]:
        now = figures(pulsing, seed)
        keys = ("Actors", "Messages", "Streams", "Members")
        assert {row[keys[3]] for row in now.values()} == {"3 alive"}
        return {addr: tuple(int(row[key]) - int(before[addr][key]) for key in keys[:3]) for addr, row in now.items()}

    wanted = {nodes[0].addr: (0, 15, 3), nodes[1].addr: (0, 0, 0), nodes[2].addr: (0, 0, 0)}
    until("the counters to have it all", lambda: grown() == wanted)
    series = json.loads(pulsing("inspect", "metrics", "--seeds", seed, "--json").out)
    # At the reader's node, like calls at the caller's.
    assert [series[node.addr]["pulsing_stream_items_total"] for node in nodes] == [6.0, 4.0, 0.0]
    # Still exactly that after a while: nothing is counted twice, and looking counts for nothing.
    assert grown() == wanted
    raw = pulsing("inspect", "metrics", "--seeds", seed)
    assert raw.out.count("# TYPE pulsing_messages_total counter") == 3


def test_a_killed_and_a_stopped_node(pulsing: Pulsing, start: Callable[..., list[Node]]) -> None:
    nodes = start(names=("one", "two", "three", "four"))
    seed, killed, *stopped = (node.addr for node in nodes)
    all_alive(pulsing, nodes)
    watch = subprocess.Popen(
        [sys.executable, "-m", "pulsing.cli", "inspect", "watch", "--seeds", seed, "--kind=cluster", "--interval=0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watch.stdout is not None
        for _ in nodes:
            assert ": alive" in watch.stdout.readline()
        nodes[1].process.kill()
        nodes[1].process.wait()
        done = pulsing("inspect", "actors", "--seeds", seed)
        assert (done.code, done.out) == (1, "")
        assert "1 of 4 nodes does not answer" in done.err
        assert f"cannot connect to {killed}" in done.err
        # It takes two observers to say so, and the other two are about to be stopped.
        until("its death is known", lambda: states(pulsing, seed)[killed] == "down")
        for node in nodes[2:]:
            node.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        done = pulsing("inspect", "actors", "--seeds", seed, "--timeout", "1.5", "--best_effort", "False")
        # All nodes were asked at once: one after the other they would take 3 s.
        assert time.monotonic() - begun < 3.0
        assert (done.code, done.out) == (1, "")
        for addr in stopped:
            assert f"{addr} gave no answer within 1.5s" in done.err
        rest = pulsing("inspect", "metrics", "--seeds", seed, "--timeout", "0.3", "--best-effort", "--json")
        assert (rest.code, list(json.loads(rest.out))) == (1, [seed])
        assert all(addr in rest.err for addr in stopped)
        assert killed in rest.err
        # Watching goes on without those that are known to be down, and ends at those that hang.
        ended = pulsing("inspect", "watch", "--seeds", seed, "--timeout", "0.3", "--max_rounds", "2")
        assert ended.code == 1
        assert killed not in ended.err
        assert all(addr in ended.err for addr in stopped)
        # A seed that hangs costs a second when another one answers.
        begun = time.monotonic()
        assert "4 nodes" in pulsing("inspect", "cluster", "--seeds", f"{stopped[0]},{killed},{seed}").out
        assert time.monotonic() - begun < 3.0
        hung = pulsing("inspect", "actors", "--endpoint", stopped[0], "--timeout", "0.3")
        assert (hung.code, hung.out) == (2, "")

        gone = dict.fromkeys((killed, *stopped), "down")
        until("they are down", lambda: states(pulsing, seed) == {seed: "alive", **gone})
        assert "4 nodes (1 alive, 3 down)" in pulsing("inspect", "cluster", "--seeds", seed).out
        left = pulsing("inspect", "actors", "--seeds", seed, "--timeout=0.3", "--best_effort")
        assert left.code == 1
        assert "Actors of 1 node: 1 actor under 1 name" in left.out
        assert "3 nodes do not answer" in left.err
        for node in nodes[2:]:
            node.process.send_signal(signal.SIGCONT)
        until("they are back", lambda: all(states(pulsing, seed)[addr] == "alive" for addr in stopped))
        watch.send_signal(signal.SIGINT)
        changes, _ = watch.communicate(timeout=10)
        assert watch.returncode == 130
        assert re.search(rf"~ node {killed} \w+: \w+ -> down", changes), changes
        assert re.search(rf"~ node {stopped[0]} \w+: \w+ -> down", changes), changes
    finally:
        watch.kill()
        watch.communicate()
        for node in nodes[2:]:
            node.process.send_signal(signal.SIGCONT)


def test_a_cluster_with_a_secret(pulsing: Pulsing, start: Callable[..., list[Node]], tmp_path: pathlib.Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    nodes = start("correct horse")
    seed = nodes[0].addr
    all_alive(pulsing, nodes, "--passphrase-file", str(secret))
    commands = (
        (["cluster", "--seeds", seed], "3 nodes (3 alive)"),
        (["actors", "--seeds", seed], "3 actors under 2 names"),
        (["actors", "--endpoint", seed], "3 actors under 2 names"),
        (["metrics", "--seeds", seed, "--raw", "False"], nodes[2].addr),
        (["watch", "--seeds", seed, "--max_rounds", "1"], f"metrics {nodes[2].addr} members: 3 alive"),
    )
    for argv, words in commands:
        shown = pulsing("inspect", *argv, "--passphrase-file", str(secret))
        assert shown.code == 0, shown.err
        assert words in shown.out
        refused = pulsing("inspect", *argv)
        assert (refused.code, refused.out) == (2, "")
        assert "--passphrase-file" in refused.err
        assert "Is the node running" not in refused.err, "it is: it refused"
        assert "{" not in refused.err, "in its own words"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PULSING_PASSPHRASE", "correct horse")
        assert states(pulsing, seed)[seed] == "alive"
    for options in (["--passphrase_file", str(wrong)], ["--passphrase_file", str(secret), "--cluster", "other"]):
        refused = pulsing("inspect", "cluster", "--seeds", seed, *options)
        assert (refused.code, refused.out) == (2, "")
        assert "check the passphrase" in refused.err
        assert "Is the node running" not in refused.err
