"""The section that `cluster.py` writes."""

from typing import Any

from cluster_parts import spread

Results = dict[str, Any]

EVENTS = [
    ("name_seen_s", "an actor starts: its name is seen everywhere", ""),
    ("name_gone_s", "an actor stops: its name is gone everywhere", "< 1 s"),
    ("kill_first_s", "`kill -9` of a node: the first knows", ""),
    ("kill_all_s", "all know", "< 2 s"),
    ("kill_name_gone_s", "its name is gone everywhere", "< 2 s"),
    ("leave_all_s", "a node leaves: all know", "< 1 s"),
    ("leave_name_gone_s", "its name is gone everywhere", "< 1 s"),
    ("join_s", "a node starts: it has joined and has all names", "< 2 s"),
    ("join_whole_s", "from the start of its interpreter until all see it and its name", ""),
    ("same_address_whole_s", "`kill -9` and a start at the same address: the same", ""),
    ("pause_whole_s", "SIGSTOP for 10 s: all see all again after SIGCONT", ""),
]

BUSY = ", two processes a core that compute"

NETWORKS = [
    ("silent_first_s", "a host falls silent: the first knows", ""),
    ("silent_all_s", "all know", "< 8 s"),
    ("silent_name_gone_s", "its name is gone everywhere", ""),
    ("heal_whole_s", "it is back: all see all and their names, nobody restarted", ""),
    ("halves_all_s", "two halves of five: all have given up the others", ""),
    ("halves_whole_s", "the halves are one again", ""),
    ("kill_all_s", "`kill -9` of a node: all know", "< 2 s"),
]


def took(part: Results) -> str:
    return f"load average {part['load'][0]:.1f} before, {part['load'][1]:.1f} after"


def times(seconds: list[float]) -> str:
    """In the unit that suits them."""
    if max(seconds, default=1.0) < 0.2:
        return spread([one * 1e3 for one in seconds], "ms", 0)
    return spread(seconds)


def table(rows: list[tuple[str, str, str]], part: Results) -> list[str]:
    lines = ["| what | median (lowest..highest) | promise |", "|---|---:|---|"]
    return lines + [f"| {what} | {times(part[key])} | {promise} |" for key, what, promise in rows if key in part]


def unrest(part: Results) -> str:
    refuted = f", refuted within {times(part['refuted_s'])}" if part["refuted_s"] else ""
    return f"{part['suspicions']}{refuted}"


def rested(name: str, part: Results) -> str:
    """A row of nodes that did nothing."""
    cells = [
        name,
        str(len(part["false_deaths"])),
        unrest(part),
        spread(part["cpu_percent"], "%"),
        spread(part["rss_mb"], "MB", 1),
        spread([one / 1e3 for one in part["bytes_out"]], "kB/s", 1),
        f"{part['load'][0]:.1f}, then {part['load'][1]:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def section(heading: str, results: Results) -> str:
    """All parts that were measured, as Markdown."""
    lines = [heading, ""]
    if here := results.get("machine"):
        lines += [
            f"`make bench-cluster` (`benches/cluster.py`): release wheel, CPython {here['python']}, {here['cores']} "
            f"shared virtual cores ({here['processor']}), {here['memory']},",
            f"Linux {here['kernel']}. Observers and all nodes share these cores; other work beside them shows in the "
            "load averages.",
            "Times are as the nodes report them, up to 20 ms late.",
            "",
        ]
    rest = [
        (f"{part['processes']} processes, {part['minutes']:g} min" + extra, part)
        for name, extra in (
            ("ten", ""),
            ("idle", ""),
            ("loaded", BUSY),
        )
        if (part := results.get(name))
    ]
    if rest:
        lines += ["### Nodes that do nothing", ""]
        lines += [
            "| preset `local` | false deaths | suspicions | CPU a node, of a core | RSS a node | sent a node "
            "| load average |"
        ]
        lines += ["|---|---:|---|---|---|---|---|", *(rested(name, part) for name, part in rest), ""]
    if part := results.get("crowd"):
        measured = [(extra, part[name]) for name, extra in (("idle", ""), ("loaded", BUSY)) if name in part]
        lines += [f"{measured[0][1]['nodes']} nodes in one process (`cluster_crowd`, no Python), {took(part)}:", ""]
        lines += ["| | false deaths | suspicions | CPU a node, of a core | RSS, all | sent a node |"]
        lines += ["|---|---:|---|---:|---:|---:|"]
        lines += [
            f"| {one['seconds'] / 60:g} min{extra} | {one['deaths']} | {unrest(one)} | {one['cpu_percent']:.2f} % "
            f"| {one['rss_mb']:.0f} MB | {one['bytes_out'] / 1e3:.1f} kB/s |"
            for extra, one in measured
        ]
        lines += [""]
    if part := results.get("events"):
        lines += [f"### What happens to {part['processes']} processes", ""]
        lines += [f"{part['repetitions']} repetitions; {took(part)}; preset `local`.", "", *table(EVENTS, part), ""]
        lines += [
            f"Deaths that the stopped node declared: {sum(part['pause_declared'])}. "
            f"Others taken for dead who were not: {len(part['false_deaths'])}.",
            "",
        ]
    if part := results.get("networks"):
        lines += ["### Ten hosts whose network fails", ""]
        lines += [
            f"Network namespaces on a bridge, a secret (TLS), preset `lan`; {part['repetitions']} repetitions; "
            f"{took(part)}.",
            "",
            *table(NETWORKS, part),
            "",
            "| packets lost between all hosts, 60 s each | false deaths | suspicions |",
            "|---|---:|---|",
        ]
        lines += [f"| {share} | {len(one['false_deaths'])} | {unrest(one)} |" for share, one in part["weather"].items()]
        lines += [
            "",
            "Packets are dropped by nftables at the bridge, each by chance. The kernel of this machine has no netem:",
            "delay and reordering are left to the simulator.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"
