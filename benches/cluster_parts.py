"""What `cluster.py` measures, part by part."""

import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import runtime_meter as meter
import runtime_venv as venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "bounds"))

from fleet import Fleet, Node, networked  # noqa: E402 - its folder is no package

Result = dict[str, Any]
PAUSE = 10.0


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in load:
            one.kill()
            one.wait()


def unrest(fleet: Fleet, since: float) -> Result:
    """Suspicions since then, and how they ended."""
    suspicions = fleet.suspicions(since)
    return {
        "suspicions": len(suspicions),
        "refuted_s": [took for state, took in suspicions if state == "alive" and took is not None],
        "false_deaths": fleet.deaths(since),
    }


def idle(python: str, processes: int, minutes: float, load: int = 0) -> Result:
    """Nodes that do nothing, beside `load` processes that compute: unrest, CPU, memory and bytes of a node."""
    with Fleet(python) as fleet:
        begun = time.monotonic()
        fleet.start(processes)
        formed = time.monotonic() - begun
        with busy(load):
            # What joining left to do is no part of it.
            time.sleep(5)
            before = [(meter.cpu_of(node.process.pid), node.ask("metrics")["bytes_out"]) for node in fleet.nodes]
            begun = time.monotonic()
            while time.monotonic() < begun + minutes * 60:
                time.sleep(1)
                for node in fleet.nodes:
                    if node.process.poll() is not None:
                        raise SystemExit(f"{node.name} ended with {node.process.returncode}: {''.join(node.said)}")
            took = time.monotonic() - begun
            spent = [meter.cpu_of(node.process.pid) - cpu for node, (cpu, _) in zip(fleet.nodes, before, strict=True)]
            sent = [node.ask("metrics")["bytes_out"] - old for node, (_, old) in zip(fleet.nodes, before, strict=True)]
        return {
            "processes": processes,
            "minutes": minutes,
            "load_processes": load,
            "formed_s": formed,
            "cpu_percent": [one / took * 100 for one in spent],
            "rss_mb": [meter.rss_of(node.process.pid) for node in fleet.nodes],
            "bytes_out": [one / took for one in sent],
            **unrest(fleet, begun),
        }


def replaced(fleet: Fleet, node: Node, addr: str = "127.0.0.1:0") -> tuple[Node, float]:
    """Ends a node's bookkeeping, starts another under its name, and returns it and the time until all was whole."""
    others = [other for other in fleet.nodes if other is not node]
    node.close()
    fleet.nodes.remove(node)
    begun = time.monotonic()
    fresh = fleet.add(node.name, addr=addr, seeds=[others[0].addr])
    fresh.wait_ready()
    fleet.wait_whole(60.0)
    return fresh, time.monotonic() - begun


def events(python: str, processes: int, repetitions: int) -> Result:
    """Names that come and go, and nodes that are killed, leave, restart or are stopped for a while."""
    dice = random.Random(5)
    found: dict[str, list[Any]] = {}
    false: list[str] = []

    def note(what: str, value: Any) -> None:
        found.setdefault(what, []).append(value)
        print(f"  {what}: {value}", file=sys.stderr, flush=True)

    with Fleet(python) as fleet:
        fleet.start(processes)
        for _ in range(repetitions):
            *others, node = dice.sample(fleet.nodes, len(fleet.nodes))
            begun = time.monotonic()
            node.ask("spawn", name="passing")
            note("name_seen_s", fleet.wait_named("passing", 1, begun, fleet.nodes, 30.0)[-1])
            begun = time.monotonic()
            node.ask("stop", name="passing")
            note("name_gone_s", fleet.wait_named("passing", 0, begun, fleet.nodes, 30.0)[-1])

            begun = time.monotonic()
            node.kill()
            note("kill_first_s", (seen := fleet.wait_seen(node, ["down"], begun, others, 60.0))[0])
            note("kill_all_s", seen[-1])
            note("kill_name_gone_s", fleet.wait_named(node.name, 0, begun, others, 30.0)[-1])
            false += fleet.deaths(begun, others)
            node, took = replaced(fleet, node)
            note("join_s", node.joined)
            note("join_whole_s", took)

            begun = time.monotonic()
            node.ask("leave")
            note("leave_all_s", fleet.wait_seen(node, ["left", "down"], begun, others, 60.0)[-1])
            note("leave_name_gone_s", fleet.wait_named(node.name, 0, begun, others, 30.0)[-1])
            false += fleet.deaths(begun, others)
            node, _ = replaced(fleet, node)

            begun = time.monotonic()
            node.kill()
            _, took = replaced(fleet, node, node.addr)
            note("same_address_whole_s", took)
            false += fleet.deaths(begun, others)

            stopped = dice.choice(others[1:])
            begun = time.monotonic()
            stopped.signal(signal.SIGSTOP)
            time.sleep(PAUSE)
            stopped.signal(signal.SIGCONT)
            resumed = time.monotonic()
            fleet.wait_whole(60.0)
            note("pause_whole_s", time.monotonic() - resumed)
            time.sleep(2)
            note("pause_declared", len([one for one in fleet.deaths(begun) if one.startswith(stopped.name + " ")]))
            false += fleet.deaths(begun, [other for other in fleet.nodes if other is not stopped])
    return {"processes": processes, "repetitions": repetitions, "false_deaths": false, **found}


def networks(python: str, repetitions: int) -> Result:
    """Ten hosts with a secret: silent loss and its healing, halves, kill, leave, and packets lost."""
    found: dict[str, list[Any]] = {}
    false: list[str] = []
    dice = random.Random(5)

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)
        print(f"  {what}: {value}", file=sys.stderr, flush=True)

    with networked(10, python=python) as (network, fleet):
        for _ in range(repetitions):
            host = dice.randrange(2, 10)
            lost = fleet.nodes[host]
            rest = [node for node in fleet.nodes if node is not lost]
            begun = time.monotonic()
            network.part([host])
            seen = fleet.wait_seen(lost, ["down"], begun, rest, 60.0)
            note("silent_first_s", seen[0])
            note("silent_all_s", seen[-1])
            note("silent_name_gone_s", fleet.wait_named(lost.name, 0, begun, rest, 30.0)[-1])
            network.heal()
            note("heal_whole_s", fleet.wait_whole(120.0))

            halves = fleet.nodes[:5], fleet.nodes[5:]
            begun = time.monotonic()
            network.part(range(5))
            ends = [
                fleet.wait_seen(other, ["down"], begun, half, 60.0)[-1]
                for half, others in (halves, halves[::-1])
                for other in others
            ]
            note("halves_all_s", max(ends))
            network.heal()
            note("halves_whole_s", fleet.wait_whole(120.0))

            begun = time.monotonic()
            lost.kill()
            note("kill_all_s", fleet.wait_seen(lost, ["down"], begun, rest, 60.0)[-1])
            false += fleet.deaths(begun, rest)
            lost.close()
            fleet.nodes.remove(lost)
            fresh = fleet.add(lost.name, network.inside(host), addr=network.addr(host), seeds=[network.addr(0)])
            fresh.wait_ready()
            fleet.wait_whole(60.0)
            fleet.nodes.sort(key=lambda node: int(node.name[1:]))
        weather: dict[str, Result] = {}
        for share in (0.1, 0.2, 0.3):
            begun = time.monotonic()
            network.lose(share)
            time.sleep(60)
            network.heal()
            fleet.wait_whole(60.0)
            weather[f"{share:.0%}"] = unrest(fleet, begun)
            false += weather[f"{share:.0%}"]["false_deaths"]
    return {"repetitions": repetitions, "false_deaths": false, "weather": weather, **found}


def crowd(nodes: int, minutes: float) -> Result:
    """Nodes in one process, by the runtime's own example: idle, then beside processes that compute."""
    cargo = ["cargo", "build", "--release", "-q", "-p", "pulsing-core", "--example", "cluster_crowd"]
    venv.run(*cargo, cwd=ROOT)
    target = json.loads(venv.run("cargo", "metadata", "--format-version", "1", "--no-deps", cwd=ROOT))
    program = pathlib.Path(target["target_directory"]) / "release" / "examples" / "cluster_crowd"

    def measured(load: int) -> Result:
        with busy(load):
            words = [str(program), "--nodes", str(nodes), "--seconds", str(int(minutes * 60))]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
        return dict(json.loads(done.stdout))

    result = {"idle": measured(0), "loaded": measured(2 * (os.cpu_count() or 1))}
    return {**result, "false_deaths": sum(one["deaths"] for one in result.values())}


def spread(values: list[float], unit: str = "s", digits: int = 2) -> str:
    """Median, lowest and highest."""
    if not values:
        return "none"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f}) {unit}".rstrip()
