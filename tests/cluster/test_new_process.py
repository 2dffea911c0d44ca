"""Actors in processes of their own: that they behave as others do, and that none is ever left behind."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from runtime_util import cluster, eventually, local_system, restarts, run

import pulsing as pul
from pulsing.exceptions import (
    ActorStoppedError,
    ConnectionLostError,
    NameNotFoundError,
    NameTakenError,
    ProcessDiedError,
    PulsingTimeoutError,
)
from pulsing.testing import Network, simulate


def exists(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not reaped counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def runs(pid: int) -> bool:
    """Whether a process that is not ours to reap still runs."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return exists(pid) if sys.platform != "linux" else False


@pul.remote
class Own:
    def __init__(self, how: str = "", told: Any = None) -> None:
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise KeyError("on purpose")
        self.told = told

    def pid(self) -> int:
        return os.getpid()

    def where(self) -> tuple[str, list[str], str | None]:
        return os.getcwd(), sys.path, os.environ.get("PULSING_TEST_WORD")

    def seen_by_others(self) -> str:
        line = pathlib.Path("/proc/self/cmdline").read_text() + pathlib.Path("/proc/self/environ").read_text()
        return line if sys.platform == "linux" else ""

    def itself(self) -> str:
        return str(pul.get_system().node_id)

    def leave(self, code: int) -> None:
        os._exit(code)

    def end(self) -> None:
        raise SystemExit

    def stall(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    async def numbers(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    async def call(self, other: Any) -> int:
        return int(await other.pid())


async def gone(pid: int, limit: float = 1.0) -> None:
    """The process ends and is reaped in time."""
    await eventually(f"process {pid} is gone", lambda: not exists(pid), limit)


def test_it_is_an_actor_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSING_TEST_WORD", "word")

    async def main() -> None:
        async with local_system() as system:
            own = await Own.spawn(system=system, name="own", new_process=True, told={"a": [1]})
            pid = await own.pid()
            assert pid != os.getpid()
            assert await own.where() == (os.getcwd(), sys.path, "word")
            assert await own.as_any().told == {"a": [1]}
            assert [n async for n in own.numbers(100)] == list(range(100))
            assert await own.itself() == str(own.node_id)
            # It calls back, and is found by name.
            here = await Own.spawn(system=system)
            assert await own.call(here) == os.getpid()
            assert (await system.resolve("own", timeout=5)).ref == own.ref
            with pytest.raises(PulsingTimeoutError):
                await own.sleep.options(timeout=0.05)(60)
            with pytest.raises(NameTakenError, match="'own'"):
                await Own.spawn(system=system, name="own", new_process=True)
            with pytest.raises(NameTakenError, match="'own'"):
                await Own.spawn(system=system, name="own")
            await system.stop("own")
            assert not exists(pid)
            await Own.spawn(system=system, name="own")

    run(main())


def test_factories_and_classes_that_exist_here_only_go_there() -> None:
    class Local:
        def pid(self) -> int:
            return os.getpid()

    async def main() -> None:
        async with local_system() as system:
            one = await system.spawn(lambda: Local(), new_process=True)  # noqa: PLW0108 - a factory, not the class
            two = await pul.remote(Local).spawn(system=system, new_process=True)
            assert len({await one.as_any().pid(), await two.pid(), os.getpid()}) == 3

    run(main())


@pytest.mark.parametrize(("how", "code", "number"), [("exit", 7, None), ("kill", None, 9)])
def test_r8_a_process_that_dies_before_its_actor_is_ready(how: str, code: int | None, number: int | None) -> None:
    """Complaint #5: os._exit in a constructor is an error of the spawn."""

    async def main() -> None:
        async with local_system() as system:
            with pytest.raises(ProcessDiedError, match=r"actor own ended (with exit code 7|killed by SIGKILL)") as died:
                await Own.spawn(how, system=system, name="own", new_process=True)
            assert (died.value.exit_code, died.value.signal) == (code, number)
            with pytest.raises(KeyError, match="on purpose"):
                await Own.spawn("raise", system=system, name="own", new_process=True)
            # The name is free, the processes are gone.
            assert children() == []
            await Own.spawn(system=system, name="own", new_process=True)

    run(main())


def children() -> list[int]:
    """Children of this process, the dead ones that nobody reaped included."""
    if sys.platform != "linux":
        return []
    found = pathlib.Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split()]


def test_killed_without_a_policy_it_is_gone_and_its_calls_fail() -> None:
    async def main() -> None:
        async with local_system() as system:
            own = await Own.spawn(system=system, name="own", new_process=True)
            pid = await own.pid()
            asks = [asyncio.create_task(own.sleep(60)) for _ in range(10)]
            await own.pid()
            os.kill(pid, signal.SIGKILL)
            for outcome in await asyncio.gather(*asks, return_exceptions=True):
                assert isinstance(outcome, ConnectionLostError)
            await gone(pid)
            await eventually("its name is free", lambda: system.processes.find("own") is None)

            async def forgotten() -> bool:
                return await system.get_named_instances("own") == []

            await eventually("the cluster forgets it", forgotten)

    run(main())


def test_r9_a_policy_starts_a_dead_process_again_under_its_name() -> None:
    async def main() -> None:
        async with local_system() as system, restarts(system) as told:
            ref = await system.spawn(
                Own, name="own", new_process=True, restart_policy="on_failure", max_restarts=2, min_backoff=0.01
            )
            own = ref.as_type(Own)
            pids = [await own.pid()]
            for how in ("signal", "exit"):
                ask = asyncio.create_task(own.sleep(60))
                await own.pid()
                if how == "signal":
                    os.kill(pids[-1], signal.SIGKILL)
                else:
                    with pytest.raises(ConnectionLostError):
                        await own.leave(0)
                with pytest.raises(ConnectionLostError):
                    await ask
                own = await another(system, own)
                pids.append(await own.pid())
                event = await told.get()
                assert (event["name"], event["class"], event["reason"]) == ("own", f"{__name__}.Own", "node_lost")
                assert event["actor_id"] == str(own.actor_id)
            assert len(set(pids)) == 3
            assert system.core.metrics()["actors_restarted"] == 2
            os.kill(pids[-1], signal.SIGKILL)
            await eventually("its budget is spent", lambda: system.processes.find("own") is None)
            assert children() == []

    run(main())


async def another(system: pul.ActorSystem, before: pul.ActorProxy) -> pul.ActorProxy:
    """The actor that took the place of `before`, which is no longer found."""

    async def again() -> bool:
        found = await system.get_named_instances("own")
        return [one["node_id"] for one in found] not in ([], [str(before.node_id)])

    await eventually("it is there again, and only once", again, 20)
    return await Own.resolve("own", system=system)


def test_a_restart_policy_needs_a_name() -> None:
    async def main() -> None:
        async with local_system() as system:
            with pytest.raises(ValueError, match="needs a name"):
                await system.spawn(Own, restart_policy="always", new_process=True)

    run(main())


def test_stopped_it_is_gone_even_when_it_does_not_listen() -> None:
    async def main() -> None:
        async with local_system() as system:
            own = await Own.spawn(system=system, name="own", new_process=True)
            pid = await own.pid()
            ask = asyncio.create_task(own.sleep(0.2))
            await own.pid()
            await system.stop("own")
            assert await ask == "slept"
            assert not exists(pid)
            # One that stalls its loop is killed.
            own = await Own.spawn(system=system, new_process=True)
            pid = await own.pid()
            ask = asyncio.create_task(own.stall(60))
            await asyncio.sleep(0)
            await system.kill(own)
            assert not exists(pid)
            with pytest.raises(ConnectionLostError):
                await ask
            # One that ends itself takes its process along.
            own = await Own.spawn(system=system, name="own", new_process=True)
            pid = await own.pid()
            with pytest.raises(ActorStoppedError):
                await own.end()
            await gone(pid)
            await eventually("its name is free", lambda: system.processes.find("own") is None)

    run(main())


def test_private_names_and_cancelled_starts() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            own = await Own.spawn(system=one, name="hidden", public=False, new_process=True)
            assert (await one.resolve("hidden")).ref == own.ref
            with pytest.raises(NameNotFoundError):
                await two.resolve("hidden")
            await one.stop(own)
            starting = asyncio.create_task(Own.spawn(system=one, name="own", new_process=True))
            await eventually("the process runs", lambda: len(children()) == 1)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert children() == []
            assert one.processes.find("own") is None

    run(main())


def test_a_start_that_takes_too_long_is_an_error() -> None:
    async def main() -> None:
        async with local_system(process_start_timeout=0.001) as system:
            with pytest.raises(PulsingTimeoutError, match=r"within 0.001 s.*process_start_timeout"):
                await Own.spawn(system=system, new_process=True)
            assert children() == []

    run(main())


@simulate()
async def test_a_network_in_memory_has_no_other_processes(net: Network) -> None:
    system = await net.system("a")
    with pytest.raises(pul.PulsingRuntimeError, match="network in memory"):
        await Own.spawn(system=system, new_process=True)


def test_other_nodes_start_processes_too_and_take_no_other_actors() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            own = await Own.spawn(system=one, name="own", placement=two.node_id, new_process=True)
            assert two.processes.find("own") is not None
            assert own.node_id not in (one.node_id, two.node_id)
            assert await own.pid() != os.getpid()
            # Its node is no place for others, whether chosen or named.
            nodes = {(await Own.spawn(system=one, placement="remote")).node_id for _ in range(4)}
            assert nodes == {two.node_id}
            with pytest.raises(ValueError, match="own process of actor own"):
                await Own.spawn(system=one, placement=own.node_id)

    run(main())


def test_a_secret_goes_along_and_is_seen_by_nobody() -> None:
    async def main() -> None:
        async with local_system(passphrase="correct horse") as system:
            own = await Own.spawn(system=system, new_process=True)
            assert "horse" not in await own.seen_by_others()

    run(main())


def test_twenty_at_once() -> None:
    async def main() -> None:
        async with local_system() as system:
            owns = await asyncio.gather(
                *(Own.spawn(system=system, name=f"own-{n}", new_process=True) for n in range(20))
            )
            pids = await asyncio.gather(*(own.pid() for own in owns))
            assert len(set(pids)) == 20
        assert children() == []

    run(main())


PROGRAM = """
import asyncio, os, sys
import pulsing as pul
from pulsing.core.helpers import wait_for_signal

@pul.remote
class Own:
    def pid(self):
        return os.getpid()
    def outlive_by_kernel(self):
        import ctypes
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    async def sleep(self, seconds):
        print("sleeping", flush=True)
        await asyncio.sleep(seconds)
        return "slept"

async def main(how):
    system = await pul.init("127.0.0.1:0")
    own = await Own.spawn(name="own", new_process=True)
    if how == "pipe":
        await own.outlive_by_kernel()
    print(await own.pid(), flush=True)
    if how == "return":
        return
    ask = asyncio.create_task(own.sleep(0.5 if how == "drain" else 60))
    await wait_for_signal()
    print(await ask, await own.sleep(0), flush=True)
    await pul.shutdown()

if sys.argv[1] == "abandon":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main("return"))
else:
    asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def program(tmp_path: pathlib.Path, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program with such an actor, in a process group of its own, and the actor's process."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen(
        [sys.executable, str(file), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # On a busy machine the watchdog tells how long the imports of the actor take; nothing else may be said.
        env={**os.environ, "PULSING_WATCHDOG": "0"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, int(line)
    finally:
        process.kill()
        process.communicate()


def ended(pid: int, limit: float = 1.0) -> None:
    """It no longer runs, in time."""
    deadline = time.monotonic() + limit
    while runs(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {limit} s"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["kernel", "pipe"])
def test_no_orphan_when_the_parent_is_killed(tmp_path: pathlib.Path, how: str) -> None:
    with program(tmp_path, how) as (parent, pid):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "sleeping\n"
        assert runs(pid)
        parent.kill()
        parent.wait()
        ended(pid)


@pytest.mark.parametrize("how", ["return", "abandon"])
def test_no_orphan_when_the_parent_just_ends(tmp_path: pathlib.Path, how: str) -> None:
    with program(tmp_path, how) as (parent, pid):
        _, errors = parent.communicate(timeout=20)
        assert (parent.returncode, errors) == (0, "")
        ended(pid)


def test_ctrl_c_reaches_the_parent_only_which_drains(tmp_path: pathlib.Path) -> None:
    with program(tmp_path, "drain") as (parent, pid):
        assert parent.stdout is not None
        # What the actor's process prints comes out here as well.
        assert parent.stdout.readline() == "sleeping\n"
        os.killpg(parent.pid, signal.SIGINT)
        out, errors = parent.communicate(timeout=20)
        assert (parent.returncode, errors) == (0, "")
        # Calls made after it are still served.
        assert out.split() == ["sleeping", "slept", "slept"]
        ended(pid)
