"""The transformers engine on a tiny random GPT-2: its decode loop, sampling, limits, cancellation."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import tiny_gpt2

from pulsing.serving._errors import RequestError
from pulsing.serving._hf_text import PLAIN_TEMPLATE
from pulsing.serving._request import GenerateRequest
from pulsing.serving.transformers import TransformersWorker
from pulsing.serving.worker import Delta, TokenizeRequest

CONTEXT = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"), positions=CONTEXT)


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[TransformersWorker]:
    worker = TransformersWorker(str(folder), device="cpu", served_model_name="tiny")
    worker.load()
    yield worker
    asyncio.run(worker.close())


def chat(content: str = "hello", **fields: Any) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, **fields}
    return GenerateRequest.from_body("chat.completions", json.dumps(body).encode())


def completion(
    prompt: Any = "hello", *, continue_text: str = "", continue_tokens: tuple[int, ...] = (), **fields: Any
) -> GenerateRequest:
    body = json.dumps({"prompt": prompt, "max_tokens": 12, **fields}).encode()
    return GenerateRequest.from_body("completions", body, continue_text=continue_text, continue_tokens=continue_tokens)


async def collect(worker: TransformersWorker, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in worker.generate(request)]


def run(worker: TransformersWorker, request: GenerateRequest) -> list[Delta]:
    return asyncio.run(collect(worker, request))


def test_tokenize_and_detokenize_are_the_tokenizers(worker: TransformersWorker) -> None:
    def asked(**body: Any) -> Any:
        return worker.tokenize(TokenizeRequest.from_body(json.dumps(body).encode()))

    tokens = asked(prompt="é a", return_token_strs=True)
    assert "".join(tokens.texts or ()).endswith(" a")
    assert worker.detokenize(list(tokens.ids)) == "é a"
    assert asked(prompt="é a").texts is None
    messages = [{"role": "user", "content": "hi"}]
    with_answer, without = asked(messages=messages), asked(messages=messages, add_generation_prompt=False)
    assert worker.detokenize(list(with_answer.ids)) == "User: hi\nAssistant:"
    assert list(with_answer.ids)[: len(without.ids)] == list(without.ids)
    assert run(worker, chat("hi", max_tokens=1))[-1].usage.prompt_tokens == len(with_answer.ids)
    with pytest.raises(RequestError, match="vocabulary"):
        worker.detokenize([10**6])


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tokens(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def raw(worker: TransformersWorker, ids: list[int]) -> str:
    assert worker._codec is not None
    return b"".join(worker._codec.token_bytes(token) for token in ids).decode("utf-8", "replace")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.002)


class TestGreedy:
    def test_equals_transformers_own_generate(self, worker: TransformersWorker) -> None:
        import torch

        request = completion("The cat", temperature=0, max_tokens=40)
        assert worker._codec is not None
        assert worker._loop_thread is not None
        ids = torch.tensor([worker._codec.encode("The cat", special=True)])
        own = worker._loop_thread._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        expected = own[0, ids.shape[1] :].tolist()
        deltas = run(worker, request)
        usage = deltas[-1].usage
        assert usage is not None
        assert tokens(deltas) == [token for token in expected if token not in worker._end_tokens]
        assert (usage.prompt_tokens, usage.completion_tokens) == (ids.shape[1], len(expected))
        assert text(deltas) == raw(worker, tokens(deltas))

    def test_a_prompt_longer_than_a_chunk_reads_the_same(self, worker: TransformersWorker) -> None:
        import torch

        prompt = "abcdefgh " * 50
        assert worker._codec is not None
        assert worker._loop_thread is not None
        ids = torch.tensor([worker._codec.encode(prompt, special=True)])
        assert ids.shape[1] > 256
        with torch.inference_mode():
            expected = int(worker._loop_thread._model(ids).logits[0, -1].argmax())
        deltas = run(worker, completion(prompt, temperature=0, max_tokens=1, logprobs=0))
        assert tokens(deltas) == [expected]

    def test_the_models_own_settings_decide_when_the_request_says_nothing(self, worker: TransformersWorker) -> None:
        assert tokens(run(worker, completion())) == tokens(run(worker, completion(temperature=0)))

    def test_top_p_zero_is_greedy(self, worker: TransformersWorker) -> None:
        assert tokens(run(worker, completion(temperature=1, top_p=0))) == tokens(run(worker, completion(temperature=0)))


class TestSampling:
    def test_the_same_seed_gives_the_same_answer(self, worker: TransformersWorker) -> None:
        first = tokens(run(worker, completion(temperature=1, seed=5, max_tokens=30)))
        assert first == tokens(run(worker, completion(temperature=1, seed=5, max_tokens=30)))
        assert first != tokens(run(worker, completion(temperature=1, seed=6, max_tokens=30)))

    def test_requests_at_once_do_not_disturb_each_other(self, worker: TransformersWorker) -> None:
        requests = [completion(f"prompt {at}", temperature=1, seed=at, max_tokens=25) for at in range(6)]
        alone = [tokens(run(worker, request)) for request in requests]

        async def together() -> list[list[Delta]]:
            return list(await asyncio.gather(*(collect(worker, request) for request in requests)))

        assert [tokens(deltas) for deltas in asyncio.run(together())] == alone

    def test_choices_of_one_seed_differ_and_repeat(self, worker: TransformersWorker) -> None:
        request = completion(temperature=1, seed=5, n=3, max_tokens=20)
        deltas = run(worker, request)
        answers = [tokens(deltas, index) for index in range(3)]
        assert len({tuple(answer) for answer in answers}) == 3
        assert answers[0] == tokens(run(worker, completion(temperature=1, seed=5, max_tokens=20)))
        again = run(worker, request)
        assert answers == [tokens(again, index) for index in range(3)]

    def test_top_k_one_is_the_best_token(self, worker: TransformersWorker) -> None:
        assert tokens(run(worker, completion(temperature=1.5, top_k=1))) == tokens(
            run(worker, completion(temperature=0))
        )

    def test_logit_bias_forbids_and_forces(self, worker: TransformersWorker) -> None:
        best = tokens(run(worker, completion(temperature=0)))[0]
        assert best not in tokens(run(worker, completion(temperature=0, logit_bias={str(best): -100})))
        assert set(tokens(run(worker, completion(temperature=0, logit_bias={"65": 100})))) == {65}

    def test_penalties_change_what_repeats(self, worker: TransformersWorker) -> None:
        forced = {"logit_bias": {"65": 30}, "temperature": 0, "max_tokens": 10}
        assert set(tokens(run(worker, completion(**forced)))) == {65}
        for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 50}):
            plain = {"temperature": 0, "max_tokens": 60}
            assert tokens(run(worker, completion(**plain, **penalty))) != tokens(run(worker, completion(**plain))), (
                penalty
            )


class TestEnds:
    def test_length(self, worker: TransformersWorker) -> None:
        deltas = run(worker, completion(temperature=0, max_tokens=5, logit_bias={"65": 100}))
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == 5

    def test_an_end_token_is_no_text(self, worker: TransformersWorker) -> None:
        (end,) = worker._end_tokens
        deltas = run(worker, completion(temperature=0, logit_bias={str(end): 100}))
        assert text(deltas) == ""
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == 1

    def test_a_stop_string_is_cut_and_ends_the_engines_work(self, worker: TransformersWorker) -> None:
        def readable(whole: str) -> str | None:
            pieces = (whole[i : i + 3] for i in range(10, 50))
            return next((piece for piece in pieces if piece.isprintable() and "\ufffd" not in piece), None)

        seeds = ({"temperature": 1, "seed": seed, "max_tokens": 60, "top_k": 60} for seed in range(50))
        answers = ((fields, text(run(worker, completion(**fields)))) for fields in seeds)
        fields, whole = next(one for one in answers if readable(one[1]))
        stop = readable(whole)
        deltas = run(worker, completion(**fields, stop=["zzzz", stop]))
        assert text(deltas) == whole[: whole.index(stop)]
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens < 60

    def test_exactly_one_finish_a_choice_and_one_usage(self, worker: TransformersWorker) -> None:
        deltas = run(worker, completion(["a", "bc"], n=2, temperature=1, seed=1))
        finishes = [delta.index for delta in deltas if delta.finish_reason is not None]
        assert sorted(finishes) == [0, 1, 2, 3]
        assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == 3

    def test_no_tokens_asked_for(self, worker: TransformersWorker) -> None:
        deltas = run(worker, completion(max_tokens=0))
        assert [(delta.text, delta.finish_reason) for delta in deltas] == [("", "length")]
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == 0

    def test_the_context_ends_the_answer(self, worker: TransformersWorker) -> None:
        deltas = run(worker, completion("a" * (CONTEXT - 4), max_tokens=1000, temperature=0, logit_bias={"65": 100}))
        assert deltas[-1].finish_reason == "length"
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == 4


class TestRefusals:
    def test_a_prompt_that_is_too_long(self, worker: TransformersWorker) -> None:
        with pytest.raises(RequestError, match=f"maximum context length is {CONTEXT} tokens") as caught:
            run(worker, chat("a" * 3000))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    @pytest.mark.parametrize("fields", [{"prompt": [9999]}, {"logit_bias": {"9999": 1}}])
    def test_a_token_that_does_not_exist(self, worker: TransformersWorker, fields: dict[str, Any]) -> None:
        with pytest.raises(RequestError, match="9999"):
            run(worker, completion(**fields))

    def test_messages_the_template_refuses(self, folder: Path) -> None:
        worker = TransformersWorker(
            str(folder), device="cpu", chat_template="{{ raise_exception('no user may speak') }}"
        )
        worker.load()
        with pytest.raises(RequestError, match="no user may speak") as caught:
            run(worker, chat())
        assert caught.value.status == 400
        asyncio.run(worker.close())

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"device": "tpu"}, "device"),
            ({"dtype": "int3"}, "dtype"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"capacity": 0}, "capacity"),
            ({"model_name": "./not/there"}, "no directory"),
            ({"model_name": "/not/there.gguf"}, "no GGUF file"),
            ({"model_name": ""}, "model_name is empty"),
        ],
    )
    def test_bad_arguments_are_named_at_once(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            TransformersWorker(**{"model_name": "gpt2", **arguments})

    def test_a_gpu_that_is_not_there(self, folder: Path) -> None:
        import torch

        wanted = f"cuda:{torch.cuda.device_count() + 1}"
        with pytest.raises(ValueError, match="torch sees"):
            TransformersWorker(str(folder), device=wanted).load()

    def test_a_context_longer_than_the_model(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="max_model_len 9999 is more than"):
            TransformersWorker(str(folder), device="cpu", max_model_len=9999).load()


class TestTemplate:
    def test_a_model_without_one_gets_the_plain_one_and_a_warning(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = TransformersWorker(str(folder), device="cpu")
        worker.load()
        assert "has no chat template" in caplog.text
        deltas = run(worker, chat("hi", temperature=0))
        expected = run(worker, completion("User: hi\nAssistant:", temperature=0))
        assert text(deltas) == text(expected)
        asyncio.run(worker.close())

    def test_one_from_a_file(self, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "template.jinja"
        file.write_text(PLAIN_TEMPLATE.replace("Assistant:", "{{ name }}>"), encoding="utf-8")
        worker = TransformersWorker(str(folder), device="cpu", chat_template=str(file))
        worker.load()
        deltas = run(worker, chat("hi", temperature=0, chat_template_kwargs={"name": "Bot"}))
        assert text(deltas) == text(run(worker, completion("User: hi\nBot>", temperature=0)))
        asyncio.run(worker.close())

    def test_neither_text_nor_file(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="neither Jinja text nor a readable file"):
            TransformersWorker(str(folder), device="cpu", chat_template="not-there.jinja").load()


class TestLogprobs:
    def test_chat(self, worker: TransformersWorker) -> None:
        deltas = run(worker, chat(temperature=0, logprobs=True, top_logprobs=2))
        content = [entry for delta in deltas if delta.logprobs for entry in delta.logprobs["content"]]
        assert len(content) == len(tokens(deltas))
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]

    def test_completions(self, worker: TransformersWorker) -> None:
        deltas = run(worker, completion(temperature=0, logprobs=2))
        parts = [delta.logprobs for delta in deltas if delta.logprobs]
        assert all(set(part) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"} for part in parts)
        assert sum(len(part["tokens"]) for part in parts) == len(tokens(deltas))


class TestContinuing:
    def test_from_tokens_and_from_text(self, worker: TransformersWorker) -> None:
        fields = {"temperature": 0, "max_tokens": 20}
        whole = run(worker, completion(**fields))
        ids = tokens(whole)
        rest = run(worker, completion(**fields, continue_tokens=tuple(ids[:8])))
        assert tokens(rest) == ids[8:]
        forced = {**fields, "logit_bias": {"65": 100}}
        answer = text(run(worker, completion(**forced)))
        assert text(run(worker, completion(**forced, continue_text=answer[:5]))) == answer[5:]

    @pytest.mark.parametrize(
        "fields",
        [
            {"temperature": 0},
            {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
            {"temperature": 1, "seed": 9, "top_k": 60},
            {"temperature": 1.2, "seed": 9, "top_p": 0.9, "frequency_penalty": 1.0},
        ],
    )
    def test_s4_wherever_an_answer_is_cut_another_worker_goes_on_as_if_it_had_not_been(
        self, worker: TransformersWorker, fields: dict[str, Any]
    ) -> None:
        fields = {**fields, "max_tokens": 24}
        whole = run(worker, completion(**fields))
        # Without stops, with one that is never met and holds text back, and with one that is met.
        answer = text(whole)
        for stop in ([], [answer[4] + "zzz", answer[9] + "zz"], [answer[11:13]]):
            stopped = {**fields, "stop": stop} if stop else fields
            expected = run(worker, completion(**stopped))
            for cut in range(1, len(expected)):
                had = expected[:cut]
                ids = tuple(token for delta in had for token in delta.token_ids)
                rest = run(worker, completion(**stopped, continue_text=text(had), continue_tokens=ids))
                assert text(had) + text(rest) == answer[: len(text(expected))] == text(expected), (stop, cut)
                assert rest[-1].finish_reason == expected[-1].finish_reason
                counted = len(ids) + rest[-1].usage.completion_tokens
                assert counted == expected[-1].usage.completion_tokens, (stop, cut)

    def test_tokens_of_another_text_are_refused(self, worker: TransformersWorker) -> None:
        with pytest.raises(RequestError, match="not those of the text"):
            run(worker, completion(continue_text="x", continue_tokens=(1, 2)))

    def test_s4_workers_that_answer_alike_have_one_fingerprint(
        self, worker: TransformersWorker, folder: Path, tmp_path: Path
    ) -> None:
        def of(path: Path, **options: Any) -> str:
            other = TransformersWorker(str(path), device="cpu", **options)
            other.load()
            asyncio.run(other.close())
            return other.fingerprint

        from transformers import AutoModelForCausalLM

        trained = shutil.copytree(folder, tmp_path / "trained")
        model = AutoModelForCausalLM.from_pretrained(folder)
        next(iter(model.parameters())).data.mul_(1.01)
        model.save_pretrained(trained)
        assert of(folder) == worker.fingerprint
        others = [of(folder, dtype="bfloat16"), of(folder, max_model_len=100), of(trained)]
        assert len({worker.fingerprint, *others}) == 4

    def test_nothing_left_to_do(self, worker: TransformersWorker) -> None:
        deltas = run(worker, completion(max_tokens=3, continue_tokens=(1, 2, 3)))
        assert [(delta.text, delta.finish_reason) for delta in deltas] == [("", "length")]


class TestStopping:
    def test_closing_the_generator_stops_the_engine_at_the_next_token(self, worker: TransformersWorker) -> None:
        engine = worker._loop_thread
        assert engine is not None

        async def scenario() -> int:
            answer = worker.generate(completion(max_tokens=400, temperature=0, logit_bias={"65": 100}))
            await anext(answer)
            await answer.aclose()
            at_close = engine.steps
            other = await collect(worker, completion(max_tokens=3, temperature=0, logit_bias={"65": 100}))
            assert len(tokens(other)) == 3
            # At most the token in flight, then the other request's prefill and two steps.
            return engine.steps - at_close

        assert asyncio.run(scenario()) <= 1 + 3

    def test_a_cancelled_task_stops_it_too(self, worker: TransformersWorker) -> None:
        engine = worker._loop_thread
        assert engine is not None

        async def scenario() -> None:
            task = asyncio.create_task(
                collect(worker, completion(max_tokens=450, temperature=0, logit_bias={"65": 100}))
            )
            before = engine.steps
            await until(lambda: engine.steps > before + 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stopped = engine.steps
            await collect(worker, completion(max_tokens=1))
            assert engine.steps <= stopped + 2

        asyncio.run(scenario())

    def test_a_slow_reader_suspends_the_engine(self, worker: TransformersWorker) -> None:
        engine = worker._loop_thread
        assert engine is not None

        async def scenario() -> None:
            before = engine.steps
            answer = worker.generate(completion(max_tokens=400, temperature=0, logit_bias={"65": 100}))
            await anext(answer)
            await until(lambda: engine.steps - before >= 64)
            # Another request gets its turn, and the resting one takes no step meanwhile.
            await collect(worker, completion(max_tokens=20, temperature=0, logit_bias={"65": 100}))
            assert engine.steps - before <= 64 + 1 + 20
            assert len([delta async for delta in answer]) == 399

        asyncio.run(scenario())

    def test_a_failing_step_ends_its_request_only(self, worker: TransformersWorker) -> None:
        async def scenario() -> None:
            bad = completion(max_tokens=5)
            good = asyncio.create_task(
                collect(worker, completion(max_tokens=50, temperature=0, logit_bias={"65": 100}))
            )
            answer = worker.generate(bad)
            engine = worker._loop_thread
            assert engine is not None
            forward = engine._forward

            def failing(job: Any, ids: list[int]) -> Any:
                if job.max_new == 5:
                    raise RuntimeError("out of memory")
                return forward(job, ids)

            engine._forward = failing  # type: ignore[method-assign]
            try:
                with pytest.raises(RuntimeError, match="out of memory"):
                    await anext(answer)
                assert len(tokens(await good)) == 50
            finally:
                del engine._forward

        asyncio.run(scenario())
