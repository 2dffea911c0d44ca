"""The embedded engine with its default model. No runtime needed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import gguf_path

from pulsing.serving._errors import RequestError
from pulsing.serving._request import GenerateRequest
from pulsing.serving.mistralrs import MistralRsWorker
from pulsing.serving.worker import Delta, TokenizeRequest

QUESTION = "Tell me the capital of France in one sentence."
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def worker() -> Iterator[MistralRsWorker]:
    worker = MistralRsWorker()
    worker.load()
    yield worker
    asyncio.run(worker.close())


def chat(content: str = QUESTION, **fields: Any) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0, **fields}
    return GenerateRequest.from_body("chat.completions", json.dumps(body).encode())


def completion(**fields: Any) -> GenerateRequest:
    body = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0, **fields}
    return GenerateRequest.from_body("completions", json.dumps(body).encode())


async def collect(worker: MistralRsWorker, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in worker.generate(request)]


def run(worker: MistralRsWorker, request: GenerateRequest) -> list[Delta]:
    return asyncio.run(collect(worker, request))


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def counts(deltas: list[Delta]) -> tuple[int, int]:
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    usage = deltas[-1].usage
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens


def test_it_answers_token_by_token(worker: MistralRsWorker) -> None:
    assert worker.model == gguf_path().stem == "SmolLM2-135M-Instruct.Q4_1"
    assert worker.max_model_len == 8192
    assert worker.capacity == 1
    deltas = run(worker, chat())
    assert text(deltas) == ANSWER
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert counts(deltas) == (40, 8)
    assert len(deltas) > 4


def test_it_tokenizes_texts_also_while_a_request_runs(worker: MistralRsWorker) -> None:
    async def ask() -> None:
        answering = asyncio.create_task(collect(worker, chat(max_tokens=8)))
        body = json.dumps({"prompt": "Paris é", "return_token_strs": True}).encode()
        tokens = await worker.tokenize(TokenizeRequest.from_body(body))
        assert len(tokens.texts or ()) == len(tokens.ids)
        assert await worker.detokenize(list(tokens.ids)) == "Paris é"
        assert text(await answering)
        messages = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
        with pytest.raises(RequestError, match="prompt, not messages"):
            await worker.tokenize(TokenizeRequest.from_body(messages))

    asyncio.run(ask())


def test_length(worker: MistralRsWorker) -> None:
    deltas = run(worker, chat(max_tokens=3))
    assert text(deltas) == "The capital of"
    assert deltas[-1].finish_reason == "length"
    assert counts(deltas) == (40, 3)


def test_a_stop_string_inside_tokens(worker: MistralRsWorker) -> None:
    deltas = run(worker, chat(stop=["is Par", "never"]))
    assert text(deltas) == "The capital of France "
    assert deltas[-1].finish_reason == "stop"
    # The engine's own count of the prompt, and the tokens up to the one that completed the stop string.
    assert counts(deltas) == (40, 6)


def test_the_beginning_of_a_stop_string_is_text_when_it_goes_on_otherwise(worker: MistralRsWorker) -> None:
    assert text(run(worker, chat(stop=["is Pariser", "Paris.x"]))) == ANSWER


def test_completions_come_in_one_piece(worker: MistralRsWorker) -> None:
    deltas = run(worker, completion())
    assert [delta.text for delta in deltas] == [" Paris.\n"]
    assert counts(deltas) == (5, 3)
    stopped = run(worker, completion(stop="is."))
    assert (text(stopped), stopped[-1].finish_reason) == (" Par", "stop")
    nothing = run(worker, completion(max_tokens=0))
    assert (text(nothing), nothing[-1].finish_reason, counts(nothing)) == ("", "length", (5, 0))


def test_several_choices_and_prompts(worker: MistralRsWorker) -> None:
    deltas = run(worker, completion(prompt=["The capital of France is", "The capital of Italy is"], n=2, max_tokens=1))
    assert [text(deltas, index) for index in range(4)] == [" Paris", " Paris", " Rome", " Rome"]
    assert counts(deltas) == (10, 4)


def test_requests_at_once_take_turns(worker: MistralRsWorker) -> None:
    async def both() -> list[list[Delta]]:
        return list(
            await asyncio.gather(collect(worker, chat(max_tokens=3)), collect(worker, completion(max_tokens=2)))
        )

    first, second = asyncio.run(both())
    assert (text(first), text(second)) == ("The capital of", " Paris.")


def test_closing_the_generator_frees_the_engine(worker: MistralRsWorker) -> None:
    async def scenario() -> tuple[float, float]:
        answer = worker.generate(chat("Write a very long story about a dragon.", max_tokens=2000))
        begun = time.monotonic()
        for _ in range(12):
            await anext(answer)
        twelve_tokens = time.monotonic() - begun
        await answer.aclose()
        begun = time.monotonic()
        await collect(worker, completion(max_tokens=1))
        return twelve_tokens, time.monotonic() - begun

    twelve_tokens, waited = asyncio.run(scenario())
    # Had the story gone on, this would be the time of nearly 2000 tokens.
    assert waited < 10 * twelve_tokens


def test_a_prompt_that_is_too_long(worker: MistralRsWorker) -> None:
    with pytest.raises(RequestError, match="maximum context length is 8192 tokens") as caught:
        run(worker, chat("hi " * 8200))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("prompt", ["", ["The capital of France is", ""]])
def test_an_empty_prompt_is_the_clients_mistake(worker: MistralRsWorker, prompt: Any) -> None:
    with pytest.raises(RequestError, match="no empty prompt") as caught:
        run(worker, completion(prompt=prompt))
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_what_it_cannot_do_it_does_not_list() -> None:
    assert not MistralRsWorker.supports & {"seed", "logprobs", "tools", "response_format", "prompt_tokens"}


def test_tool_calls_of_earlier_turns_are_refused(worker: MistralRsWorker) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(RequestError, match="cannot read tool calls") as caught:
        run(worker, chat(messages=messages))
    assert caught.value.param == "messages[1].tool_calls"


def test_a_file_that_is_no_model_fails_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"x")
    with pytest.raises(RuntimeError, match=r"cannot load bad: .*GGUF") as caught:
        MistralRsWorker(str(file)).load()
    assert "\n" not in str(caught.value)


def test_it_writes_nothing_to_stdout() -> None:
    program = (
        "from pulsing.serving.mistralrs import MistralRsWorker as W; w = W(); w.load(); "
        "import os; assert 'RUST_LOG' not in os.environ"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_only_gguf_files() -> None:
    with pytest.raises(ValueError, match="serves GGUF files"):
        MistralRsWorker("some/repo")
    with pytest.raises(FileNotFoundError, match=r"no GGUF file"):
        MistralRsWorker("/not/there.gguf")
    with pytest.raises(FileNotFoundError, match=r"chat_template '/not/there' is no file"):
        MistralRsWorker(chat_template="/not/there")
