"""Schedulers in Python, alone and plugged into a Router (S1)."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
from router_kit import Scripted, chat, http, ready, system, until

from pulsing.core import ActorRef, ActorSystem
from pulsing.serving import (
    RUST_POLICIES_AVAILABLE,
    LeastConnectionScheduler,
    RustCacheAwareScheduler,
    Scheduler,
    WorkerInfo,
    get_scheduler,
    start_router,
    stop_router,
)

NAMES = [
    "random",
    "round_robin",
    "power_of_two",
    "consistent_hash",
    "cache_aware",
    "stream_load",
    "py_random",
    "py_round_robin",
    "least_connection",
]


def test_every_scheduler_finds_the_ready_workers_and_uses_them_all() -> None:
    async def run() -> None:
        async with system() as node, system(node.addr) as other:
            refs = {str((await one.spawn(Scripted(), name="worker")).actor_id) for one in (node, other)}
            for name in NAMES:
                scheduler = get_scheduler(name, node, "worker")
                await scheduler.start()

                async def found(scheduler: Scheduler = scheduler) -> bool:
                    return await scheduler.get_healthy_worker_count() == 2

                await until(f"{name} sees both", found)
                picked: Counter[str] = Counter()

                async def both(scheduler: Scheduler = scheduler, picked: Counter[str] = picked) -> bool:
                    for number in range(20):
                        worker = await scheduler.select_worker("text", {"X-Session-Id": f"s{number}"})
                        picked[str(worker and worker.actor_id)] += 1
                    return refs <= set(picked) <= {*refs, "None"}

                await until(f"{name} uses both", both)
                await scheduler.stop()

    asyncio.run(run())


def test_consistent_hash_keeps_a_session_where_it_is() -> None:
    async def run() -> None:
        async with system() as node, system(node.addr) as other:
            for one in (node, other):
                await one.spawn(Scripted(), name="worker")
            scheduler = get_scheduler("consistent_hash", node)

            async def both() -> bool:
                return (
                    len({await scheduler.select_worker(None, {"x-session-id": f"{n}"}) for n in range(40)} - {None})
                    == 2
                )

            await until("both are seen", both)
            for number in range(10):
                picks = {await scheduler.select_worker(None, {"x-session-id": f"s{number}"}) for _ in range(5)}
                assert len(picks) == 1
            await scheduler.stop()

    asyncio.run(run())


def test_cache_aware_finds_the_worker_that_knows_a_prefix() -> None:
    async def run() -> None:
        async with system() as node, system(node.addr) as other:
            for one in (node, other):
                await one.spawn(Scripted(), name="worker")
            scheduler = RustCacheAwareScheduler(node)
            fresh = itertools.count()

            async def both() -> bool:
                texts = [f"unheard of {next(fresh)} " * 40 for _ in range(40)]
                return len({await scheduler.select_worker(text) for text in texts} - {None}) == 2

            await until("both are seen", both)
            for number in range(10):
                text = f"conversation {number} " * 40
                first = await scheduler.select_worker(text)
                for turn in range(5):
                    text += f" and turn {turn}"
                    assert await scheduler.select_worker(text) == first
            await scheduler.stop()

    asyncio.run(run())


def test_unknown_policies_are_refused_in_words() -> None:
    async def run() -> None:
        async with system() as node:
            with pytest.raises(ValueError, match="round_robin"):
                get_scheduler("rond_robin", node)
            with pytest.raises(ValueError, match="exclude each other"):
                await start_router(
                    node, scheduler=LeastConnectionScheduler(node), scheduler_class=LeastConnectionScheduler
                )
            with pytest.raises(ValueError, match="no select_worker"):
                await start_router(node, scheduler=object())  # type: ignore[arg-type]

    asyncio.run(run())


def test_least_connection_gives_places_back() -> None:
    async def run() -> None:
        async with system() as node, system(node.addr) as other:
            for one in (node, other):
                await one.spawn(Scripted(), name="worker")
            scheduler = LeastConnectionScheduler(node)

            async def both() -> bool:
                return await scheduler.get_healthy_worker_count() == 2

            await until("both are seen", both)
            first, second = await scheduler.select_worker(), await scheduler.select_worker()
            assert first is not None
            assert first != second
            scheduler.release(first)
            assert await scheduler.select_worker() == first

    asyncio.run(run())


class Chosen(Scheduler):
    """Does as the test says."""

    def __init__(self, actor_system: ActorSystem, worker_name: str = "worker") -> None:
        super().__init__(actor_system, worker_name)
        self.worker: ActorRef | None = None
        self.seen: list[tuple[str | None, Mapping[str, str] | None]] = []
        self.delay = 0.0
        self.fails = False
        self.running = False

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def select_worker(
        self, request_text: str | None = None, headers: Mapping[str, str] | None = None
    ) -> ActorRef | None:
        self.seen.append((request_text, headers))
        await asyncio.sleep(self.delay)
        if self.fails:
            raise RuntimeError("as told")
        return self.worker


def test_a_plugged_scheduler_decides_and_a_late_or_failing_one_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with system() as node, system(node.addr) as other:
            workers = [Scripted(), Scripted()]
            refs = [await one.spawn(worker, name="worker") for one, worker in zip((node, other), workers, strict=True)]
            chosen = Chosen(node)
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler=chosen)
            assert chosen.running
            await ready(runner.addr, 2)
            chosen.worker = refs[1]
            answers = await asyncio.gather(*(chat(runner.addr, "say it") for _ in range(10)))
            assert [status for status, _ in answers] == [200] * 10
            assert [len(worker.requests) for worker in workers] == [0, 10]
            text, headers = chosen.seen[0]
            assert text == "say it"
            assert headers is not None
            assert headers["content-length"]
            assert "authorization" not in headers

            async def fallbacks() -> dict[str, int]:
                _, _, body = await http(runner.addr, "GET", "/metrics")
                lines = [line for line in body.decode().splitlines() if "scheduler_fallbacks_total{" in line]
                return {line.split('"')[1]: int(line.rsplit(" ", 1)[1]) for line in lines}

            chosen.fails = True
            assert (await chat(runner.addr))[0] == 200
            assert (await fallbacks())["failed"] == 1
            chosen.fails, chosen.delay = False, 5.0
            assert (await chat(runner.addr))[0] == 200
            assert (await fallbacks())["late"] == 1
            chosen.delay = 0.0
            with caplog.at_level("ERROR", "pulsing.serving"):
                chosen.worker = "worker"
                assert (await chat(runner.addr))[0] == 200
            assert (await fallbacks())["failed"] == 2
            assert "it must return an ActorRef, an ActorProxy or None, not 'worker'" in caplog.text
            chosen.worker, chosen.delay = None, 0.0
            assert (await chat(runner.addr))[0] == 200
            await stop_router(runner)
            assert not chosen.running

    asyncio.run(run())


def test_worker_info_and_the_constant_of_old_programs() -> None:
    assert RUST_POLICIES_AVAILABLE is True
    info = WorkerInfo("10.0.0.1:8000")
    info.increment_load()
    info.healthy = False
    assert (info.load, info.processed, info.is_healthy, info.model_id) == (1, 1, False, "default")
