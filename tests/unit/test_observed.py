"""What observers read of mailboxes and restarts: `pulsing_mailbox_messages` and the event `restarted` (section 5)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from runtime_util import Run, cluster, eventually, restarts

import pulsing as pul
from pulsing import _core
from pulsing.core import ActorRef

PLACES = 16
ASKS = PLACES + 4
"""As many as have a place, and some that wait for one."""


class Gate(pul.Actor):
    """Handles one message at a time, each when the gate is open."""

    def __init__(self, watched: pul.ActorRef) -> None:
        self.watched = watched
        self.gate = asyncio.Event()
        self.begun = 0
        self.told = False

    def on_start(self) -> None:
        self.watch(self.watched)

    async def receive(self, msg: Any) -> Any:
        self.begun += 1
        await self.gate.wait()
        if msg == "crash":
            raise RuntimeError("crash")
        return msg

    async def on_terminated(self, ended: pul.Ended) -> None:
        self.told = True


class Idle(pul.Actor):
    """Is there to be watched."""

    async def receive(self, msg: Any) -> Any:
        return msg


def waiting(system: pul.ActorSystem) -> int:
    """What the node's gauge says once Python's part has been told; as many wait as the mailboxes hold."""
    system.flush_counts()
    gauge = system.core.metrics()["mailbox_messages"]
    assert gauge == sum(cell.mailbox.depth for cell in system.cells())
    return gauge


def asked(ask: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A call of which a test that fails meanwhile need not hear the end."""
    task = asyncio.create_task(ask)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def crowded(
    system: pul.ActorSystem, first: str = "first", timeout: float | None = None
) -> tuple[list[Gate], ActorRef, list[asyncio.Task[Any]]]:
    """An actor that handles one ask, behind which `ASKS` asks, and the end of an actor that it watches, wait; with its
    instances as they are made.
    """
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate(idle))
        return made[-1]

    idle = await system.spawn(Idle())
    ref = await system.spawn(
        make, mailbox=PLACES, max_concurrency=1, restart_policy="on_failure", min_backoff=0.001, max_backoff=0.002
    )
    running = asked(ref.ask(first))
    await eventually("the first one runs", lambda: made[0].begun == 1)
    assert waiting(system) == 0, "what runs does not wait"
    asks = [running, *(asked(ref.ask(n, timeout=timeout)) for n in range(ASKS))]
    await eventually("the others wait", lambda: waiting(system) == ASKS)
    await system.kill(idle)
    await eventually("so does the end of who is watched", lambda: waiting(system) == ASKS + 1)
    return made, ref, asks


ENDS: dict[str, Callable[[pul.ActorSystem, ActorRef], Any]] = {
    "stop": lambda system, ref: system.stop(ref, grace=0.0),
    "kill": lambda system, ref: system.kill(ref),
    "shutdown": lambda system, ref: system.shutdown(0.0),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_waits_is_counted_until_its_actor_ends(run: Run, how: str) -> None:
    async def main() -> None:
        async with cluster(1) as (system,):
            _, ref, asks = await crowded(system)
            ending = asyncio.create_task(ENDS[how](system, ref))
            await asyncio.gather(*asks, return_exceptions=True)
            await ending
            assert waiting(system) == 0

    run(main())


def test_what_waits_is_counted_until_its_actor_ends_by_an_end_that_is_cut_short(run: Run) -> None:
    async def main() -> None:
        async with cluster(1) as (system,):
            _, ref, asks = await crowded(system)
            before = asyncio.all_tasks()
            draining = asyncio.create_task(system.drain(ref))
            await eventually("it drains", lambda: len(asyncio.all_tasks() - before) > 1)
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            for ask in asks:
                ask.cancel()
            await eventually("its actor is gone", lambda: system.cell(ref.actor_id) is None)
            assert waiting(system) == 0

    run(main())


def test_what_waits_is_counted_until_it_begins(run: Run) -> None:
    async def main() -> None:
        async with cluster(1) as (system,):
            made, ref, asks = await crowded(system)
            made[0].gate.set()
            assert await asyncio.gather(*asks) == ["first", *range(ASKS)]
            assert made[0].told
            assert waiting(system) == 0
            for _ in range(3):
                await ref.tell("told")
            assert waiting(system) == 3, "no tell is handled before its sender goes on"
            await ref.ask("last")
            assert waiting(system) == 0

    run(main())


def test_what_waits_is_counted_until_its_caller_gives_up(run: Run) -> None:
    async def main() -> None:
        async with cluster(1) as (system,):
            _, ref, asks = await crowded(system, timeout=0.3)
            given_up = asks[3:6] + asks[-2:]
            for ask in given_up:
                ask.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
            assert waiting(system) == ASKS + 1 - len(given_up)
            # By their deadlines all others; not the end that the actor is to be told of.
            await asyncio.gather(*asks[1:], return_exceptions=True)
            assert waiting(system) == 1
            await system.kill(ref)
            await asyncio.gather(*asks, return_exceptions=True)
            assert waiting(system) == 0

    run(main())


def test_what_waits_is_counted_through_a_restart(run: Run) -> None:
    async def main() -> None:
        async with cluster(1) as (system,):
            made, ref, asks = await crowded(system, "crash")
            made[0].gate.set()
            with pytest.raises(RuntimeError, match="crash"):
                await asks[0]
            assert waiting(system) == ASKS + 1, "they wait for the new one"
            await eventually("which handles the first of them", lambda: len(made) == 2 and made[1].begun == 1)
            assert waiting(system) in {ASKS - 1, ASKS}, "whom it watches is gone: it may yet have to be told"
            await system.stop(ref, grace=0.0)
            await asyncio.gather(*asks, return_exceptions=True)
            assert waiting(system) == 0

    run(main())


def test_metrics_show_what_waits_and_that_it_no_longer_does(run: Run) -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):

            async def shown() -> int:
                found = await asyncio.to_thread(_core.observe_get, [here.addr], "/metrics")
                status, body, problem = found[0]
                assert status == 200, problem
                assert "# TYPE pulsing_mailbox_messages gauge\n" in body
                number = re.search(r"^pulsing_mailbox_messages\{node_id=\"\w+\"\} (-?\d+)$", body, re.MULTILINE)
                assert number, body
                return int(number.group(1))

            async def shows(count: int) -> None:
                async def shows() -> bool:
                    return await shown() == count

                await eventually(f"/metrics shows {count}", shows)

            _, ref, asks = await crowded(here)
            await shows(ASKS + 1)
            far = ActorRef(there, ref.node_id, ref.actor_id)
            asks += [asked(far.ask(n)) for n in range(3)]
            await shows(ASKS + 4)
            await here.kill(ref)
            await asyncio.gather(*asks, return_exceptions=True)
            await shows(0)

    run(main())


@pul.remote(restart_policy="always", min_backoff=0.001, max_backoff=0.002)
class Frail:
    """Fails, or ends itself, when told to; makes its second instance only at the second try."""

    made = 0

    def __init__(self) -> None:
        Frail.made += 1
        if Frail.made == 2:
            raise RuntimeError("not yet")

    def crash(self) -> None:
        raise RuntimeError("secret")

    def leave(self) -> None:
        raise SystemExit(0)

    def ping(self) -> None:
        """Answers."""


def test_r9_each_restart_is_an_event_and_is_counted(run: Run) -> None:
    async def main() -> None:
        Frail.made = 0
        async with cluster(1) as (system,), restarts(system) as told:
            frail = await Frail.spawn(system=system, name="frail")
            with pytest.raises(RuntimeError):
                await frail.crash()
            await frail.ping()
            with pytest.raises(pul.exceptions.ActorStoppedError):
                await frail.leave()
            await frail.ping()
            events = [await told.get() for _ in range(3)]
            assert [event["reason"] for event in events] == ["failed", "failed", "stopped"]
            for event in events:
                assert event["actor_id"] == str(frail.actor_id)
                assert (event["name"], event["class"], event["public"]) == ("frail", f"{__name__}.Frail", True)
                assert "secret" not in str(event), "what it failed with is the log's to tell"
            assert told.empty()
            assert system.core.metrics()["actors_restarted"] == 3

    run(main())
