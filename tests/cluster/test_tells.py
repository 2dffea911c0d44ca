"""R2, R3: tells across nodes wait for room, in order, and none is dropped."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing.core._propagate import chosen
from pulsing.exceptions import ActorStoppedError, ConnectionLostError, MailboxFull, NodeNotFoundError

MAILBOX = 16
WINDOW = 256
KEPT = 1 + MAILBOX + WINDOW
"""What can be sent to an actor that does not get on: one is handled, a mailbox waits, a window is under way."""


class Gate(pul.Actor):
    """Handles a message for each permit."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)
        self.seen: list[Any] = []

    async def receive(self, msg: Any) -> int:
        self.seen.append(msg)
        await self.permits.acquire()
        return len(self.seen)


async def full(one: pul.ActorSystem, two: pul.ActorSystem) -> tuple[Gate, pul.ActorRef, asyncio.Task[None]]:
    """A gate on `one`, and a producer on `two` that cannot go on."""
    gate = Gate()
    await one.spawn(gate, name="gate", mailbox=MAILBOX, max_concurrency=1)
    far = (await two.resolve("gate", timeout=5)).ref
    sent = 0

    async def produce() -> None:
        nonlocal sent
        for n in range(3000):
            await far.tell(n)
            sent = n + 1

    task = asyncio.create_task(produce())
    await eventually("the producer is at its bound", lambda: sent == KEPT)
    assert not task.done()
    return gate, far, task


def test_r3_a_fast_teller_waits_and_all_arrive_in_order() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            gate, far, task = await full(one, two)
            # Another pair is not held up, and an ask keeps its place behind the tells.
            other = await one.spawn(Gate(), name="other")
            with pytest.raises(MailboxFull):
                await far.tell("no", no_wait=True)
            ask = asyncio.create_task(far.ask("ask", timeout=None))
            await (await two.resolve("other", timeout=5)).ref.tell("yes")
            instance = one.cell(other.actor_id)
            assert instance is not None
            await eventually("the other pair goes on", lambda: instance.instance.seen == ["yes"])
            for _ in range(4000):
                gate.permits.release()
            await task
            position = await ask
            await eventually("all is handled", lambda: len(gate.seen) == 3001)
            assert [n for n in gate.seen if n != "ask"] == list(range(3000))
            assert position > KEPT
            assert one.counts.dead_letters == two.counts.dead_letters == 0

    run(main())


@pytest.mark.parametrize("end", ["actor", "node", "sender"])
def test_r3_a_tell_that_waits_ends_with_its_actor_its_node_or_its_sender(end: str) -> None:
    ends: dict[str, Callable[[pul.ActorSystem], Coroutine[Any, Any, None]]] = {
        "actor": lambda one: one.kill("gate"),
        "node": lambda one: one.shutdown(0.0),
    }

    async def main() -> None:
        async with cluster(2) as (one, two):
            gate, far, task = await full(one, two)
            if end == "sender":
                task.cancel()
                for _ in range(KEPT + 1):
                    gate.permits.release()
                await eventually("what was sent is handled", lambda: len(gate.seen) == KEPT)
                await far.tell("next")
                await eventually("the next follows", lambda: gate.seen[-1] == "next")
                assert len(gate.seen) == KEPT + 1
            else:
                await ends[end](one)
                with pytest.raises((ActorStoppedError, ConnectionLostError, NodeNotFoundError)):
                    await task

    run(main())


def test_r3_a_local_tell_that_waits_ends_with_its_actor() -> None:
    async def main() -> None:
        async with cluster(1) as (one,):
            ref = await one.spawn(Gate(), mailbox=MAILBOX, max_concurrency=1)
            for n in range(1 + MAILBOX):
                await ref.tell(n)
            waits = asyncio.create_task(ref.tell("waits"))
            await asyncio.sleep(0)
            await one.kill(ref)
            with pytest.raises(ActorStoppedError):
                await waits

    run(main())


def test_r2_what_a_handler_sends_alone_and_in_a_burst_keeps_its_order() -> None:
    class Notes(pul.Actor):
        def __init__(self) -> None:
            self.seen: list[int] = []

        async def receive(self, msg: int) -> int:
            self.seen.append(msg)
            return msg

    async def main() -> None:
        async with cluster(2) as (one, two):
            notes = Notes()
            await one.spawn(notes, name="notes")
            far = (await two.resolve("notes", timeout=5)).ref
            sent = 0
            for burst in range(150):
                # The answer to an ask is a turn in which little happens: what comes next is written by the loop's
                # thread, the rest of a burst by the network's.
                assert await far.ask(sent) == sent
                sent += 1
                for _ in range(burst % 7):
                    await far.tell(sent)
                    sent += 1
            await eventually("all is handled", lambda: len(notes.seen) == sent)
            assert notes.seen == list(range(sent))

    run(main())


def test_r1_what_was_told_right_before_a_shutdown_arrives() -> None:
    async def main() -> None:
        async with cluster(1) as (one,):
            gate = Gate()
            await one.spawn(gate, name="gate")
            for _ in range(10_000):
                gate.permits.release()
            told = 0
            for burst in (1, 2, 20):
                two = await pul.actor_system("127.0.0.1:0", seeds=[one.addr])
                far = (await two.resolve("gate", timeout=5)).ref
                await far.ask(told)
                told += 1
                # No turn of the loop between the last of them and the shutdown.
                for _ in range(burst):
                    await far.tell(told)
                    told += 1
                await two.shutdown(0.0)
                expected = list(range(told))
                await eventually("all has arrived", lambda expected=expected: gate.seen == expected)

    run(main())


def test_r9_a_tell_that_fails_on_another_node_is_logged_with_the_line_that_sent_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frail(pul.Actor):
        async def receive(self, msg: Any) -> None:
            raise RuntimeError("nobody waits")

        async def relay(self, other: Any) -> None:
            await other.tell("from a handler")  # this line

    async def main() -> list[str]:
        async with cluster(2) as (one, two):
            await one.spawn(Frail(), name="frail")
            far = await two.resolve("frail", timeout=5)
            relay = (await two.spawn(Frail(), name="relay")).as_any()
            await far.tell("plain")  # this line
            await far.tell(pul.Message("kind", b"body"))  # this line
            token = color.set("red")
            await far.tell("with more")  # this line
            await far.tell(pul.Message("kind", b"with more"))  # this line
            color.reset(token)
            await relay.relay(far)
            await far.tell("no_such_method", 1)  # this line
            said = [
                f"frail.receive, told at {__file__}:{line} on the node at {two.addr}, failed" for line in lines[1:6]
            ]
            said += [f"frail.receive, told at {__file__}:{lines[0]} on the node at {two.addr}, failed"]
            said[-2] = f"frail cannot read a message, told at {__file__}:{lines[5]} on the node at {two.addr}"
            await eventually("all are logged", lambda: len(caplog.records) == len(said))
            return said

    color: contextvars.ContextVar[str] = contextvars.ContextVar("tests.cluster.test_tells.color")
    monkeypatch.setattr(chosen, "active", True)
    monkeypatch.setattr(chosen, "variables", {color.name: color})
    with open(__file__, encoding="utf-8") as source:
        lines = [n for n, line in enumerate(source, 1) if line.rstrip().endswith("# this line")]
    with caplog.at_level(logging.ERROR, "pulsing"):
        said = run(main())
    assert sorted(record.getMessage() for record in caplog.records) == sorted(said)
