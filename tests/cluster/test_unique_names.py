"""A name for one actor in the cluster (R10)."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing.core import ActorProxy
from pulsing.core._inbound import Inlet
from pulsing.exceptions import ActorNotFoundError, ActorStoppedError, ConfigError, NameNotFoundError, NameTakenError


@pul.remote
class Leader:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def who(self) -> int:
        return id(self)

    async def hang(self) -> None:
        await asyncio.Event().wait()


def test_r10_a_unique_name_has_one_holder_and_costs_the_other_no_constructor() -> None:
    async def main() -> None:
        async with cluster(2) as (a, b):
            leader = await Leader.spawn(system=a, name="leader", unique=True)
            there = await Leader.resolve("leader", system=b, timeout=5)
            before = Leader.made
            for unique in (True, False):
                with pytest.raises(NameTakenError, match=str(a.node_id)) as caught:
                    await Leader.spawn(system=b, name="leader", unique=unique)
                assert caught.value.retry_safe
            assert Leader.made == before
            assert (await a.get_named_instances("leader"))[0]["unique"]
            await a.stop("leader")
            await eventually("the name is gone", lambda: not b.core.instances("leader"))
            with pytest.raises(ActorNotFoundError):
                await there.who()
            # From one node for another, too.
            await Leader.remote(a, name="leader", unique=True)
            with pytest.raises(NameTakenError):
                await Leader.remote(b, name="leader", unique=True)
            assert leader.ref != (await Leader.resolve("leader", system=a, timeout=5)).ref
            for name, public in ((None, None), ("x", False)):
                with pytest.raises(ConfigError, match="unique=True"):
                    await a.spawn(Leader, unique=True, name=name, public=public)

    run(main())


def test_r10_get_or_create_by_many_ends_at_one_actor() -> None:
    async def get_or_create(system: pul.ActorSystem) -> ActorProxy:
        try:
            return await Leader.spawn(system=system, name="shared", unique=True)
        except NameTakenError:
            return await Leader.resolve("shared", system=system, timeout=5)

    async def main() -> None:
        async with cluster(2) as systems:
            await asyncio.gather(*(get_or_create(system) for system in systems for _ in range(10)))
            await eventually(
                "one holder", lambda: len({i["actor_id"] for s in systems for i in s.core.instances("shared")}) == 1
            )
            answers = {await (await Leader.resolve("shared", system=system)).who() for system in systems}
            assert len(answers) == 1

    run(main())


def test_r10_get_or_create_in_a_loop_never_ends_at_a_dead_actor() -> None:
    async def get_or_create(system: pul.ActorSystem) -> ActorProxy:
        while True:
            try:
                return await Leader.spawn(system=system, name="shared", unique=True)
            except NameTakenError:
                # Who refuses a name knows its holder, until that is stopped by another of these loops.
                with contextlib.suppress(NameNotFoundError):
                    return await Leader.resolve("shared", system=system)

    async def use(system: pul.ActorSystem, rounds: int) -> int:
        answered = 0
        while answered < rounds:
            one = await get_or_create(system)
            try:
                await one.who()
            except ActorNotFoundError:
                # Stopped meanwhile by another loop, says its node: nobody here finds it again.
                assert (await get_or_create(system)).actor_id != one.actor_id
                continue
            except ActorStoppedError:
                # It is about to go: the news that its name is gone comes within a second (M5).
                async with asyncio.timeout(1.0):
                    while (await get_or_create(system)).actor_id == one.actor_id:
                        pass
                continue
            answered += 1
            await system.stop(one)
        return answered

    async def main() -> None:
        async with cluster(2) as (a, b):
            # Alone, nothing is ever stale: a stopped holder is not found, and its name is free at once.
            for _ in range(50):
                one = await get_or_create(a)
                assert (await Leader.resolve("shared", system=a)).actor_id == one.actor_id
                await one.who()
                await a.stop(one)
                with pytest.raises(NameNotFoundError):
                    await Leader.resolve("shared", system=a)
                with pytest.raises((ActorNotFoundError, ActorStoppedError)):
                    await one.who()
            async with asyncio.timeout(30):
                assert await asyncio.gather(use(a, 20), use(a, 20), use(b, 20)) == [20, 20, 20]

    run(main())


def test_r10_the_loser_of_a_name_is_stopped_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with cluster(2) as (a, _b):
            leader = await Leader.spawn(system=a, name="leader", unique=True)
            call = asyncio.create_task(leader.hang())
            cell = a.cell(leader.actor_id)
            assert cell is not None
            await eventually("the handler runs", lambda: bool(cell.handlers.running))
            Inlet(a._bridge, cell)((10, 0, "actor 1 lost name 'leader' to the older claim of actor 2 on node 3"))
            with pytest.raises(ActorStoppedError, match="older claim of actor 2 on node 3"):
                await call
            await eventually("the loser is gone", lambda: a.cell(leader.actor_id) is None)

    with caplog.at_level(logging.ERROR, "pulsing"):
        run(main())
    assert [r.levelname for r in caplog.records if "older claim of actor 2" in r.getMessage()] == ["ERROR"]
