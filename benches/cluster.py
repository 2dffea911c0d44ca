"""Clusters of real processes on this machine: who is taken for dead, how soon the dead are known, what that costs.

    python benches/cluster.py [--parts crowd,ten,events,idle,loaded,networks] [--json FILE] [--write FILE]

Nodes are processes of `tests/bounds/reporting_node.py`, which say what they see as they see it; `networks` puts ten of
them on hosts of their own (network namespaces; root, iproute2, nftables). Numbers of parts that a run leaves out stay
as `--json` has them. The exit code is 1 when anybody was taken for dead who was not.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import cluster_parts as parts
import runtime_machine as machine
import runtime_venv as venv
from cluster_report import section

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADING = "## On one machine"


def put_section(path: pathlib.Path, text: str) -> None:
    """Replaces the section of a document, which ends at the next heading of its level, or puts it at the end."""
    whole = path.read_text() if path.exists() else "# Clusters\n"
    before, found, rest = whole.partition(HEADING)
    after = rest[rest.find("\n## ") + 1 :] if found and "\n## " in rest else ""
    path.write_text(before.rstrip() + "\n\n" + text + ("\n" + after if after else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter with pulsing; default: this tree's release wheel")
    parser.add_argument("--parts", default="crowd,ten,events,idle,loaded,networks")
    parser.add_argument("--processes", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=10.0, help="of idle and loaded, each")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, default=venv.cache() / "cluster.json")
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    python = options.python or str(venv.ours())
    known: dict[str, Callable[[], Any]] = {
        "crowd": lambda: parts.crowd(options.processes, options.minutes),
        "ten": lambda: parts.idle(python, 10, min(1.0, options.minutes)),
        "events": lambda: parts.events(python, options.processes, options.repetitions),
        "idle": lambda: parts.idle(python, options.processes, options.minutes),
        "loaded": lambda: parts.idle(python, options.processes, options.minutes, load=2 * (os.cpu_count() or 1)),
        "networks": lambda: parts.networks(python, options.repetitions),
    }
    wanted = [part for part in options.parts.split(",") if part]
    if strange := set(wanted) - set(known):
        parser.error(f"--parts {','.join(sorted(strange))}: known are {','.join(known)}")
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for part in wanted:
        print(f"{part} ...", file=sys.stderr, flush=True)
        begun, load = time.monotonic(), os.getloadavg()[0]
        result = known[part]()
        results[part] = {**result, "took_s": time.monotonic() - begun, "load": [load, os.getloadavg()[0]]}
        results["machine"] = machine.described()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps({part: results[part]}), flush=True)
    text = section(HEADING, results)
    print(text)
    if options.write:
        put_section(options.write, text)
    false = {part: results[part]["false_deaths"] for part in wanted if results[part].get("false_deaths")}
    for part, deaths in false.items():
        print(f"FAILED: {part}: {deaths}")
    sys.exit(1 if false else 0)


if __name__ == "__main__":
    main()
