"""Watching a name: what there is first, then every change or what they come to (M5, R10)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest
from runtime_util import Run, local_system

import pulsing as pul
from pulsing.exceptions import ConfigError, InvalidNameError, SystemShutDownError


class Worker(pul.Actor):
    def metadata(self) -> dict[str, str]:
        return {"state": "loading"}

    async def receive(self, msg: object) -> object:
        self.set_metadata(state=str(msg))
        return msg


def test_m5_the_instances_come_first_then_each_change(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await system.spawn(Worker(), name="worker")
            async with system.watch_name("worker") as watch:
                first = await anext(watch)
                assert (first.kind, first.name, first.ref, first.address) == ("added", "worker", one, system.addr)
                assert (first.node_id, first.actor_id) == (system.node_id, one.actor_id)
                assert first.metadata == {"state": "loading"}
                assert watch.instances == [one]
                await one.ask("ready")
                changed = await anext(watch)
                assert (changed.kind, changed.ref, changed.metadata) == ("updated", one, {"state": "ready"})
                await system.stop("worker")
                gone = await anext(watch)
                assert (gone.kind, gone.ref) == ("removed", one)
                assert watch.instances == []
            assert [change async for change in watch] == [], "a closed watch is at its end"

    run(main())


@pytest.mark.parametrize(
    "refused", [{"state": "x" * 2000}, {"more": "x" * 2000}, {"more": "\ud800"}], ids=["changed", "added", "bytes"]
)
def test_r10_metadata_that_were_refused_are_not_published_later(run: Run, refused: dict[str, str]) -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await system.spawn(worker := Worker(), name="worker")
            async with system.watch_name("worker") as watch:
                await anext(watch)
                with pytest.raises((ConfigError, UnicodeEncodeError)):
                    worker.set_metadata(**refused)
                await one.ask("ready")
                assert (await anext(watch)).metadata == {"state": "ready"}

    run(main())


def test_m5_a_slow_loop_is_told_the_sum(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            watch = system.watch_name("busy")
            one = await system.spawn(Worker(), name="busy")
            assert (await anext(watch)).kind == "added"
            for round_ in range(500):
                await one.ask(str(round_))
            told = [await anext(watch)]
            while told[-1].metadata["state"] != "499":
                told.append(await anext(watch))
            # What had gathered at the first look, and what came after it.
            assert len(told) <= 2
            watch.close()

    run(main())


def test_m5_a_wait_cut_short_loses_nothing(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            watch = system.watch_name("late")
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await anext(watch)
            one = await system.spawn(Worker(), name="late")
            assert (await anext(watch)).ref == one

    run(main())


def test_m5_what_ends_a_watch(run: Run) -> None:
    async def main() -> None:
        system = await pul.actor_system("127.0.0.1:0")
        watch = system.watch_name("x")
        waiting = asyncio.create_task(anext(watch, None))
        await asyncio.sleep(0)
        watch.close()
        watch.close()
        assert await waiting is None, "closing ends a loop that waits"
        with pytest.raises(InvalidNameError, match="empty"):
            system.watch_name("")
        other = system.watch_name("x")
        waiting = asyncio.create_task(anext(other, None))
        await asyncio.sleep(0)
        await system.shutdown(0.0)
        with pytest.raises(SystemShutDownError):
            await waiting
        with pytest.raises(SystemShutDownError):
            await anext(other)

    run(main())


def test_m5_a_watch_that_nobody_holds_is_freed(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            await system.spawn(Worker(), name="worker")

            async def first(names: AsyncIterator[pul.NameChange]) -> pul.NameChange:
                async for change in names:
                    return change
                raise AssertionError("it ended")

            assert (await first(system.watch_name("worker"))).kind == "added"
            watch = system.watch_name("worker")
            await anext(watch)
            waiting = asyncio.create_task(anext(watch, None))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            del waiting
            alive = weakref.ref(watch)
            del watch
            gc.collect()
            assert alive() is None, "a wait that was cut short must not keep it"

    run(main())


def test_m5_the_process_s_own_system(run: Run) -> None:
    async def main() -> None:
        await pul.init()
        try:
            ref = await pul.spawn(Worker(), name="worker")
            async for change in pul.watch_name("worker"):
                assert isinstance(change, pul.NameChange)
                assert change.ref == ref
                break
        finally:
            await pul.shutdown()

    run(main())
