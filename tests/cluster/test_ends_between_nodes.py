"""Ends, watches and links between nodes: R4, R9."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from runtime_util import cluster, eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import ActorNotFoundError, ActorStoppedError, PulsingRuntimeError


@pul.remote(restart_policy="on_failure", max_restarts=0)
class Far:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def ping(self) -> str:
        return "pong"

    def crash(self) -> None:
        raise RuntimeError("crash")

    @pul.serial
    async def slow(self, n: int, seconds: float) -> int:
        self.log.append(n)
        await asyncio.sleep(seconds)
        return n


async def far_actor(there: pul.ActorSystem, here: pul.ActorSystem, name: str | None = None) -> pul.ActorProxy:
    """An actor on `there`, as `here` refers to it."""
    one = await Far.spawn(system=there, name=name)
    return Far.proxy(pul.ActorRef(here, one.node_id, one.actor_id))


def test_r9_a_watch_from_another_node_tells_why() -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            for how, reason, error in (
                ("stop", "stopped", ""),
                ("drain", "stopped", ""),
                ("kill", "killed", ""),
                ("crash", "failed", "RuntimeError: crash"),
            ):
                one = await far_actor(there, here)
                watch = pul.watch(one)
                assert await one.ping() == "pong"
                if how == "crash":
                    with pytest.raises(RuntimeError):
                        await one.crash()
                else:
                    await getattr(here, how)(one)
                for ended in (await asyncio.wait_for(watch, 5), await asyncio.wait_for(pul.watch(one), 5)):
                    assert (ended.reason, ended.error, ended.node_id) == (reason, error, there.node_id)
            never = pul.ActorRef(here, there.node_id, pul.ActorId.generate())
            assert (await asyncio.wait_for(pul.watch(never), 5)).reason == "not_found"
            one = await far_actor(there, here)
            watch = pul.watch(one)
            assert await one.ping() == "pong"
            await there.shutdown()
            assert (await asyncio.wait_for(watch, 5)).reason == "node_left"

    run(main())


def test_r4_actors_elsewhere_are_drained_stopped_and_killed_past_their_messages() -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            for how in ("drain", "stop", "kill"):
                one = await far_actor(there, here, "far")
                cell = there.cell(one.actor_id)
                assert cell is not None
                seconds = 0.05 if how == "drain" else 600
                asks = [asyncio.create_task(one.options(timeout=None).slow(n, seconds)) for n in range(3)]
                await eventually("two wait", lambda cell=cell: cell.mailbox.depth == 2)
                await here.resolve("far", timeout=5)
                end = {"drain": here.drain, "kill": here.kill, "stop": lambda which: here.stop(which, 0.01)}[how]
                await asyncio.wait_for(end("far"), 5)
                outcomes = await asyncio.gather(*asks, return_exceptions=True)
                if how == "drain":
                    assert outcomes == [0, 1, 2]
                else:
                    assert all(isinstance(outcome, ActorStoppedError) for outcome in outcomes)
                with pytest.raises(ActorNotFoundError):
                    await one.ping()
            await far_actor(there, here, "twice")
            await Far.spawn(system=here, name="twice")
            await here.stop("twice")  # its own
            await here.resolve("twice", timeout=5)

    run(main())


def test_a_name_with_several_instances_elsewhere_is_not_ended_by_guess() -> None:
    async def main() -> None:
        async with cluster(3) as (here, there, elsewhere):
            for system in (there, elsewhere):
                await Far.spawn(system=system, name="twice")

            async def both() -> bool:
                return len(await here.get_named_instances("twice")) == 2

            await eventually("both are known", both)
            with pytest.raises(PulsingRuntimeError, match="2 actors on other nodes serve as 'twice'"):
                await here.stop("twice")
            await here.stop(await here.resolve("twice", node_id=there.node_id))
            await eventually("one is left", lambda: there.local_actor_names() == [])
            assert elsewhere.local_actor_names() == ["twice"]

    run(main())


def test_r9_links_between_nodes() -> None:
    async def main() -> None:
        async with cluster(3) as (here, there, asker):
            for system in (here, there):
                await eventually("all know all", lambda system=system: len(system.core.members()) == 3)
            for killed in ("near", "far"):
                near = await Far.spawn(system=here)
                far = await far_actor(there, here)
                theirs = pul.ActorRef(asker, far.node_id, far.actor_id)
                await pul.link(theirs, pul.ActorRef(asker, near.node_id, near.actor_id))
                first, second = (near, far) if killed == "near" else (far, near)
                watch = pul.watch(second)
                await here.kill(first)
                ended = await asyncio.wait_for(watch, 5)
                assert ended.reason == "failed"
                assert "it was killed" in ended.error

    run(main())


NODE = """
import asyncio, sys
import pulsing as pul

@pul.remote
class Child:
    def ping(self):
        return "pong"

async def main():
    await pul.init("127.0.0.1:0", seeds=sys.argv[1:])
    await Child.spawn(name="child")
    await asyncio.Event().wait()

asyncio.run(main())
"""


def node(seed: str) -> subprocess.Popen[bytes]:
    """A node with a child, as a process."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(NODE), seed], env=os.environ.copy())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_r9_the_loss_of_a_node_ends_watches_and_linked_actors(how: signal.Signals) -> None:
    class Guardian(pul.Actor):
        def __init__(self) -> None:
            self.seen: list[pul.Ended] = []

        async def guard(self, one: Any) -> None:
            self.watch(one)

        def on_terminated(self, ended: pul.Ended) -> None:
            self.seen.append(ended)

    async def main() -> None:
        async with local_system() as system:
            process = node(system.addr)
            try:
                child = await system.resolve("child", timeout=30)
                assert await child.ping() == "pong"
                guardian = Guardian()
                await (await system.spawn(guardian)).as_any().guard(child)
                linked = await Far.spawn(system=system)
                await pul.link(linked, child)
                watch, fate = pul.watch(child), pul.watch(linked)
                process.send_signal(how)
                # M3: a crash is seen in 2 s, silence in 8.
                ended = await asyncio.wait_for(watch, 20)
                assert (ended.reason, ended.ref) == ("node_lost", child.ref)
                ended = await asyncio.wait_for(fate, 5)
                assert (ended.reason, "its node was lost" in ended.error) == ("failed", True)
                await eventually("the actor heard", lambda: [e.reason for e in guardian.seen] == ["node_lost"])
                assert (await asyncio.wait_for(pul.watch(child), 5)).reason == "node_lost"
            finally:
                process.kill()
                process.wait()

    run(main())


@pul.remote
class Busy:
    """Lives in a process of its own."""

    async def pid(self) -> int:
        return os.getpid()

    async def slow(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    def hold(self, seconds: int) -> None:
        # PyDLL, unlike CDLL, keeps the interpreter to itself.
        ctypes.PyDLL(None).sleep(seconds)


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_r4_an_actor_in_a_process_of_its_own_ends_like_any_other_and_takes_the_process_along() -> None:
    async def main() -> None:
        async with local_system() as system:
            for how, reason in (("drain", "stopped"), ("stop", "stopped"), ("kill", "killed")):
                one = await Busy.spawn(system=system, new_process=True)
                pid = await one.pid()
                watch = pul.watch(one)
                last = asyncio.create_task(one.slow(0.1))
                await asyncio.sleep(0.02)
                await asyncio.wait_for(getattr(system, how)(one), 20)
                assert not alive(pid)
                assert (await asyncio.wait_for(watch, 20)).reason == reason
                if how == "kill":
                    with pytest.raises(ActorStoppedError):
                        await last
                else:
                    assert await last == "done"

    run(main())


def test_r4_kill_ends_a_process_whose_interpreter_is_held() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Busy.spawn(system=system, new_process=True)
            linked = await Far.spawn(system=system)
            await pul.link(linked, one)
            watch, fate = pul.watch(one), pul.watch(linked)
            pid = await one.pid()
            held = asyncio.create_task(one.options(timeout=None).hold(600))
            await asyncio.sleep(0.1)
            await asyncio.wait_for(system.kill(one), 20)
            assert not alive(pid)
            assert (await asyncio.wait_for(watch, 20)).reason == "node_lost"
            assert (await asyncio.wait_for(fate, 5)).reason == "failed"
            with pytest.raises(pul.PulsingError):
                await held

    run(main())
