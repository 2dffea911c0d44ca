"""Calls from other loops and other threads, of either kind, to one system's actors (R1, R2, R5, R6)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import runtime_util
from runtime_util import LOOPS, Run, eventually, local_system

import pulsing as pul
from pulsing.exceptions import PulsingTimeoutError


@pul.remote
class Shared:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []
        self.threads: set[int] = set()
        self.closed = 0

    def note(self, who: Any, n: int) -> int:
        self.threads.add(threading.get_ident())
        self.seen.append((who, n))
        return n

    async def slowly(self, n: int) -> int:
        await asyncio.sleep(0)
        self.threads.add(threading.get_ident())
        await asyncio.sleep(0.001)
        return n

    async def for_ever(self) -> None:
        await asyncio.sleep(3600)

    def fail(self) -> None:
        raise KeyError("there")

    async def count(self, n: int) -> Any:
        try:
            for one in range(n):
                yield one
        finally:
            self.closed += 1


async def use(shared: Any, who: Any) -> None:
    """What a loop does with an actor that lives on another."""
    for n in range(20):
        await shared.note.tell(who, n)
    assert await shared.note(who, 20) == 20
    assert await asyncio.gather(*(shared.slowly(n) for n in range(20))) == list(range(20))
    assert [n async for n in shared.count(200)] == list(range(200))
    async with shared.count(10**9).__aiter__() as items:
        assert [await anext(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="there"):
        await shared.fail()
    with pytest.raises(PulsingTimeoutError):
        await shared.options(timeout=0.02).for_ever()
    abandoned = asyncio.create_task(shared.for_ever())
    await asyncio.sleep(0)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned


@pul.remote
class Tools:
    """Makes what belongs to a loop where users make it: in the constructor."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[int] = asyncio.Queue(1)
        self.turn = asyncio.Semaphore(1)
        self.lock = asyncio.Lock()
        self.ready = asyncio.Event()
        self.answer = self.loop.create_future()
        self.timer = self.loop.call_later(0.01, self.answer.set_result, "on time")

    async def put(self, item: int) -> None:
        async with self.lock, self.turn:
            self.ready.set()
            await self.items.put(item)

    async def take(self) -> list[Any]:
        await self.ready.wait()
        assert asyncio.get_running_loop() is self.loop
        return [await self.items.get(), await self.items.get(), await self.answer]

    @pul.blocking
    def from_a_thread(self) -> int:
        return asyncio.run_coroutine_threadsafe(self.items.get(), self.loop).result(5)

    def crash(self) -> None:
        raise RuntimeError("again")


def test_what_a_constructor_makes_for_its_loop_works_in_every_method(run: Run) -> None:
    async def use_it(tools: Any, again: int) -> None:
        for _ in range(again):
            took = asyncio.create_task(tools.take())
            await asyncio.gather(tools.put(1), tools.put(2))
            assert await took == [1, 2, "on time"]
            with pytest.raises(RuntimeError, match="again"):
                await tools.crash()
        threaded = asyncio.create_task(tools.from_a_thread())
        await tools.put(3)
        assert await threaded == 3

    async def main() -> None:
        async with local_system() as system, local_system(seeds=[system.addr]) as other:
            near = await Tools.spawn(system=system)
            await use_it(near, 1)
            # Made again after a failure, and for another node: on the loop of its node all the same.
            supervised = await system.spawn(Tools, restart_policy="on_failure", min_backoff=0.001, max_restarts=9)
            await use_it(supervised.as_any(), 3)
            await use_it(await Tools.spawn(system=other, placement=system.node_id), 1)
            # From another loop, too.
            guest = await Tools.spawn(system=system)
            await asyncio.to_thread(runtime_util.run, use_it(guest, 1), "asyncio")

    run(main())


def test_r2_several_loops_in_threads_of_their_own_call_one_actor(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            actor = Shared.cls()
            shared = (await system.spawn(actor, name="shared")).as_any()

            guests = [
                asyncio.to_thread(runtime_util.run, use(shared, who), kind) for who, kind in enumerate([*LOOPS, *LOOPS])
            ]
            await asyncio.gather(use(shared, "home"), *guests)
            assert actor.threads == {threading.get_ident()}
            for who in [0, 1, 2, 3, "home"]:
                assert [n for one, n in actor.seen if one == who] == list(range(21))
            await eventually("every stream was closed", lambda: actor.closed == 10)

    run(main())


@pul.remote
class Far:
    def echo(self, value: Any) -> Any:
        return value


def test_r2_a_loop_that_is_blocked_holds_up_nobody_whose_answers_it_would_have_read(run: Run) -> None:
    """The lane of a link is lent to the loop that all its messages are for (`net/loan.rs`): it must come back."""
    ready, over = threading.Event(), threading.Event()
    addr: list[str] = []

    async def far_side() -> None:
        async with local_system() as system:
            await Far.spawn(system=system, name="far")
            addr.append(system.addr)
            ready.set()
            await asyncio.to_thread(over.wait, 60)

    async def main() -> None:
        await asyncio.to_thread(ready.wait, 30)
        async with local_system(seeds=[addr[0]]) as system:
            far = await system.resolve("far", timeout=10)
            loop_of_another: asyncio.AbstractEventLoop = asyncio.new_event_loop()
            another = threading.Thread(target=loop_of_another.run_forever)
            another.start()

            async def ask(n: int) -> Any:
                return await far.echo(n)

            try:
                for round_ in range(5):
                    # So many that the lane is this loop's by now.
                    for n in range(50):
                        assert await far.echo(n) == n
                    asked = asyncio.run_coroutine_threadsafe(ask(round_), loop_of_another)
                    # Blocks this loop until another one has its answer.
                    assert asked.result(20) == round_
                    assert await asyncio.gather(*(far.echo(n) for n in range(100))) == list(range(100))
            finally:
                loop_of_another.call_soon_threadsafe(loop_of_another.stop)
                another.join()
                loop_of_another.close()

    there = threading.Thread(target=runtime_util.run, args=(far_side(),))
    there.start()
    try:
        run(main())
    finally:
        over.set()
        there.join()
