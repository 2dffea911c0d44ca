"""A real small model through the transformers engine. No runtime needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from models import gguf_path

from pulsing.serving._request import GenerateRequest
from pulsing.serving.transformers import TransformersWorker
from pulsing.serving.worker import Delta

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def worker() -> Iterator[TransformersWorker]:
    worker = TransformersWorker(str(gguf_path()), device="cpu")
    worker.load()
    yield worker
    asyncio.run(worker.close())


def run(worker: TransformersWorker, messages: list[dict[str, Any]], **fields: Any) -> list[Delta]:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    request = GenerateRequest.from_body("chat.completions", json.dumps(body).encode())

    async def collect() -> list[Delta]:
        return [delta async for delta in worker.generate(request)]

    return asyncio.run(collect())


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_the_models_own_template_and_a_true_answer(worker: TransformersWorker) -> None:
    assert worker.model == "SmolLM2-135M-Instruct.Q4_1"
    assert worker.max_model_len == 8192
    deltas = run(worker, FRANCE)
    assert text(deltas) == "The capital of France is Paris."
    assert deltas[-1].finish_reason == "stop"
    usage = deltas[-1].usage
    assert usage is not None
    # 37 tokens as the template writes the chat; seven words and signs and the end token.
    assert (usage.prompt_tokens, usage.completion_tokens) == (37, 8)
    assert len(deltas) > 4  # token by token


def test_a_stop_string(worker: TransformersWorker) -> None:
    deltas = run(worker, FRANCE, stop=["is Par"])
    assert text(deltas) == "The capital of France "
    assert deltas[-1].finish_reason == "stop"


def test_two_turns(worker: TransformersWorker) -> None:
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of France is Paris."}]
    deltas = run(worker, [*messages, {"role": "user", "content": "Repeat the name of that city."}])
    assert "Paris" in text(deltas)


def test_characters_of_several_tokens_arrive_whole(worker: TransformersWorker) -> None:
    deltas = run(worker, [{"role": "user", "content": "Repeat exactly: 日本語 😀 é"}], max_tokens=40)
    assert "日本語" in text(deltas)
    assert all("\ufffd" not in delta.text for delta in deltas)
