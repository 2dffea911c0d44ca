"""Nodes that come back on their addresses: one after the other under load, and after a kill (M4, R10).

What a caller does: it resolves the name, asks, and where the error says that nothing was done it resolves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from runtime_util import eventually, run

import pulsing as pul

ACTOR = """
import asyncio, os
import pulsing as pul

@pul.remote
class Echo:
    async def echo(self, value):
        await asyncio.sleep(0.005)
        return value, os.getpid()
    async def slowly(self, value):
        await asyncio.sleep(0.7)
        return value
"""
NODES = 4
CLIENTS = 8


@dataclasses.dataclass
class Nodes:
    """Nodes on fixed ports, each with all of them as its seeds."""

    folder: pathlib.Path
    ports: list[int]
    running: dict[int, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)
    all: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    @property
    def seeds(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def start(self, at: int) -> subprocess.Popen[bytes]:
        with (self.folder / f"{at}.log").open("ab") as log:
            self.running[at] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pulsing.cli", "actor", "rolling_actor.Echo", "--name", "echo"),
                    *("--addr", f"127.0.0.1:{self.ports[at]}", "--seeds", ",".join(self.seeds)),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path])},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.all.append(self.running[at])
        return self.running[at]

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))


def free_ports(count: int) -> list[int]:
    import socket

    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


async def ask(system: pul.ActorSystem, value: int, seen: Counter[str]) -> int:
    """One call of a user; the process that answered."""
    while True:
        proxy = await system.resolve("echo", timeout=10)
        try:
            answer, pid = await proxy.options(timeout=20).echo(value)
        except pul.PulsingError as error:
            seen[f"resolved again after {type(error).__name__}"] += 1
            if not error.retry_safe:
                raise
        else:
            assert answer == value
            seen["answered"] += 1
            return int(pid)


@contextlib.contextmanager
def nodes_in(folder: pathlib.Path) -> Iterator[Nodes]:
    """Their processes end with the test; what they logged goes with its failure."""
    (folder / "rolling_actor.py").write_text(ACTOR)
    nodes = Nodes(folder, free_ports(NODES))
    try:
        yield nodes
    except BaseException as error:
        error.add_note(nodes.logs())
        raise
    finally:
        for process in nodes.all:
            process.kill()
            process.wait()


def test_m4_a_rolling_restart_under_load_fails_no_call(tmp_path: pathlib.Path) -> None:
    async def main(nodes: Nodes) -> None:
        for at in range(NODES):
            nodes.start(at)
        system = await pul.actor_system("127.0.0.1:0", seeds=nodes.seeds, join_timeout=30)
        seen: Counter[str] = Counter()
        pids: Counter[int] = Counter()
        failed: list[pul.PulsingError] = []
        over = False

        async def instances() -> dict[str, str]:
            return {one["addr"]: one["node_id"] for one in await system.get_named_instances("echo")}

        async def all_serve() -> bool:
            return len(await instances()) == NODES

        async def client(number: int) -> None:
            while not over:
                number += 1
                try:
                    pids[await ask(system, number, seen)] += 1
                except pul.PulsingError as error:
                    failed.append(error)

        try:
            await eventually("all nodes serve", all_serve, 30)
            load = [asyncio.create_task(client(at)) for at in range(CLIENTS)]
            for at in range(NODES):
                before = await instances()
                addr = nodes.seeds[at]
                slow = (await system.resolve("echo", node_id=before[addr])).slowly(at)
                begun = asyncio.create_task(slow)
                await asyncio.sleep(0)
                count = seen["answered"]
                await eventually("the load goes on", lambda count=count: seen["answered"] > count + CLIENTS)
                old = nodes.running[at]
                old.send_signal(signal.SIGTERM)
                # Its successor wants the port while it still drains.
                new = nodes.start(at)
                assert await begun == at, "what had begun is finished"
                assert await asyncio.to_thread(old.wait, 30) == 0

                async def replaced(before: dict[str, str] = before, addr: str = addr) -> bool:
                    found = await instances()
                    return len(found) == NODES and found[addr] != before[addr]

                await eventually(f"{addr} serves again", replaced, 30)
                await eventually("the new one answers", lambda new=new: pids[new.pid] > 0)
                assert not failed, seen
            over = True
            await asyncio.gather(*load)
            assert not failed, seen
            states = Counter(member["state"] for member in await system.members())
            assert states["alive"] == NODES + 1, states
            assert states["down"] == states["suspect"] == 0, states
            assert seen["answered"] > 20 * NODES, seen
        finally:
            over = True
            await system.shutdown(0.0)

    with nodes_in(tmp_path) as nodes:
        run(main(nodes))
        for process in nodes.running.values():
            process.send_signal(signal.SIGTERM)
        assert [process.wait(30) for process in nodes.running.values()] == [0] * NODES


def test_m4_a_killed_node_that_comes_back_replaces_its_former_self(tmp_path: pathlib.Path) -> None:
    async def main(nodes: Nodes) -> None:
        for at in range(NODES):
            nodes.start(at)
        system = await pul.actor_system("127.0.0.1:0", seeds=nodes.seeds, join_timeout=30)

        async def instances() -> dict[str, str]:
            return {one["addr"]: one["node_id"] for one in await system.get_named_instances("echo")}

        async def all_serve() -> bool:
            return len(await instances()) == NODES

        try:
            await eventually("all nodes serve", all_serve, 30)
            before = await instances()
            victim = nodes.running[0]
            victim.kill()
            victim.wait()
            new = nodes.start(0)
            here = nodes.seeds[0]

            async def joined() -> bool:
                return any(one["addr"] == here and one["node_id"] != before[here] for one in await system.members())

            await eventually("its successor has joined", joined, 30)
            # From here on nobody is sent to the dead one.
            assert (await instances()).get(here) != before[here]

            async def answers() -> bool:
                return (await instances()).get(here) not in {None, before[here]}

            await eventually("and serves under its name", answers, 10)
            proxy = await system.resolve("echo", node_id=(await instances())[here], timeout=5)
            assert await proxy.echo("x") == ("x", new.pid)
            alive = [one["addr"] for one in await system.members() if one["state"] == "alive"]
            assert sorted(alive) == sorted([*nodes.seeds, system.addr])
        finally:
            await system.shutdown(0.0)

    with nodes_in(tmp_path) as nodes:
        run(main(nodes))
