"""From results to a page: medians with their spread, verdicts, and what went wrong in words."""

import re
import statistics
import textwrap
from typing import Any

from runtime_rows import BARS, ROWS, Bar, Metric, Row

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Contestant -> row -> what each repetition reported."""


def values(runs: Runs, who: str, row: str, metric: str) -> list[float]:
    """One figure of all repetitions that have it."""
    return [run[metric] for run in runs.get(who, {}).get(row, []) if metric in run]


def median(runs: Runs, who: str, row: str, metric: str) -> float | None:
    """Its median; None when no repetition has it."""
    found = values(runs, who, row, metric)
    return statistics.median(found) if found else None


def number(value: float, digits: int) -> str:
    """With thousands apart."""
    return f"{value:,.{digits}f}"


def cell(runs: Runs, who: str, row: str, metric: Metric) -> str:
    """Median and, in brackets, lowest and highest."""
    found = [value * metric.scale for value in values(runs, who, row, metric.key)]
    if not found:
        return "-"
    middle = number(statistics.median(found), metric.digits)
    if len(found) == 1:
        return middle
    return f"{middle} ({number(min(found), metric.digits)}..{number(max(found), metric.digits)})"


def failures(runs: Runs, who: str, row: str) -> dict[str, int]:
    """What went wrong in a row, and how often."""
    said: dict[str, int] = {}
    for run in runs.get(who, {}).get(row, []):
        # Ports and counts differ from run to run; what happened does not.
        text = run.get("error") or (run.get("note") if run.get("failed") else None)
        if text:
            text = re.sub(r"\d+\.\d+\.\d+\.\d+:\d+", "the peer", re.sub(r"\ball \d+ calls", "all calls", text))
            said[text] = said.get(text, 0) + 1
    return said


def table(runs: Runs, row: Row, names: list[str]) -> list[str]:
    """One row of the comparison as a table with a line for each contestant."""
    lines = [f"### {row.title[0].upper()}{row.title[1:]}", ""]
    titles = [metric.title for metric in row.metrics]
    lines += [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    notes = []
    for name in names:
        if row.key not in runs.get(name, {}):
            continue
        cells = [cell(runs, name, row.key, metric) for metric in row.metrics]
        if set(cells) == {"-"}:
            cells[0] = "did not work, see below"
        lines.append(f"| {name} | {' | '.join(cells)} |")
        times = len(runs[name][row.key])
        for text, count in failures(runs, name, row.key).items():
            notes.append(f"* {name}, {count} of {times} repetitions: {text.strip()}")
        for run in runs[name][row.key][-1:]:
            if "note" in run and not run.get("failed"):
                notes.append(f"* {name}: {run['note']}")
    return [*lines, "", *notes, *([""] if notes else [])]


def overview(runs: Runs, names: list[str]) -> list[str]:
    """The first figure of every row, side by side."""
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in ROWS:
        first = row.metrics[0]
        found = [median(runs, name, row.key, first.key) for name in names]
        cells = [
            number(value * first.scale, first.digits) if value is not None else "fails" if row.key in runs[name] else ""
            for name, value in zip(names, found, strict=True)
        ]
        if any(cells):
            lines.append(f"| {row.title}: {first.title} | {' | '.join(cells)} |")
    return lines


def verdict(runs: Runs, bar: Bar) -> tuple[str, str, str]:
    """The figure, what it is compared with, and whether the bar is met."""
    mine = median(runs, bar.who, bar.row, bar.metric)
    if mine is None:
        return "-", "-", "not measured"
    limit, shown = bar.limit, number(bar.limit, 2 if bar.limit < 10 else 0)
    if bar.against:
        others = [median(runs, who, row, bar.metric) for who, row in bar.against]
        found = [value for value in others if value is not None]
        if not found:
            return number(mine, 2), "-", "nothing to compare with"
        best = max(found) if bar.above else min(found)
        limit = bar.limit * best
        ratio = mine / best
        shown = f"{number(best, 1)}: ratio {ratio:.2f}"
    met = mine >= limit if bar.above else mine <= limit
    return number(mine, 2 if mine < 100 else 0), shown, "met" if met else "**not met**"


def by_cpu(runs: Runs, bar: Bar) -> str:
    """The same bar applied to CPU a call; a rate is what one core would do."""
    mine = median(runs, bar.who, bar.row, "cpu_us")
    if mine is None or bar.metric not in {"rate", "p50_us"}:
        return ""
    if not bar.against:
        figure = 1e6 / mine if bar.above else mine
        met = figure >= bar.limit if bar.above else figure <= bar.limit
        return f"{number(figure, 0 if bar.above else 1)}{'/s' if bar.above else ' us'}: {'met' if met else 'not met'}"
    found = [value for value in (median(runs, who, row, "cpu_us") for who, row in bar.against) if value is not None]
    if not found:
        return ""
    ratio = min(found) / mine if bar.above else mine / min(found)
    met = ratio >= bar.limit if bar.above else ratio <= bar.limit
    return f"ratio {ratio:.2f}: {'met' if met else 'not met'}"


def verdicts(runs: Runs) -> list[str]:
    """All bars."""
    lines = ["| bar | figure | limit, or what it is compared with | verdict | by CPU a call |", "|---|---|---|---|---|"]
    for bar in BARS:
        lines.append(f"| {bar.text} | {' | '.join(verdict(runs, bar))} | {by_cpu(runs, bar)} |")
    return lines


PLACES_NOTE = """Two processes that talk in turns share a core or have one each, as the kernel chose when they began,
and a message to another core of a virtual machine costs several times one within a core: rows without a placement
hold whichever of the two there was. Rows with one pin every thread of both processes."""

CPU_NOTE = """The last column holds the same bar against CPU a call, which other work on the machine hardly changes:
what one core would do, or the ratio of the costs. Where it contradicts the verdict, the machine was too busy for the
rate to be believed."""


def filled(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def page(run: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    runs: Runs = run["runs"]
    machine, names = run["machine"], list(run["versions"])
    lines = [
        "# What the runtime costs",
        "",
        filled(
            "Written by `make bench-runtime` (`benches/runtime.py`): Pulsing and its peers in one run on one machine. "
            "Repetitions are interleaved (every contestant once, then every one again), each in fresh processes. "
            f"A cell is the median of {run['repetitions']} repetitions of {run['seconds']:g} s, lowest and highest in "
            "brackets. *CPU us/call* is user and system time of all processes that take part, callers and callees, "
            "divided by the calls."
        ),
        "",
        filled(
            f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['memory']}, Linux "
            f"{machine['kernel']}, CPython {machine['python']}; all contestants share these cores. Load average before "
            f"the run: {machine['load']}; the hypervisor took {run['steal'] * 100:.1f} % of the time. {run['date']}, "
            f"commit {run['commit']}."
        ),
        "",
        *([filled(run["remark"]), ""] if run.get("remark") else []),
        "| contestant | what it is | versions |",
        "|---|---|---|",
    ]
    for name, known in run["versions"].items():
        shown = ", ".join(f"{package} {version}" for package, version in known["packages"].items())
        lines.append(f"| {name} | {known['what']} | {shown} |")
    lines += [
        "",
        "## Verdicts",
        "",
        CPU_NOTE,
        "",
        PLACES_NOTE,
        "",
        *verdicts(runs),
        "",
        "## In one table",
        "",
        *overview(runs, names),
        "",
    ]
    lines += ["## Figures", ""]
    for row in ROWS:
        if any(row.key in runs.get(name, {}) for name in names):
            lines += table(runs, row, names)
    endings = [
        f"* {name}, {count} of {run['repetitions']} repetitions: {text}"
        for name in names
        for text, count in failures(runs, name, "ending").items()
    ]
    if endings:
        lines += ["### How processes ended", "", *endings, ""]
    lines += [
        "## By part",
        "",
        "What one message costs by part, before and after: [runtime-profile.md](runtime-profile.md).",
        "",
    ]
    return "\n".join(lines)
