"""Messages that nobody takes are counted, and the count is there for observers: R1, R4."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from runtime_util import cluster, eventually, local_system, run

import pulsing as pul
from pulsing import _core
from pulsing.core import ActorRef
from pulsing.exceptions import ActorNotFoundError, ActorStoppedError


class Busy(pul.Actor):
    """Takes one message and never ends with it."""

    def __init__(self) -> None:
        self.begun = False

    async def receive(self, msg: Any) -> None:
        self.begun = True
        await asyncio.Event().wait()


async def dead_letters(system: pul.ActorSystem) -> int:
    """What `/metrics` says."""
    found = await asyncio.to_thread(_core.observe_get, [system.addr], "/metrics")
    status, body, problem = found[0]
    assert status == 200, problem
    number = re.search(r"^pulsing_dead_letters_total\{.*\} (\d+)$", body, re.MULTILINE)
    assert number, body
    return int(number.group(1))


def test_what_waited_for_a_stopped_actor_is_counted_in_metrics() -> None:
    async def main() -> None:
        async with local_system() as system:
            assert await dead_letters(system) == 0
            busy = Busy()
            ref = await system.spawn(busy)
            asks = [asyncio.create_task(ref.ask(n)) for n in range(3)]
            await eventually("the first one runs", lambda: busy.begun)
            for n in range(2):
                await ref.tell(n)
            await system.kill(ref)
            for ask in asks:
                with pytest.raises(ActorStoppedError):
                    await ask

            async def counted() -> bool:
                # Two asks and two tells waited; the one that ran was no dead letter.
                return await dead_letters(system) == 4

            await eventually("they are in /metrics", counted)

    run(main())


@pytest.mark.parametrize("where", ["local", "remote"])
def test_what_is_sent_to_nobody_is_counted_where_nobody_was(where: str) -> None:
    async def main() -> None:
        async with cluster(2 if where == "remote" else 1) as systems:
            gone = await systems[0].spawn(Busy())
            ref = ActorRef(systems[-1], gone.node_id, gone.actor_id)
            await systems[0].kill(gone)
            with pytest.raises(ActorNotFoundError):
                await ref.ask("anyone?")
            if where == "remote":
                await ref.tell("anyone?")
            else:
                with pytest.raises(ActorNotFoundError):
                    await ref.tell("anyone?")

            async def counted() -> bool:
                return await dead_letters(systems[0]) == 2

            await eventually("both are in /metrics", counted)

    run(main())
