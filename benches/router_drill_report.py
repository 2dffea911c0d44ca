"""From the results of `router_drills.py` to a page."""

from typing import Any

Result = dict[str, Any]


def told(result: Result) -> str:
    """A result in a few words."""
    if "error" in result:
        return str(result["error"]).replace("|", "/")
    how = result.get("how")
    ends = f" ({', '.join(f'{count} {word}' for word, count in how.items())})" if isinstance(how, dict) and how else ""
    match result["drill"]:
        case "kill_plain" | "kill_streams" | "poison":
            silent = f", {result['silent']} of them silently" if result.get("silent") else ""
            return f"{result['lost']} of {result['of']} lost{silent}{ends}"
        case "hang_closed":
            return f"{result['share']:.0%} ({result['before']:.0f}/s before, {result['after']:.0f}/s after)"
        case "hang_open" | "hang_open_streams":
            return f"{result['share']:.1%} lost, {result['after_2s']} of them sent after the first 2 s"
        case "restart":
            return f"{result['seconds']:.1f} s{ends}"
        case "all_down":
            leak = ", names a worker's address" if result["names_a_worker"] else ""
            return f"{result['status']}, Retry-After {result['retry_after']}{leak}; readiness {result['ready']}"
        case "leave":
            stages = ", ".join(f"{stage} {sorted(times)[2] * 1e3:.0f}" for stage, times in result["stages"].items())
            return f"ms: {stages}"
        case "large_body":
            return f"{result['added_ms']:.0f} ms ({result['cpu_ms']:.0f} ms CPU)"
        case "prompts":
            return f"{result['growth_mb']:+.0f} MB after {result['prompts']:,}, peak {result['peak_mb']:.0f} MB"
        case "million":
            first, last = result["memory"][0], result["memory"][-1]
            return f"{first[1]:.0f} MB after {first[0]:,.0f}, {last[1]:.0f} MB after {last[0]:,.0f}"
        case "bits":
            if result.get("same_bytes"):
                return "the same bytes"
            said = [f"{what} {', '.join(result[what])}" for what in ("dropped", "added", "changed") if result.get(what)]
            return f"status {result['status']}; " + ("; ".join(said) or str(result.get("how") or "written anew"))
        case "manners":
            failed = [what for what, passed in result["passed"].items() if not passed]
            return f"not: {', '.join(failed)}" if failed else "all four"
        case "refused":
            return f"{result['cpu_us']:.0f} us of CPU, {result['requests']:,.0f} refused, {result['served']} served"
        case "fair":
            alone, beside = result["alone_ms"], result["beside_ms"]
            return (
                f"{result['share']:.1f} times ({alone:.0f} ms alone, {beside:.0f} ms beside {result['flood']:,} of A)"
            )
        case "aborts":
            mine = "" if result["in_flight"] is None else f"{result['in_flight']} in flight, "
            serves = "serves on" if result["serves"] else "does not serve"
            return f"{mine}{result['running']} running in Workers, {result['descriptors']:+d} descriptors, {serves}"
    return str(result)


def page(run: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    host = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        "# What the Router does when things go wrong",
        "",
        f"`make drills-router` wrote this page on {run['date']} (commit {run['commit']}; JSON beside it).",
        f"{host['processor']}, {host['cores']} cores, Linux {host['kernel']}; load average {host['load']}.",
        f"{versions}. Two Workers a drill, defaults but for the policy; clients, routers and Workers share the cores.",
        "",
    ]
    if run["remark"]:
        lines += [run["remark"], ""]
    for drill, (what, target) in run["targets"].items():
        results = [result for result in run["results"] if result["drill"] == drill]
        if not results:
            continue
        lines += [f"## {what}", "", f"Target: {target}.", "", "| | policy | | |", "|---|---|---|---|"]
        for result in results:
            verdict = "kept" if result["kept"] else "**missed**"
            lines.append(f"| {result['kind']} | {result['policy']} | {told(result)} | {verdict} |")
        lines.append("")
    for what, found in run.get("beside", {}).items():
        lines += [f"## {what}", "", found, ""]
    return "\n".join(lines).rstrip() + "\n"
