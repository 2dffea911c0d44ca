"""What `profile_runtime.py` profiles: one kind of call over and over, on any version of the runtime since 0.2.0.

``--nodes two-processes``: the callee in a process of its own. ``--nodes one-process``: both nodes in this process, with
real sockets between them, so that one count has both sides.
"""

import asyncio
import json
import os
import pathlib
import time
from typing import Any

import runtime_meter as meter

import pulsing as pul


@pul.remote
class Echo:
    """What is asked."""

    def echo(self, value: Any) -> Any:
        """Answers with its argument."""
        return value

    async def echo_async(self, value: Any) -> Any:
        """The same, as a coroutine."""
        return value


async def serve() -> None:
    """The callee's process."""
    system = await pul.actor_system("127.0.0.1:0")
    await Echo.spawn(system=system, name="echo")
    meter.ready(system.addr)
    await meter.until_stdin_closes()
    await system.shutdown()


def switches(pids: list[int]) -> int:
    """Context switches of all threads so far."""
    total = 0
    for pid in pids:
        for status in pathlib.Path(f"/proc/{pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[1])
    return total


async def main(options: Any) -> None:
    """Calls for `--calls`, or for `--seconds` after a second's rest, and says what they took."""
    child, callee = None, None
    system = await pul.actor_system("127.0.0.1:0")
    if options.kind.startswith("local"):
        actor = await Echo.spawn(system=system)
    else:
        if options.nodes == "two-processes":
            child = meter.Child(__file__, "--serve", "--loop", options.loop)
            seed = child.addr
        else:
            callee = await pul.actor_system("127.0.0.1:0")
            await Echo.spawn(system=callee, name="echo")
            seed = callee.addr
        await system.shutdown()
        system = await pul.actor_system("127.0.0.1:0", seeds=[seed])
        actor = await Echo.resolve("echo", system=system, timeout=30)
    method = actor.echo_async if options.kind.endswith("async") else actor.echo
    for _ in range(200):
        await method(meter.SMALL)
    # The profiler sleeps until the start is over.
    await asyncio.sleep(0.0 if options.calls else 1.5)
    timer = meter.Meter(options.seconds, [child.pid] if child else [])
    pids = meter.family(os.getpid())
    begin, cpu, before, count = time.monotonic(), timer.cpu(), switches(pids), 0
    while count < options.calls or (not options.calls and time.monotonic() - begin < options.seconds):
        for _ in range(100):
            await method(meter.SMALL)
        count += 100
    took = time.monotonic() - begin
    figures = {
        "calls": count,
        "us": took / count * 1e6,
        "cpu_us": (timer.cpu() - cpu) / count * 1e6,
        "switches": (switches(pids) - before) / count,
    }
    print(json.dumps(figures), flush=True)
    await system.shutdown()
    if callee is not None:
        await callee.shutdown()
    if child is not None:
        child.stop()


if __name__ == "__main__":
    chosen = meter.options(kind="local", calls=0, nodes="two-processes")
    meter.run(serve() if chosen.serve else main(chosen), chosen.loop)
