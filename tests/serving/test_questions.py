"""Embeddings, tokenize and detokenize of Workers, through a Router."""

import array
import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from router_kit import Scripted, http, ready, system

from pulsing.serving import (
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    RequestError,
    Router,
    TokenizeRequest,
    Tokens,
    Usage,
    Worker,
)
from pulsing.serving._questions import parse_tokens


class Embedder(Worker):
    """Two numbers an input: its length and its number."""

    def embed(self, request: EmbedRequest) -> Any:
        if request.dimensions not in (None, 2):
            raise RequestError(400, "this model has 2 dimensions", "dimensions")
        special = {"list": [[1.0, 2.0]], "short": [], "nan": [[math.nan, 0]], "odd": [["x"]]}.get(
            str(request.inputs[0])
        )
        if special is not None:
            return special
        vectors = [array.array("d", [len(one), at]) for at, one in enumerate(request.inputs)]
        return Embeddings(vectors, Usage(sum(map(len, request.inputs)), 0))


class Speller(Worker):
    """One token a character."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        yield Delta(request.last_text, finish_reason="stop")

    async def tokenize(self, request: TokenizeRequest) -> Tokens | list[int]:
        text = request.prompt
        if text is None:
            text = "".join(message["content"] for message in request.messages) + "|" * request.add_generation_prompt
        ids = [1] * request.add_special_tokens + [ord(char) for char in text]
        return Tokens(ids, [chr(one) for one in ids]) if request.texts else ids

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def through_a_router(worker: Worker, scenario: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with system() as node:
            await node.spawn(worker, name="worker")
            router = Router("127.0.0.1", 0, "alias")
            await node.spawn(router, name="router")
            addr = router.addr
            assert addr is not None
            await ready(addr, 1)

            async def post(path: str, **body: Any) -> tuple[int, Any]:
                status, _, text = await http(addr, "POST", path, body)
                return status, json.loads(text)

            await scenario(post)

    asyncio.run(run())


def test_a_worker_that_embeds_needs_nothing_else() -> None:
    async def scenario(post: Any) -> None:
        status, body = await post("/v1/embeddings", model="alias", input=["abc", [1, 2]], dimensions=2)
        assert (status, body["model"], body["usage"]) == (200, "alias", {"prompt_tokens": 5, "total_tokens": 5})
        assert [one["embedding"] for one in body["data"]] == [[3.0, 0.0], [2.0, 1.0]]
        status, body = await post("/v1/embeddings", input="list", encoding_format="base64")
        assert (status, body["data"][0]["embedding"]) == (200, "AACAPwAAAEA=")
        assert (await post("/v1/embeddings", input=[3]))[1]["data"][0]["embedding"] == [1.0, 0.0]
        for given, says in (("short", "0 vectors for 1"), ("nan", "no number"), ("odd", "engine failed")):
            status, body = await post("/v1/embeddings", input=given)
            assert (status, body["error"]["type"]) == (500, "server_error")
            assert says in body["error"]["message"]
        status, body = await post("/v1/embeddings", input="x", dimensions=3)
        assert (status, body["error"]["param"]) == (400, "dimensions")
        status, body = await post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
        assert "/v1/embeddings" in body["error"]["message"]

    through_a_router(Embedder(), scenario)


def test_tokens_are_what_the_worker_says() -> None:
    async def scenario(post: Any) -> None:
        status, body = await post("/tokenize", model="alias", prompt="aé")
        assert (status, body) == (
            200,
            {"count": 3, "max_model_len": 0, "tokens": [1, 97, 233], "token_strs": None},
        )
        status, body = await post("/v1/tokenize", messages=[{"role": "user", "content": "é"}], return_token_strs=True)
        assert (body["tokens"], body["token_strs"]) == ([233, 124], ["é", "|"])
        status, body = await post(
            "/tokenize",
            messages=[{"role": "user", "content": "a"}],
            add_generation_prompt=False,
            add_special_tokens=True,
        )
        assert body["tokens"] == [1, 97]
        assert await post("/detokenize", tokens=[97, 233]) == (200, {"prompt": "aé"})
        status, body = await post("/tokenize", messages=[{"role": "nobody", "content": "x"}])
        assert (status, body["error"]["param"]) == (400, "messages[0].role")

    through_a_router(Speller(), scenario)


def test_what_a_worker_answers_is_told_from_its_methods() -> None:
    assert Embedder().apis() == ("embeddings",)
    assert Speller().apis() == ("chat.completions", "completions", "tokenize", "detokenize")
    assert Scripted().apis() == ("chat.completions", "completions")
    with pytest.raises(TypeError, match="needs `async def generate"):
        type("Nothing", (Worker,), {})()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": "\ud800"}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": True}, "dimensions"),
    ],
)
def test_embed_requests_are_checked(body: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        EmbedRequest.from_body(json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"messages": {}}, "messages"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "x", "chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_tokenize_requests_are_checked(body: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        TokenizeRequest.from_body(json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, param)
    for tokens in (None, "x", [1.5], [-1]):
        with pytest.raises(RequestError):
            parse_tokens(json.dumps({"tokens": tokens}).encode())
