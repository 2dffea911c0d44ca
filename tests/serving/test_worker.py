"""A Worker called through the worker protocol: answers, errors, cancellation (S2, S4)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import protocol
import pytest
from models import tiny_gpt2
from worker_kit import Echo, Gate, http_error, ready, run, text, until

from pulsing import _core
from pulsing.core import Message
from pulsing.exceptions import PulsingActorError
from pulsing.serving import worker as worker_module
from pulsing.serving.transformers import TransformersWorker
from pulsing.serving.worker import Delta, GenerateRequest, RequestError, Worker


class TestAnswers:
    def test_an_engine_is_one_class_with_one_generator(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Echo()
            ref = await system.spawn(worker, name="echo")
            await ready(worker)
            answer = await protocol.answer(ref, messages=[{"role": "user", "content": "to be or not"}])
            assert text(answer) == "to be or not "
            assert answer[-1].finish_reason == "stop"
            assert answer[-1].usage.prompt_tokens == 4
            answer = await protocol.answer(ref, api="completions", prompt="or not")
            assert text(answer) == "or not "

        run(scenario)

    def test_a_choice_that_names_no_reason_has_stopped(self) -> None:
        class Short(Worker):
            async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
                yield Delta("a", index=1, finish_reason="length")
                yield Delta("b")

        Short.supports = Worker.supports | {"n"}

        async def scenario(system: Any) -> None:
            worker = Short()
            ref = await system.spawn(worker)
            await ready(worker)
            answer = await protocol.answer(ref, n=2)
            assert [(d.index, d.text, d.finish_reason) for d in answer] == [
                (1, "a", "length"),
                (0, "b", None),
                (0, "", "stop"),
            ]

        run(scenario)

    def test_a_log_probability_of_minus_infinity_is_the_floor_and_what_is_none_is_refused(self) -> None:
        def entry(logprob: float) -> dict[str, Any]:
            return {"token": "a", "logprob": logprob, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.5}]}

        delta = Delta("a", logprobs={"content": [entry(-math.inf), entry(-0.25)], "refusal": None})
        assert delta.logprobs is not None
        assert [one["logprob"] for one in delta.logprobs["content"]] == [-9999.0, -0.25]
        assert delta.logprobs["content"][0]["top_logprobs"] == [{"token": "b", "logprob": -1.5}]
        ring: list[Any] = [-math.inf]
        ring.append(ring)
        for bad in ([entry(math.nan)], [entry(math.inf)], ring, {1}):
            with pytest.raises(ValueError, match="logprobs cannot be written as JSON"):
                Delta("a", logprobs={"content": bad})

    @pytest.mark.parametrize(("gather", "messages"), [(60.0, [3]), (0.0, [2, 1])])
    def test_s2_an_answer_that_nobody_sees_before_it_is_whole_is_one_message_if_it_comes_soon(
        self, gather: float, messages: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Three(Worker):
            async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
                yield Delta("a")
                yield Delta("b")
                if request.temperature == 2:
                    raise RequestError(422, "too hot")

        monkeypatch.setattr(worker_module, "_GATHER", gather)

        async def scenario(system: Any) -> None:
            worker = Three()
            ref = await system.spawn(worker)
            await ready(worker)
            items = [_core.decode_deltas(item) async for item in protocol.generate(ref, whole=True)]
            assert [len(item) for item in items] == messages
            assert "".join(delta.text for item in items for delta in item) == "ab"
            assert items[-1][-1].finish_reason == "stop"
            assert worker.load_report().processed == 1
            # Who wants a stream gets it piece by piece, however soon they come.
            assert [len(_core.decode_deltas(item)) async for item in protocol.generate(ref)] == [1, 1, 1]
            with pytest.raises(PulsingActorError) as caught:
                [item async for item in protocol.generate(ref, whole=True, temperature=2)]
            assert http_error(caught.value)[0] == 422

        run(scenario)

    def test_requests_run_at_once_and_the_rest_waits_in_order(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Gate(capacity=2, max_waiting=2)
            ref = await system.spawn(worker)
            await ready(worker)
            tasks = []
            for name in "abcd":
                tasks.append(asyncio.create_task(protocol.answer(ref, messages=[{"role": "user", "content": name}])))
                count = len(tasks)
                await until(lambda count=count: worker.load_report().running + worker.load_report().waiting == count)
            assert worker.started == ["a", "b"]
            report = worker.load_report()
            assert (report.running, report.waiting, report.capacity) == (2, 2, 2)
            with pytest.raises(PulsingActorError) as caught:
                await protocol.answer(ref)
            status, error = http_error(caught.value)
            assert (status, error["code"]) == (503, "worker_full")
            worker.go.set()
            for answer in await asyncio.gather(*tasks):
                assert text(answer) == "begun done"
            assert worker.started == ["a", "b", "c", "d"]
            assert worker.load_report().processed == 4

        run(scenario)


class TestErrors:
    def test_an_engines_own_error_is_the_http_error(self) -> None:
        class Picky(Worker):
            async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
                if request.temperature == 2:
                    raise RequestError(422, "too hot", "temperature", "hot")
                yield Delta("one ")
                raise KeyError("bug")

        async def scenario(system: Any) -> None:
            worker = Picky()
            ref = await system.spawn(worker)
            await ready(worker)
            with pytest.raises(PulsingActorError) as caught:
                await protocol.answer(ref, temperature=2)
            status, error = http_error(caught.value)
            assert status == 422
            assert error == {
                "message": "too hot",
                "type": "invalid_request_error",
                "param": "temperature",
                "code": "hot",
            }
            # A bug in the engine is a 500; what was sent before it stays sent.
            got = []

            async def read() -> None:
                async for delta in protocol.deltas(protocol.generate(ref)):
                    got.append(delta.text)

            with pytest.raises(PulsingActorError) as caught:
                await read()
            assert got == ["one "]
            status, error = http_error(caught.value)
            assert (status, error["type"]) == (500, "server_error")
            assert "KeyError" in error["message"]
            assert worker.load_report().running == 0

        run(scenario)

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"logprobs": True}, "logprobs"),
            ({"n": 3}, "n"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"temperature": 9}, "temperature"),
            ({"messages": []}, "messages"),
        ],
    )
    def test_what_the_engine_cannot_do_is_a_400(self, body: dict[str, Any], param: str) -> None:
        async def scenario(system: Any) -> None:
            worker = Echo()
            ref = await system.spawn(worker)
            await ready(worker)
            with pytest.raises(PulsingActorError) as caught:
                await protocol.answer(ref, **body)
            status, error = http_error(caught.value)
            assert (status, error["param"]) == (400, param)

        run(scenario)

    def test_a_deadline_ends_the_request(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Gate()
            ref = await system.spawn(worker)
            await ready(worker)
            with pytest.raises(PulsingActorError) as caught:
                async for _ in protocol.generate(ref, deadline=0.1):
                    pass
            assert http_error(caught.value)[0] == 504
            await until(lambda: worker.closed == ["hello"])

        run(scenario)

    def test_bytes_that_are_no_request(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Echo()
            ref = await system.spawn(worker)
            with pytest.raises(PulsingActorError) as caught:
                async for _ in protocol.Call(ref, b"\xff\xff\xff"):
                    pass
            assert http_error(caught.value)[0] == 400

        run(scenario)


class TestCancelling:
    def test_a_client_that_goes_away_closes_the_generator(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Gate(capacity=1)
            ref = await system.spawn(worker)
            await ready(worker)
            call = protocol.generate(ref)
            async for delta in protocol.deltas(call):
                assert delta.text == "begun "
                break
            waiting = protocol.generate(ref, messages=[{"role": "user", "content": "second"}])
            await until(lambda: worker.load_report().waiting == 1)
            waiting.cancel()
            await until(lambda: worker.load_report().waiting == 0)
            call.cancel()
            await until(lambda: worker.closed == ["hello"])
            assert worker.started == ["hello"]
            await until(lambda: worker.load_report().running == 0)
            worker.go.set()
            assert text(await protocol.answer(ref)) == "begun done"

        run(scenario)

    def test_a_client_that_does_not_read_suspends_the_engine(self) -> None:
        made = []

        class Many(Worker):
            async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
                for number in range(1000):
                    made.append(number)
                    yield Delta("x")

        async def scenario(system: Any) -> None:
            worker = Many()
            ref = await system.spawn(worker)
            await ready(worker)
            call = protocol.generate(ref, window=8)
            await until(lambda: len(made) >= 8)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(made) <= 8 + 2
            assert len([delta async for delta in protocol.deltas(call) if delta.text]) == 1000

        run(scenario)


class TestPlainMessages:
    def test_health_and_load(self) -> None:
        async def scenario(system: Any) -> None:
            worker = Echo("m", capacity=3)
            ref = await system.spawn(worker)
            await ready(worker)
            health = await ref.ask(Message.from_json("HealthCheck", {}))
            assert (health.msg_type, health.to_json()["status"], health.to_json()["is_loaded"]) == (
                "Ok",
                "healthy",
                True,
            )
            load = await ref.ask(Message.from_json("GetLoad", {}))
            assert (load.msg_type, load.to_json()["capacity"], load.to_json()["load"]) == ("LoadInfo", 3, 0)
            other = await ref.ask(Message.from_json("Dance", {}))
            assert other.msg_type == "Error"
            description = await protocol.describe(ref)
            assert (description.engine, description.load.state) == ("custom", "ready")

        run(scenario)


class TestMistakes:
    def test_a_constructor_that_forgets_the_base(self) -> None:
        class Forgetful(Worker):
            def __init__(self) -> None:
                self.x = 1

        async def scenario(system: Any) -> None:
            with pytest.raises(Exception, match=r"must call super\(\).__init__"):
                await system.spawn(Forgetful())

        run(scenario)

    def test_a_class_without_generate(self) -> None:
        class Nothing(Worker):
            pass

        class NoYield(Worker):
            async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:  # type: ignore[override]
                return iter(())  # type: ignore[return-value]

        for wrong in (Nothing, NoYield):
            with pytest.raises(TypeError, match="an async generator"):
                wrong()


def test_transformers_through_the_protocol(tmp_path: Path) -> None:
    folder = tiny_gpt2(tmp_path)

    async def scenario(system: Any) -> None:
        worker = TransformersWorker(str(folder), device="cpu", served_model_name="tiny")
        ref = await system.spawn(worker, name="worker")
        await ready(worker)
        fields = {"max_tokens": 20, "temperature": 1, "seed": 3}
        first, second = await asyncio.gather(protocol.answer(ref, **fields), protocol.answer(ref, **fields))
        assert text(first) == text(second) != ""
        usage = first[-1].usage
        assert usage.completion_tokens <= 20
        engine = worker._loop_thread
        assert engine is not None
        call = protocol.generate(ref, max_tokens=200, logit_bias={"65": 100}, temperature=0)
        async for _ in protocol.deltas(call):
            break
        call.cancel()
        await until(lambda: worker.load_report().running == 0)
        stopped = engine.steps
        await protocol.answer(ref, max_tokens=1)
        assert engine.steps <= stopped + 2

    run(scenario)
