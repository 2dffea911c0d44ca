"""How calls are made: options on proxies, methods and references; R3, R5, and calls that may run twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from runtime_util import cluster, local_system, run

import pulsing as pul
from pulsing.core import ActorProxy, ActorRef
from pulsing.core._options import DEFAULT, Options
from pulsing.exceptions import (
    ConnectionLostError,
    MailboxFull,
    PulsingTimeoutError,
)
from pulsing.testing import Network, simulate


@pul.remote
class Subject:
    def __init__(self) -> None:
        self.begun = 0
        self.gate = asyncio.Event()

    async def sleep(self, seconds: float) -> int:
        self.begun += 1
        begun = self.begun
        await asyncio.sleep(seconds)
        return begun

    @pul.serial
    async def hold(self) -> None:
        self.begun += 1
        await self.gate.wait()

    async def take(self, stream: Any) -> None:
        async for _ in stream:
            pass

    async def receive(self, msg: Any) -> Any:
        await asyncio.sleep(msg)
        return msg


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"timeout": 0}, ValueError, "timeout=0: expected seconds above 0"),
        ({"timeout": -1.5}, ValueError, "timeout=-1.5"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"timeout": float("inf")}, ValueError, "None for ever"),
        ({"timeout": "5"}, TypeError, "timeout='5': expected seconds as a number"),
        ({"timeout": True}, TypeError, "timeout=True"),
        ({"no_wait": 1}, TypeError, "no_wait=1: expected True or False"),
        ({"idempotent": "yes"}, TypeError, "idempotent='yes'"),
    ],
)
def test_options_that_make_no_sense_are_refused_where_they_are_given(
    wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            for place in (one.options, one.sleep.options, one.ref.options):
                with pytest.raises(error, match=words):
                    place(**wrong)
            with pytest.raises(error, match=words):
                await one.ask(0, **wrong)
            with pytest.raises(error, match=words):
                await one.ref.ask(0, **wrong)
            with pytest.raises(TypeError, match="retries"):
                one.options(retries=3)

    run(main())


def test_options_add_up_and_reach_every_way_to_call() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            hasty = one.options(timeout=0.05)
            for call in (
                hasty.sleep(60),
                hasty.ask(60),
                hasty.options(no_wait=True).sleep(60),
                one.sleep.options(timeout=0.05)(60),
                one.sleep.options(timeout=0.05).options(idempotent=True)(60),
                one.ref.options(timeout=0.05).ask(60),
                one.ref.options(timeout=0.05).sleep(60),
                one.ref.ask(60, timeout=0.05),
                one.options(timeout=30).ask(60, timeout=0.05),
                hasty.as_any().sleep(60),
            ):
                with pytest.raises(PulsingTimeoutError):
                    await call
            # What is given later counts, and the proxy that it was given to stays as it was.
            assert await hasty.options(timeout=None).sleep(0.1)
            assert await one.sleep(0.1)

    run(main())


def test_r3_no_wait_counts_on_every_way_to_call() -> None:
    async def main() -> None:
        async with local_system() as system:
            ref = await system.spawn(Subject, mailbox=16)
            one = ref.as_any()
            calls = [asyncio.create_task(one.hold()) for _ in range(17)]
            await asyncio.sleep(0)
            for call in (
                one.options(no_wait=True).hold(),
                one.hold.options(no_wait=True)(),
                ref.options(no_wait=True).hold(),
                ref.ask(0, no_wait=True),
                one.options(no_wait=True).ask(0),
            ):
                with pytest.raises(MailboxFull):
                    await call
            for task in calls:
                task.cancel()
            await asyncio.wait(calls)

    run(main())


def test_options_change_and_show_what_they_are() -> None:
    assert repr(Options()) == "Options(timeout=the system's default, no_wait=False, idempotent=False)"
    changed = Options(2.0, True).changed(DEFAULT, None, True)
    assert repr(changed) == "Options(timeout=2.0, no_wait=True, idempotent=True)"
    assert changed.changed(None, False, None).timeout is None


# -- idempotent -------------------------------------------------------------------------------------------------------


@simulate(seeds=3)
async def test_r1_a_call_that_may_run_twice_is_sent_again_when_its_connection_breaks(net: Network) -> None:
    a = await net.system("a")
    b = await net.system("b", seeds=["a"])
    one = await Subject.spawn(system=b)
    cell = b.cell(one.actor_id)
    assert cell is not None
    far = ActorProxy(ActorRef(a, one.node_id, one.actor_id), options=Options(30.0))
    assert await far.sleep(0) == 1
    # Long enough for the connection to break, too short for the node to be given up.
    net.faults(break_after=1.0)
    outcomes = []
    for call in (far.sleep, far.sleep.options(idempotent=True)):
        begun = cell.instance.begun
        task = asyncio.create_task(call(0.1))
        await net.until(lambda begun=begun: cell.instance.begun > begun)
        net.partition({"a"}, {"b"})
        await net.sleep(1.5)
        net.heal()
        outcomes.append((await asyncio.gather(task, return_exceptions=True))[0])
        await net.sleep(5.0)
    assert isinstance(outcomes[0], ConnectionLostError)
    # The handler ran in vain once, and then once more.
    assert outcomes[1] == 4


@pytest.mark.parametrize("size", [1, 2])
def test_an_idempotent_call_takes_no_stream(size: int) -> None:
    async def main() -> None:
        async with cluster(size) as systems:
            one = await Subject.spawn(system=systems[0])
            far = ActorProxy(ActorRef(systems[-1], one.node_id, one.actor_id))

            async def items() -> AsyncIterator[int]:
                yield 1

            with pytest.raises(ValueError, match=r"idempotent call of .*take cannot carry a stream"):
                await far.take.options(idempotent=True)(items())

    run(main())
