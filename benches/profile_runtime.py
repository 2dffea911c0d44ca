"""Cost of one message, before and after: CPU by part from perf, instructions from callgrind.

    python benches/profile_runtime.py [--before 71a4ae5] [--write docs/benchmarks/runtime-profile.md]

Both sides are release wheels that this script builds. perf samples the CPU clock of both processes (virtual machines
have no counters of instructions); callgrind counts the instructions of one process with both nodes in it: the
difference of a long and a short run, so that the start does not count. Needs perf (linux-perf) and valgrind.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import runtime_machine as machine
import runtime_report as report
import runtime_venv as venv

HERE = pathlib.Path(__file__).resolve().parent
KINDS = {
    "local": "local ask, plain method",
    "local_async": "local ask, coroutine method",
    "remote": "ask between two processes, plain method",
    "remote_async": "ask between two processes, coroutine method",
}
# Parts of the cost, by the object file that samples fall into.
PARTS = (
    ("Rust (`_core`)", r"_core\.abi3"),
    ("kernel", r"\[kernel|\[unknown\]|vmlinux"),
    ("uvloop, asyncio in C", r"uvloop|loop\.cpython|_asyncio"),
    ("pickle in C", r"_pickle"),
    ("interpreter", r"libpython|python3"),
    ("libc", r"libc\.|libc-|libpthread|ld-linux|\[vdso\]|vdso"),
)


@dataclass(frozen=True)
class Side:
    """One version of the runtime."""

    title: str
    python: pathlib.Path


@dataclass
class Cost:
    """What one message of one kind costs on one side."""

    figures: dict[str, float]
    parts: dict[str, float]
    symbols: list[tuple[float, str]]
    instructions: float


def load(side: Side, kind: str, *words: str) -> list[str]:
    """Command line of the load."""
    return [str(side.python), str(HERE / "profile_load.py"), "--kind", kind, *words]


def run(command: list[str]) -> str:
    """Its stdout; without this process's packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return venv.run(*command, env={**env, "PYTHONHASHSEED": "0"})


def part_of(dso: str) -> str:
    """Which of `PARTS` an object file belongs to."""
    return next((name for name, pattern in PARTS if re.search(pattern, dso)), "other")


def sampled(side: Side, kind: str, seconds: float, place: pathlib.Path) -> tuple[dict[str, float], Any, Any]:
    """Figures of the load, its CPU by part, and its most expensive functions, in microseconds a message."""
    data = place / "perf.data"
    # Without the profiler first: sampling costs some time itself.
    figures: dict[str, float] = json.loads(run(load(side, kind, "--seconds", str(seconds))))
    record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-D", "1500", "-o", str(data), "--"]
    run([*record, *load(side, kind, "--seconds", str(seconds))])
    listing = ["perf", "report", "-i", str(data), "--stdio", "--no-children", "-F", "overhead,dso,symbol", "-t", "|"]
    parts: dict[str, float] = {}
    symbols: list[tuple[float, str]] = []
    for line in run(listing).splitlines():
        found = re.match(r"\s*([\d.]+)%?\s*\|([^|]*)\|(.*)", line)
        if found:
            share = float(found[1]) / 100 * figures["cpu_us"]
            part = part_of(found[2].strip())
            parts[part] = parts.get(part, 0.0) + share
            symbols.append((share, f"`{found[3].strip().removeprefix('[.] ').removeprefix('[k] ')[:70]}` ({part})"))
    return figures, parts, sorted(symbols, reverse=True)[:10]


def instructions(side: Side, kind: str, calls: int, place: pathlib.Path) -> float:
    """Instructions a message, user space, both sides."""
    counts = []
    for times in (1, 3):
        out = place / f"callgrind.{times}"
        tool = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}"]
        run([*tool, *load(side, kind, "--nodes", "one-process", "--loop", "asyncio", "--calls", str(calls * times))])
        total = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
        if total is None:
            raise SystemExit(f"callgrind wrote no total into {out}")
        counts.append(int(total[1]))
    return (counts[1] - counts[0]) / (2 * calls)


def table(title: str, costs: dict[str, Cost]) -> list[str]:
    """One kind of message."""
    sides = list(costs)
    lines = [f"## {title[0].upper()}{title[1:]}", "", f"| a message | {' | '.join(sides)} |", "|---" * 3 + "|"]

    def row(name: str, cells: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    row("CPU us, all threads", [f"{cost.figures['cpu_us']:.1f}" for cost in costs.values()])
    for part in [*(name for name, _ in PARTS), "other"]:
        if any(cost.parts.get(part, 0) >= 0.05 for cost in costs.values()):
            row(f"- {part}", [f"{cost.parts.get(part, 0):.1f}" for cost in costs.values()])
    row("elapsed us, sequential", [f"{cost.figures['us']:.1f}" for cost in costs.values()])
    row("context switches", [f"{cost.figures['switches']:.2f}" for cost in costs.values()])
    row("instructions (callgrind)", [f"{cost.instructions:,.0f}" for cost in costs.values()])
    lines += ["", "The ten most expensive functions, us a message:", "", f"| {' | '.join(sides)} |", "|---" * 2 + "|"]
    for pair in zip(*(cost.symbols for cost in costs.values()), strict=False):
        lines.append("| " + " | ".join(f"{share:.2f} {name}" for share, name in pair) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="71a4ae5", help="commit to compare with")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is profiled")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--calls", type=int, default=1500, help="messages of the short callgrind run")
    parser.add_argument("--write", type=pathlib.Path, help="file for the page")
    options = parser.parse_args()
    for tool, package in (("perf", "linux-perf"), ("valgrind", "valgrind")):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing: apt-get install {package}")
    now = venv.run("git", "describe", "--always", "--dirty", cwd=venv.ROOT).strip()
    sides = [Side(options.before, venv.at_commit(options.before)), Side(now, venv.ours())]
    known = machine.described()
    lines = [
        "# What a message costs, by part",
        "",
        report.filled(
            "Written by `make profile-runtime` (`benches/profile_runtime.py`). perf samples the CPU of both processes, "
            "under uvloop, calls one after the other. Instructions are counted by callgrind in one process with both "
            "nodes in it, under asyncio, user space only. Profiled builds are release wheels."
        ),
        "",
        report.filled(
            f"Machine: {known['cores']} cores of {known['processor']}, Linux {known['kernel']}, CPython "
            f"{known['python']}; load average before the run {known['load']}."
        ),
        "",
    ]
    for kind in options.kinds.split(","):
        costs = {}
        for side in sides:
            with tempfile.TemporaryDirectory() as place:
                figures, parts, symbols = sampled(side, kind, options.seconds, pathlib.Path(place))
                count = instructions(side, kind, options.calls, pathlib.Path(place))
            costs[side.title] = Cost(figures, parts, symbols, count)
            print(f"{kind} {side.title}: {figures['cpu_us']:.1f} us, {count:,.0f} instructions", file=sys.stderr)
        lines += table(KINDS[kind], costs)
    text = "\n".join(lines)
    if options.write:
        options.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
