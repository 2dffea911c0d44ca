"""What the Router costs beside sglang-router and vllm-router, in one run on one machine.

    python benches/router.py [--quick] [--shapes KEY,...] [--connections 1,64] [--write docs/benchmarks/router.md]

Everything stands at once: a mock engine (Rust, two ports, so that policies have a choice), each router in front of it,
and, for actor Workers, one generator as a Worker and as an HTTP server. One round measures every path once, and so on:
what disturbs one disturbs all. Needs wrk; makes the environments of the peers (PyPI), the release wheel of this tree
and the mock engine by itself.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import router_house as house
import router_load as load
import router_report as report
import runtime_machine as machine
import runtime_meter as meter
import runtime_venv as venv
from page import publish

CONNECTIONS = [1, 16, 64, 256]
POLICIES = ["round_robin"]
# Where choosing costs most: peers keep the prompt, or hash it.
CACHE_AWARE = {("plain", 64), ("large", 64)}


# Which of the first two cores the router has, and which wrk and the engine.
PLACEMENTS = {"a core of its own": ({0}, {1}), "all on one core": ({0}, {0})}

Path = tuple[str, int, house.Process | None]
"""What is asked: name, port, and the router's process where there is one."""


@contextlib.contextmanager
def paths(python: pathlib.Path, peers: bool) -> Iterator[tuple[house.Process, list[Path]]]:
    """The mock engine, and everything that is asked."""
    ports = house.free_ports(3)
    engines, alone = ports[:2], ports[2]
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        engine = enter(house.engine(house.mock_engine(), engines))
        enter(house.python_engine(python, alone))
        fronts = [enter(house.ours(python, policy, engines)) for policy in POLICIES]
        if peers:
            for policy in ("round_robin", "cache_aware"):
                fronts += [enter(house.peer(name, policy, engines)) for name in house.PEERS]
        python_front = enter(house.ours(python, "stream_load", [alone], label=report.PYTHON_FRONT))
        worker = ["trivial_worker.TrivialWorker"]
        actor_front = enter(house.ours(python, "stream_load", [], worker, label=report.ACTOR_FRONT))
        found: list[Path] = [(report.DIRECT, engines[0], None)]
        found += [(front.name, front.port, front.process) for front in fronts]
        found.append((report.PYTHON_DIRECT, alone, None))
        found += [(front.name, front.port, front.process) for front in (python_front, actor_front)]
        yield engine, found


def rounds(
    found: list[Path],
    shapes: list[load.Shape],
    connections: list[int],
    seconds: float,
    times: int,
) -> list[dict[str, Any]]:
    """Rows: shape, connections, path, and what each round measured."""
    rows = []
    for shape in shapes:
        for count in connections:
            taking_part = [one for one in found if "cache_aware" not in one[0] or (shape.key, count) in CACHE_AWARE]
            runs: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in taking_part}
            for number in range(times):
                for name, port, router in taking_part:
                    if number == 0:
                        load.wrk(port, shape.body(), count, 1)
                    runs[name].append(load.measured(port, shape.body(), count, seconds, router))
            for name, measured in runs.items():
                rows.append({"shape": shape.key, "connections": count, "path": name, "runs": measured})
            print(f"{shape.title}, {count} connections: done", file=sys.stderr, flush=True)
    return rows


def pinned(engine: house.Process, found: list[Path], shapes: list[load.Shape], times: int) -> list[dict[str, Any]]:
    """Rows of the routers in front of the mock engine with every thread pinned: what the kernel chooses by itself, one
    of these for a while, decides how many tokens a router finds when it looks."""
    rows = []
    names = {report.OURS, *(f"{name} round_robin" for name in report.PEERS)}
    routers = [(name, port, router) for name, port, router in found if router is not None and name in names]
    for placement, (own, rest) in PLACEMENTS.items():
        for shape in shapes:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in routers}
            for _ in range(times):
                for name, port, router in routers:
                    places = dict.fromkeys(meter.family(router.pid), own) | {engine.pid: rest, os.getpid(): rest}
                    with meter.pinned(places):
                        runs[name].append(load.measured(port, shape.body(), 64, 1, router))
            for name, measured in runs.items():
                rows.append({"placement": placement, "shape": shape.key, "path": name, "runs": measured})
        print(f"{placement}: done", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="length of one measurement, whole seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="two short rounds at 1 and 64 connections, to try things out"
    )
    parser.add_argument("--shapes", default="", help=f"of: {', '.join(shape.key for shape in load.SHAPES)}")
    parser.add_argument("--connections", default="", help="numbers, parted by commas")
    parser.add_argument("--no-peers", action="store_true", help="leave out what comes from PyPI")
    parser.add_argument(
        "--python", type=pathlib.Path, help="interpreter that has Pulsing; else a release wheel is built"
    )
    parser.add_argument("--write", type=pathlib.Path, help="file for the page; the JSON goes beside it")
    parser.add_argument("--remark", default="", help="a sentence for the page, such as what else ran")
    parser.add_argument("--again", type=pathlib.Path, help="write the page of an earlier run's JSON")
    options = parser.parse_args()
    if options.again:
        run = json.loads(options.again.read_text())
        publish(report.page(run), run, options.write)
        return
    load.check()
    if options.quick:
        options.rounds, options.seconds = 2, 1
    connections = [int(word) for word in options.connections.split(",") if word]
    connections = connections or ([1, 64] if options.quick else CONNECTIONS)
    wanted = {word.strip() for word in options.shapes.split(",") if word.strip()}
    unknown = wanted - {shape.key for shape in load.SHAPES}
    if unknown:
        raise SystemExit(f"unknown shapes: {', '.join(sorted(unknown))}")
    python = house.under_test(options.python)
    run: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": venv.run("git", "describe", "--always", "--dirty", cwd=venv.ROOT).strip(),
        "machine": machine.described(),
        "seconds": options.seconds,
        "rounds": options.rounds,
        "remark": options.remark,
        "versions": house.described(python, peers=not options.no_peers),
    }
    before = machine.steal()
    with paths(python, not options.no_peers) as (engine, found):
        shapes = [shape for shape in load.SHAPES if not wanted or shape.key in wanted]
        run["rows"] = rounds(found, shapes, connections, options.seconds, options.rounds)
        run["pinned"] = pinned(engine, found, shapes, options.rounds)
    after = machine.steal()
    run["steal"] = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    publish(report.page(run), run, options.write)


if __name__ == "__main__":
    main()
