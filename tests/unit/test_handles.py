"""Actors live by themselves: who holds a proxy or a reference has no part in it."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from runtime_util import Run, cluster

import pulsing as pul


@pul.remote
class Worker:
    async def slowly(self, n: int) -> int:
        await asyncio.sleep(0.01)
        return n

    async def count(self, n: int) -> object:
        for one in range(n):
            await asyncio.sleep(0)
            yield one


def test_r1_a_call_on_an_actor_that_nobody_holds_is_answered(run: Run) -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            for node in (here, there):
                call = asyncio.create_task((await Worker.spawn(system=here, placement=node.node_id)).slowly(7))
                gc.collect()
                assert await call == 7
                assert await (await Worker.spawn(system=here, placement=node.node_id)).slowly(8) == 8
                items = (await Worker.spawn(system=here, placement=node.node_id)).count(100)
                gc.collect()
                assert [item async for item in items] == list(range(100))

    run(main())


def test_a_named_actor_outlives_every_handle(run: Run) -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            await Worker.spawn(system=here, name="worker")
            gc.collect()
            for node in (here, there):
                assert await (await Worker.resolve("worker", system=node, timeout=5)).slowly(9) == 9

    run(main())


def test_nothing_is_set_on_a_proxy_as_if_it_were_the_actor(run: Run) -> None:
    async def main() -> None:
        async with cluster(1) as (here,):
            worker = await Worker.spawn(system=here)
            for proxy in (worker, worker.as_any()):
                for name in ("value", "ref"):
                    with pytest.raises(AttributeError, match=f"cannot set '{name}'"):
                        setattr(proxy, name, 1)

            async def replaced(n: int) -> int:
                return -n

            worker.slowly = replaced
            assert await worker.slowly(3) == -3

    run(main())


def test_methods_that_a_proxy_would_hide_are_told_where_the_class_is_made() -> None:
    with pytest.warns(UserWarning, match=r"Agent: proxies have ask, options of their own") as told:

        @pul.remote
        class Agent:
            def ask(self, question: str) -> str:
                return question

            options = ask

    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="proxies have tell of their own") as told:

        @pul.remote(restart_policy="never")
        class Teller:
            async def tell(self) -> None: ...

    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pul.remote(type("Plain", (), {"answer": lambda self: 1, "_ask": lambda self: 2}))


def test_a_reference_says_how_methods_are_called(run: Run) -> None:
    async def main() -> None:
        async with cluster(1) as (here,):
            ref = (await Worker.spawn(system=here)).ref
            with pytest.raises(AttributeError, match=r"a proxy calls methods: `ref\.as_any\(\)\.slowly\(\.\.\.\)`"):
                ref.slowly(1)
            assert getattr(ref, "_private", None) is None

    run(main())
