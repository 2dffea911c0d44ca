"""What goes wrong, drilled: our Router in front of engines and of actors, and the peers where they can be driven.

    python benches/router_drills.py [--only DRILL,...] [--kinds NAME,...] [--no-peers] [--write FILE.md]

Each drill stands on its own: a fresh router, fresh Workers. `make drills-router` runs all but the long ones.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import router_drill_admission as admission
import router_drill_faults as faults
import router_drill_limits as limits
import router_house as house
import runtime_machine as machine
import runtime_venv as venv
from page import publish
from router_drill_report import page
from router_subjects import KINDS, Kind, Range

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Drill:
    """One line of the acceptance table.

    Attributes:
        key: Short name, also in the JSON.
        target: What is to be reached.
        run: Does it: where, of what kind, under which policy.
        every: Under every policy that the kind has; else under its last one.
        actors: Whether it says something of actor Workers.
        only: The one kind that it says something of; none: all.
    """

    key: str
    target: str
    run: Callable[[Range, Kind, str], Result]
    every: bool = False
    actors: bool = True
    only: str = ""


DRILLS = [
    Drill("kill_plain", "0 lost", faults.kill_plain),
    Drill("kill_streams", "0 not whole where they can be continued, none silent", faults.kill_streams),
    Drill("hang_closed", ">= 95 % of the rate from 2 s on", faults.hang_closed, every=True),
    Drill("hang_open", "<= 1 % lost", faults.hang_open, every=True),
    Drill("hang_open_streams", "<= 1 % lost", faults.hang_open_streams, every=True),
    Drill("poison", "0 good ones lost", faults.poison),
    Drill("restart", "< 1 s", faults.restart),
    Drill("all_down", "503, Retry-After, not ready", faults.all_down),
    Drill("leave", "<= 30 ms at every stage (median of 5)", limits.leave),
    Drill("large_body", "< 20 ms added", limits.large_body),
    Drill("prompts", "<= 64 MB", limits.prompts, actors=False),
    Drill("bits", "bit for bit", limits.bits, actors=False),
    Drill("manners", "all four", limits.manners, actors=False),
    Drill("refused", "<= 20 us, none reaches a Worker", admission.refused, only="Pulsing, engines"),
    Drill("fair", "<= 2 times (median of 40)", admission.fair, only="Pulsing, actors"),
    Drill("aborts", "in flight 0, descriptors given back, serves on", limits.aborts),
]

LONG = [Drill("million", "<= 10 %, in flight 0 at the end", limits.million)]


def policies(drill: Drill, kind: Kind) -> tuple[str, ...]:
    """Under which policies a drill is run."""
    if drill.key == "prompts":
        return ("cache_aware",) if kind.cache_aware else ()
    return kind.policies if drill.every else kind.policies[-1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"drills, of: {', '.join(drill.key for drill in DRILLS)}")
    parser.add_argument(
        "--kinds", default="", help=f"of: {'; '.join(kind.name for kind in KINDS)} (parted by semicolons)"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave out what comes from PyPI")
    parser.add_argument(
        "--python", type=pathlib.Path, help="interpreter that has Pulsing; else a release wheel is built"
    )
    parser.add_argument("--write", type=pathlib.Path, help="file for the page; the JSON goes beside it")
    parser.add_argument("--long", action="store_true", help="the long drills (a million requests), and no others")
    parser.add_argument("--log", type=pathlib.Path, help="file for what the processes say")
    parser.add_argument("--remark", default="", help="a sentence for the page, such as what else ran")
    parser.add_argument("--again", type=pathlib.Path, help="write the page of an earlier run's JSON")
    options = parser.parse_args()
    if options.again:
        run = json.loads(options.again.read_text())
        publish(page(run), run, options.write)
        return
    only = {word.strip() for word in options.only.split(",") if word.strip()}
    kinds = {word.strip() for word in options.kinds.split(";") if word.strip()}
    drills = LONG if options.long else DRILLS
    unknown = (only - {drill.key for drill in drills}) | (kinds - {kind.name for kind in KINDS})
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}")
    python = house.under_test(options.python)
    field = Range(python, house.mock_engine(), options.log)
    run: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": venv.run("git", "describe", "--always", "--dirty", cwd=venv.ROOT).strip(),
        "machine": machine.described(),
        "remark": options.remark,
        "versions": house.described(python, peers=not options.no_peers),
        "targets": {drill.key: [(drill.run.__doc__ or "").strip(), drill.target] for drill in drills},
        "results": [],
        "beside": beside(options.write),
    }
    for drill in drills:
        for kind in KINDS:
            if (only and drill.key not in only) or (kinds and kind.name not in kinds):
                continue
            if (options.no_peers and kind.who != "pulsing") or (kind.workers == "actors" and not drill.actors):
                continue
            if drill.only not in ("", kind.name):
                continue
            for policy in policies(drill, kind):
                began = time.monotonic()
                result = attempted(drill, field, kind, policy)
                run["results"].append({"drill": drill.key, "kind": kind.name, "policy": policy, **result})
                took = time.monotonic() - began
                print(f"{drill.key}, {kind.name}, {policy} ({took:.0f} s): {result}", file=sys.stderr, flush=True)
    publish(page(run), run, options.write)


def beside(path: pathlib.Path | None) -> dict[str, str]:
    """What an earlier page at `path` tells of runs that are no drills: each is told until somebody runs it again."""
    earlier = path.with_suffix(".json") if path else None
    told: dict[str, str] = json.loads(earlier.read_text()).get("beside", {}) if earlier and earlier.exists() else {}
    return told


def attempted(drill: Drill, field: Range, kind: Kind, policy: str) -> Result:
    """A drill's result; one that could not be run is a failed one that says why."""
    try:
        return drill.run(field, kind, policy)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a router made of it, the others have their turn
        return {"error": f"{type(error).__name__}: {error}"[:300], "kept": False}


if __name__ == "__main__":
    main()
