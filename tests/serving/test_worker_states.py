"""A Worker's states, as Routers and callers see them: loading, ready, draining, failed (S4, S8)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import protocol
import pytest
from worker_kit import Echo, Gate, http_error, instances, ready, run, text, until

from pulsing import _core
from pulsing.exceptions import PulsingActorError
from pulsing.serving.worker import Delta, GenerateRequest


class TestStates:
    def test_it_registers_at_once_and_loads_in_the_background(self) -> None:
        finish = threading.Event()

        class Slow(Echo):
            def load(self) -> None:
                assert threading.current_thread() is not threading.main_thread()
                self.set_detail("half way")
                assert finish.wait(20)
                self.max_model_len = 77

        async def scenario(system: Any) -> None:
            worker = Slow("m")
            ref = await system.spawn(worker, name="slow")
            (entry,) = await instances(system, "slow")
            metadata = entry["metadata"]
            assert metadata == {
                "kind": "worker",
                "protocol": "1..1",
                "model": "m",
                "role": "aggregated",
                "state": "loading",
                "engine": "custom",
                "apis": "chat.completions,completions",
            }
            reports = protocol.subscribe(ref).__aiter__()
            states = []
            await until(lambda: worker.load_report().detail == "half way")
            with pytest.raises(PulsingActorError) as caught:
                await protocol.answer(ref)
            status, error = http_error(caught.value)
            assert status == 503
            assert "still loading: half way" in error["message"]
            finish.set()
            async for head in reports:
                report = _core.LoadReport.decode(head)
                states.append(report.state)
                if report.state == "ready":
                    break
            assert states[0] == "loading"
            assert (report.max_model_len, report.models) == (77, ["m"])
            (entry,) = await instances(system, "slow")
            assert entry["metadata"]["state"] == "ready"
            assert text(await protocol.answer(ref)) == "hello "

        run(scenario)

    def test_a_load_that_fails_says_why(self) -> None:
        class Broken(Echo):
            async def load(self) -> None:
                raise OSError("no such model: gtp2")

        async def scenario(system: Any) -> None:
            worker = Broken()
            ref = await system.spawn(worker, name="broken")
            await until(lambda: worker.state == "failed")
            assert "no such model: gtp2" in worker.load_report().detail
            with pytest.raises(PulsingActorError) as caught:
                await protocol.answer(ref)
            status, error = http_error(caught.value)
            assert (status, error["code"]) == (503, "worker_failed")
            assert "no such model: gtp2" in error["message"]
            (entry,) = await instances(system, "broken")
            assert entry["metadata"]["state"] == "failed"

        run(scenario)

    def test_without_preload_the_first_request_loads_once(self) -> None:
        loads = []

        class Lazy(Echo):
            async def load(self) -> None:
                loads.append(1)
                await asyncio.sleep(0.05)

        async def scenario(system: Any) -> None:
            worker = Lazy(preload=False)
            ref = await system.spawn(worker)
            assert worker.state == "ready"
            assert loads == []
            answers = await asyncio.gather(*(protocol.answer(ref) for _ in range(3)))
            assert [text(answer) for answer in answers] == ["hello "] * 3
            assert loads == [1]

        run(scenario)

    def test_without_preload_a_failed_load_is_told_to_the_first_request(self) -> None:
        class LazyBroken(Echo):
            def load(self) -> None:
                raise ValueError("bad weights")

        async def scenario(system: Any) -> None:
            worker = LazyBroken(preload=False)
            ref = await system.spawn(worker)
            for _ in range(2):
                with pytest.raises(PulsingActorError) as caught:
                    await protocol.answer(ref)
                status, error = http_error(caught.value)
                assert status == 503
                assert "bad weights" in error["message"]
            assert worker.state == "failed"

        run(scenario)

    def test_load_reports_come_on_change_and_as_a_heartbeat(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Gate()
            ref = await system.spawn(worker)
            await ready(worker)
            call = protocol.subscribe(ref)
            reports = call.__aiter__()
            assert _core.LoadReport.decode(await anext(reports)).running == 0
            request = asyncio.create_task(protocol.answer(ref))
            begun = time.monotonic()
            while _core.LoadReport.decode(await anext(reports)).running == 0:
                pass
            assert time.monotonic() - begun < 0.4
            # No change from here on: the next ones are heartbeats, and tell how long nothing has moved.
            await until(lambda: worker.started == ["hello"])
            await anext(reports)
            begun = time.monotonic()
            report = _core.LoadReport.decode(await anext(reports))
            assert time.monotonic() - begun < 1.5
            assert report.progress_age_ms > 0
            worker.go.set()
            await request
            while _core.LoadReport.decode(await anext(reports)).processed != 1:
                pass
            call.cancel()

        run(scenario)

    def test_s5_progress_is_counted_from_the_last_sign_of_the_engine_and_not_against_who_only_waits(self) -> None:
        class Steps(Gate):
            def __init__(self) -> None:
                super().__init__(preload=False)
                self.loading = asyncio.Event()
                self.step = asyncio.Semaphore(0)

            async def load(self) -> None:
                await self.loading.wait()

            async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
                while True:
                    await self.step.acquire()
                    yield Delta("x" * 1000)

        async def scenario(system: Any) -> None:
            worker = Steps()
            ref = await system.spawn(worker)

            def age() -> int:
                return worker.load_report().progress_age_ms

            async def stands(least: int = 100) -> None:
                await until(lambda: age() > least)

            call = protocol.generate(ref, window=4)
            got = protocol.deltas(call)
            await until(lambda: worker.load_report().running == 1)
            assert age() == 0, "it loads, and nothing is asked of it yet"
            worker.loading.set()
            await stands()
            released = time.monotonic()
            worker.step.release()
            await anext(got)
            assert age() <= (time.monotonic() - released) * 1000, "a token is progress"
            await stands()
            said = time.monotonic()
            worker.progressed()
            assert age() <= (time.monotonic() - said) * 1000, "so is what the engine says"
            # A client that does not read is waited for; it is not the engine that stands still.
            for _ in range(20):
                worker.step.release()
            await until(lambda: worker._held == 1)
            assert age() == 0
            for _ in range(20):
                await anext(got)
            assert worker._held == 0
            await stands()
            second = protocol.generate(ref)
            await until(lambda: worker.load_report().running == 2)
            assert age() > 100, "what comes later does not excuse it"
            second.cancel()
            call.cancel()
            await until(lambda: worker.load_report().running == 0)
            assert age() == 0, "idle"
            handed = time.monotonic()
            third = protocol.generate(ref)
            await until(lambda: worker.load_report().running == 1)
            assert age() <= (time.monotonic() - handed) * 1000, "from when it was handed over"
            third.cancel()

        run(scenario)

    def test_draining_finishes_what_runs_and_refuses_the_rest(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Gate()
            ref = await system.spawn(worker, name="gate")
            await ready(worker)
            load = protocol.subscribe(ref)
            states: list[str] = []

            async def watch() -> None:
                async for head in load:
                    states.append(_core.LoadReport.decode(head).state)

            watching = asyncio.create_task(watch())
            request = asyncio.create_task(protocol.answer(ref))
            await until(lambda: worker.started == ["hello"])
            stopping = asyncio.create_task(system.stop("gate"))
            await until(lambda: worker.state == "draining")
            with pytest.raises(PulsingActorError) as caught:
                await protocol.answer(ref)
            assert http_error(caught.value)[1]["code"] == "worker_draining"
            assert not worker.engine_closed
            worker.go.set()
            assert text(await request) == "begun done"
            await stopping
            assert worker.engine_closed
            await watching
            assert states[-1] == "draining"

        run(scenario)

    def test_a_drain_ends_at_its_limit(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Gate(drain_timeout=0.1)
            ref = await system.spawn(worker, name="gate")
            await ready(worker)
            request = asyncio.create_task(protocol.answer(ref))
            await until(lambda: worker.started == ["hello"])
            await asyncio.wait_for(system.stop("gate"), 10)
            assert worker.closed == ["hello"]
            with pytest.raises(Exception):  # noqa: B017, PT011 - which one is the runtime's to say; it must not hang
                await request

        run(scenario)
