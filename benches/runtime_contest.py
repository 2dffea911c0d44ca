"""Who takes part, and one run of one of them."""

import contextlib
import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import runtime_meter as meter

HERE = pathlib.Path(__file__).resolve().parent
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Contestant:
    """One program in one environment.

    Attributes:
        name: How the table calls it.
        python: Interpreter of its environment.
        script: Its program, beside this file.
        words: Further arguments of it.
        rows: What it does.
        env: Further variables.
    """

    name: str
    python: pathlib.Path
    script: str
    words: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        """Its command line."""
        return [str(self.python), str(HERE / self.script), *self.words, *words]

    def environment(self) -> dict[str, str]:
        """Its variables: none of this process that would lead it to other packages."""
        kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
        return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **self.env}


def once(contestant: Contestant, rows: list[str], seconds: float, limit: float) -> Results:
    """Runs a contestant's rows in fresh processes; what it did not report it says in words."""
    wanted = [row for row in rows if row in contestant.rows]
    results: Results = {}
    # A node at rest has no second process and has spawned nothing.
    for group in (["idle"] if "idle" in wanted else [], [row for row in wanted if row != "idle"]):
        if group:
            results |= _group(contestant, group, seconds, limit)
    return results


def _group(contestant: Contestant, rows: list[str], seconds: float, limit: float) -> Results:
    command = contestant.command("--rows", ",".join(rows), "--seconds", str(seconds))
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=contestant.environment(),
        start_new_session=True,
    )
    results, errors = _read(popen, time.monotonic() + limit)
    code: int | str
    try:
        code = popen.wait(0 if errors is None else 20)
    except subprocess.TimeoutExpired:
        code = "did not end"
        for pid in meter.family(popen.pid):
            _kill(pid)
        popen.wait()
    last = (errors or b"").decode(errors="replace").strip().splitlines()[-1:] or [""]
    how = _ending(code)
    for row in rows:
        if row not in results:
            results[row] = {"error": f"nothing reported; the process {how}: {last[0]}"[:300]}
    if code != 0:
        results["ending"] = {"error": f"{how} after its last row: {last[0]}"[:300]}
    return results


def _ending(code: int | str) -> str:
    if isinstance(code, int) and code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with {code}" if isinstance(code, int) else code


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _read(popen: "subprocess.Popen[bytes]", deadline: float) -> tuple[Results, bytes | None]:
    """Its rows and its stderr; None for stderr when the time was up."""
    assert popen.stdout is not None
    assert popen.stderr is not None
    pipes = {popen.stdout.fileno(): b"", popen.stderr.fileno(): b""}
    results: Results = {}
    out, open_pipes = popen.stdout.fileno(), set(pipes)
    while open_pipes:
        rest = deadline - time.monotonic()
        if rest <= 0:
            return results, None
        ready, _, _ = select.select(list(open_pipes), [], [], min(rest, 1.0))
        for pipe in ready:
            chunk = os.read(pipe, 65536)
            if not chunk:
                open_pipes.discard(pipe)
            pipes[pipe] = (pipes[pipe] + chunk)[-100_000:]
        *lines, pipes[out] = pipes[out].split(b"\n")
        for line in lines:
            if line.startswith(b'{"row"'):
                row = json.loads(line)
                results[row.pop("row")] = row
        # Its daemons may hold the pipes open after it.
        if popen.poll() is not None and not ready:
            break
    return results, pipes[popen.stderr.fileno()]


def ten_idle(contestant: Contestant, seconds: float) -> Results:
    """Ten nodes that do nothing: memory and CPU of each, as their median and extremes."""
    members: list[subprocess.Popen[str]] = []
    seed = "first"
    try:
        for _ in range(10):
            command = contestant.command("--member", seed)
            popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=contestant.environment()
            )
            members.append(popen)
            assert popen.stdout is not None
            words = popen.stdout.readline().split()
            if words[:1] != ["ready"]:
                return {"idle_ten": {"error": "a node did not start"}}
            seed = seed if seed != "first" else words[1]
        time.sleep(3)
        before, begin = [meter.ran(member.pid) for member in members], time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - begin
        shares = [(meter.ran(m.pid) - b) / elapsed * 100 for m, b in zip(members, before, strict=True)]
        sizes = [meter.rss_of(member.pid) for member in members]
        note = f"CPU {min(shares):.2f}..{max(shares):.2f} %, RSS {min(sizes):.1f}..{max(sizes):.1f} MB"
        mid = {"cpu_percent": statistics.median(shares), "rss_mb": statistics.median(sizes), "note": note}
        return {"idle_ten": mid}
    finally:
        for member in members:
            assert member.stdin is not None
            member.stdin.close()
        for member in members:
            try:
                member.wait(10)
            except subprocess.TimeoutExpired:
                member.kill()
                member.wait()
        sys.stderr.flush()
