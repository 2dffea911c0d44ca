"""Pairs of vLLM engines that share requests, and what vLLM tells of its KV cache: with the real engine.

The halves meet by vLLM's ExampleConnector, files in a directory: the connector that needs nothing but a CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import vllm_kit
from router_kit import chat, http, ready, system, until

from pulsing._core import prompt_blocks
from pulsing.serving import Delta, GenerateRequest, RequestError, VllmWorker, start_router, stop_router

# torch, transformers and vLLM warn of one another's plans; none of it is ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

T = TypeVar("T")
# Longer than one of the CPU's blocks of 128 tokens: shorter prompts have nothing to hand over.
STORY = "Here is a story about a city. " * 12 + "What was the story about?"
# Holds two prompts of LONG and no third one.
SMALL_CACHE = {"num_gpu_blocks_override": 16}


def long(number: int) -> str:
    return f"Story {number}: " + f"the city number {number} is large. " * 100


def transfer(folder: Path, kv_role: str) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": kv_role, "kv_connector_extra_config": extra}


@dataclass
class Pair:
    """A prefill and a decode worker behind a Router, and the loop they live on."""

    runner: asyncio.Runner
    prefill: VllmWorker
    decode: VllmWorker
    router: str
    storage: Path
    handed_over: int = 0
    """Tokens that the decode engine got from the other one."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def watch(self) -> None:
        """Counts what comes over, by the engine's own statistics."""
        load = self.decode._engine.load  # type: ignore[union-attr]
        record = load.record

        def counted(scheduler_stats: Any, *more: Any, **named: Any) -> None:
            stats = getattr(scheduler_stats, "connector_prefix_cache_stats", None)
            self.handed_over += 0 if stats is None else stats.hits
            record(scheduler_stats, *more, **named)

        load.record = counted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    environment = pytest.MonkeyPatch()
    for name, value in vllm_kit.ENVIRONMENT.items():
        environment.setenv(name, value)
    yield vllm_kit.convert(tmp_path_factory.mktemp("model") / "SmolLM2")
    environment.undo()


@pytest.fixture(scope="module")
def tidy() -> Iterator[None]:
    yield
    # vLLM leaves a context of its own to the collector, which warns of it: here, where warnings are no errors.
    gc.collect()


@pytest.fixture(scope="module")
def pair(tidy: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    storage = tmp_path_factory.mktemp("kv")
    settings = {**vllm_kit.ENGINE, **SMALL_CACHE}
    prefill = VllmWorker(str(model), role="prefill", kv_transfer_config=transfer(storage, "kv_producer"), **settings)
    decode = VllmWorker(str(model), role="decode", kv_transfer_config=transfer(storage, "kv_consumer"), **settings)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> Any:
            node = await stack.enter_async_context(system())
            other = await stack.enter_async_context(system(node.addr))
            await node.spawn(prefill, name="worker", public=True)
            await other.spawn(decode, name="worker", public=True)
            await until("two ready engines", lambda: "loading" not in (prefill.state, decode.state), 300)
            assert (prefill.state, decode.state) == ("ready", "ready"), (prefill.load_report(), decode.load_report())
            router = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="cache_aware", debug_routing=True)
            await ready(router.addr, 2)
            return router

        try:
            router = runner.run(start())
            yield Pair(runner, prefill, decode, router.addr, storage)
            runner.run(stop_router(router))
        finally:
            runner.run(stack.aclose())


async def alone(worker: VllmWorker, prompt: str, max_tokens: int) -> str:
    """What one engine answers that does all of the request."""
    from pulsing.serving._vllm_request import answer

    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": max_tokens}
    request = GenerateRequest.from_body("chat.completions", json.dumps(body).encode())
    assert worker._engine is not None
    text = "".join([delta.text async for delta in answer(worker._engine, request, max_tokens)])
    # It must not know the prompt when it is asked to go on from what the other one has read.
    assert await worker._engine.llm.reset_prefix_cache()
    return text


def test_s5_a_pair_of_vllm_workers_answers_as_one_does_and_reads_each_prompt_once(pair: Pair) -> None:
    async def run() -> None:
        expected = await alone(pair.decode, STORY, 16)
        pair.watch()
        # This connector stores whatever it has not found, on either side.
        for folder in pair.storage.iterdir():
            shutil.rmtree(folder)
        status, body = await chat(pair.router, STORY, temperature=0, max_tokens=16)
        assert (status, body["choices"][0]["message"]["content"]) == (200, expected)
        assert len(expected) > 20
        assert pair.handed_over == 128, "one block of 128 tokens is whole"
        # What came over was in no cache; what the prefill engine still has, was.
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        status, body = await chat(pair.router, STORY, temperature=0, max_tokens=16, stream=True)
        assert status == 200
        assert "".join(
            json.loads(event[6:])["choices"][0]["delta"].get("content") or ""
            for event in body.strip().split("\n\n")
            if event != "data: [DONE]"
        ) == (expected)
        _, body = await chat(pair.router, STORY, temperature=0, max_tokens=2)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}

    pair.run(run())


def test_s4_a_pair_goes_on_with_what_another_one_has_begun(pair: Pair) -> None:
    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 16}

    async def half(worker: VllmWorker, **more: Any) -> list[Delta]:
        request = GenerateRequest.from_body("chat.completions", json.dumps(body).encode(), **more)
        return [delta async for delta in worker.generate(request)]

    async def both(**more: Any) -> list[Delta]:
        read = await half(pair.prefill, **more)
        return await half(pair.decode, **more, handoff=read[-1].handoff)

    def text(deltas: list[Delta]) -> str:
        return "".join(delta.text for delta in deltas)

    async def run() -> None:
        alike = [(one.metadata()["continue"], one.metadata()["fingerprint"]) for one in (pair.prefill, pair.decode)]
        assert alike[0] == alike[1]
        assert alike[0][0] == "greedy"
        whole = await both()
        for cut in (1, 4):
            had = whole[:cut]
            ids = tuple(token for delta in had for token in delta.token_ids)
            rest = await both(continue_text=text(had), continue_tokens=ids)
            assert text(had) + text(rest) == text(whole)
            assert rest[-1].usage is not None
            assert whole[-1].usage is not None
            assert rest[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens
            assert len(ids) + rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens

    pair.run(run())


def test_s4_a_pair_and_a_worker_that_does_all_go_on_with_each_others_streams(pair: Pair) -> None:
    from pulsing.serving._vllm_request import answer

    body = json.dumps({"messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 16}).encode()

    async def run() -> None:
        expected = await alone(pair.decode, STORY, 16)
        assert pair.decode._engine is not None
        read = [delta async for delta in pair.prefill.generate(GenerateRequest.from_body("chat.completions", body))]
        request = GenerateRequest.from_body("chat.completions", body, handoff=read[-1].handoff)
        had = [delta async for delta in pair.decode.generate(request)][:4]
        text = "".join(delta.text for delta in had)
        ids = tuple(token for delta in had for token in delta.token_ids)
        assert expected.startswith(text)
        assert len(ids) >= 3
        # As a worker that does all does it: of what the pair has read nothing is known there.
        assert await pair.decode._engine.llm.reset_prefix_cache()
        for folder in pair.storage.iterdir():
            shutil.rmtree(folder)
        request = GenerateRequest.from_body("chat.completions", body, continue_text=text, continue_tokens=ids)
        rest = [delta async for delta in answer(pair.decode._engine, request, 16)]
        assert text + "".join(delta.text for delta in rest) == expected

    pair.run(run())


def test_s4_pairs_and_workers_that_do_all_are_alike_unless_a_connector_packs_what_it_hands_over(
    model: Path, tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from pulsing.serving._vllm_engine import settings_of

    def settings(**more: Any) -> tuple[str, str]:
        return settings_of(AsyncEngineArgs(model=str(model), **{**vllm_kit.ENGINE, **more}).create_engine_config())

    whole = settings()
    assert settings(kv_transfer_config=transfer(tmp_path, "kv_producer")) == whole
    assert settings(kv_transfer_config=transfer(tmp_path, "kv_consumer")) == whole
    assert settings(dtype="float32") != whole
    packing = settings(kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    assert packing != whole
    assert packing == settings(kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"})


def test_what_a_pair_cannot_do_is_refused_in_words(pair: Pair) -> None:
    async def run() -> None:
        status, body = await chat(pair.router, "hi", n=2)
        assert (status, body["error"]["param"]) == (400, "n")
        assert "one choice" in body["error"]["message"]
        request = GenerateRequest.from_body("chat.completions", b'{"messages":[{"role":"user","content":"x"}]}')
        with pytest.raises(RequestError, match="ask a Router"):
            await anext(aiter(pair.decode.generate(request)))
        request = GenerateRequest.from_body(
            "chat.completions", b'{"messages":[{"role":"user","content":"x"}]}', handoff=b"not ours"
        )
        with pytest.raises(RequestError, match="not vLLM's"):
            await anext(aiter(pair.decode.generate(request)))

    pair.run(run())


def test_s5_what_vllm_evicts_is_forgotten_by_the_router(pair: Pair) -> None:
    def blocks(number: int) -> list[int]:
        body = {"messages": [{"role": "user", "content": long(number)}]}
        return prompt_blocks("chat.completions", json.dumps(body).encode())[0]

    def held(number: int) -> int:
        return sum(block in pair.prefill._blocks for block in blocks(number))

    async def known() -> int:
        _, _, page = await http(pair.router, "GET", "/v1/_routing")
        (row,) = [one for one in json.loads(page)["workers"] if one["role"] == "prefill"]
        return int(row["cached_blocks"])

    async def run() -> None:
        for number in (1, 2):
            assert (await chat(pair.router, long(number), temperature=0, max_tokens=1))[0] == 200
        whole = len(blocks(1))
        assert whole == 10
        await until("vLLM to tell what it has stored", lambda: held(1) == held(2) == whole)
        for number in (3, 4, 5):
            assert (await chat(pair.router, long(number), temperature=0, max_tokens=1))[0] == 200
        await until("vLLM to tell what it has evicted", lambda: held(1) == held(2) == 0 and held(5) == whole)

        async def all_told() -> bool:
            return await known() == len(pair.prefill._blocks)

        await until("the Router to know what the worker has", all_told)
        # All at once.
        assert pair.prefill._engine is not None
        assert await pair.prefill._engine.llm.reset_prefix_cache()
        assert (await chat(pair.router, "hi", temperature=0, max_tokens=1))[0] == 200

        async def nothing() -> bool:
            return await known() == 0

        await until("the Router to forget", nothing)

    pair.run(run())


def test_halves_of_a_fleet_are_paired_and_answer_as_one_engine_does(pair: Pair, model: Path, tmp_path: Path) -> None:
    expected = pair.run(alone(pair.decode, STORY, 16))
    storage = tmp_path / "kv"
    storage.mkdir()
    settings = {**vllm_kit.ENGINE, **SMALL_CACHE, "served_model_name": "SmolLM2", "enable_prompt_tokens_details": True}
    halves = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    file = tmp_path / "fleet.yaml"
    file.write_text(
        json.dumps(
            {
                "fleet": "pairs",
                "join": {"seeds": "${spec.front.node}", "name": "worker"},
                "routers": [{"name": "front", "model_name": "alias", "worker_name": "worker"}],
                "engines": [
                    {
                        "engine": "vllm",
                        "model": str(model),
                        "program": [sys.executable, "-m", "vllm.entrypoints.openai.api_server"],
                        "env": vllm_kit.ENVIRONMENT,
                        "groups": [
                            {
                                "worker_type": role,
                                "overrides": {**settings, "kv_transfer_config": transfer(storage, kv_role)},
                            }
                            for role, kv_role in halves
                        ],
                    }
                ],
            }
        )
    )
    state = tmp_path / "state"
    words = [sys.executable, "-m", "pulsing.cli", "fleet", "up", str(file)]
    said = tmp_path / "said"
    with said.open("wb") as output:
        launcher = subprocess.Popen(
            words, stdout=output, stderr=output, env={**os.environ, "PULSING_FLEET_DIR": str(state)}
        )
    try:
        router = ""
        deadline = time.monotonic() + 300
        while not router:
            assert launcher.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            snapshot = state / "pairs" / "state.json"
            cells = json.loads(snapshot.read_text())["cells"] if snapshot.exists() else []
            if len(cells) == 3 and all(cell["joined"] is not False for cell in cells):
                (front,) = [cell for cell in cells if cell["name"] == "front/0"]
                router = front["addrs"]["0"].get("primary", "")
            time.sleep(0.1)

        async def run() -> None:
            await ready(router, 2)
            for stream in (False, True):
                status, body = await chat(router, STORY, temperature=0, max_tokens=16, stream=stream)
                assert status == 200, body
                if not stream:
                    assert body["choices"][0]["message"]["content"] == expected
            assert list(storage.iterdir()), "the prefill server has stored what it read"

        pair.run(run())
    finally:
        launcher.terminate()
        launcher.wait(60)


def test_s5_only_what_tells_of_prompts_as_such_is_passed_on() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    from pulsing.serving._blocks import HeldBlocks
    from pulsing.serving._token_blocks import TokenBlocks
    from pulsing.serving._vllm_events import KvNews

    held = HeldBlocks()
    tokens = TokenBlocks(held.stored, held.dropped, held.cleared)
    news = KvNews(tokens)
    tokens.begin((7,), 256, range(16))

    def stored(**other: Any) -> BlockStored:
        fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": list(range(16)), "block_size": 16}
        named = {"lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 1}
        return BlockStored(**{**fields, **named, "kv_cache_spec_kind": "full_attention", **other})

    for elsewhere in ({"medium": "CPU"}, {"kv_cache_spec_kind": "sliding_window"}, {"extra_keys": [("salt",)]}):
        news.hear(stored(**elsewhere))
        assert 7 not in held, elsewhere
    news.hear(stored(extra_keys=[None]))
    assert 7 in held
    news.hear(BlockRemoved(block_hashes=[1], medium="CPU", group_idx=1))
    news.hear(BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0))
    assert 7 in held
    news.hear(BlockRemoved(block_hashes=[1], medium="GPU", group_idx=1))
    assert 7 not in held
    tokens.begin((7,), 256, range(16))
    news.hear(stored())
    assert 7 in held
    news.hear(AllBlocksCleared())
    assert 7 not in held


def test_s5_lost_news_of_vllm_is_noticed_and_nothing_is_left_open(tmp_path: Path) -> None:
    import msgspec
    import zmq
    import zmq.asyncio
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    from pulsing.serving._blocks import HeldBlocks
    from pulsing.serving._token_blocks import TokenBlocks
    from pulsing.serving._vllm_events import follow

    async def run() -> None:
        held = HeldBlocks()
        tokens = TokenBlocks(held.stored, held.dropped, held.cleared)
        tokens.begin((7,), 256, range(16))
        endpoint = f"ipc://{tmp_path / 'events'}"
        event = BlockStored(
            block_hashes=[1], parent_block_hash=None, token_ids=list(range(16)), block_size=16, lora_id=None,
            medium="GPU", lora_name=None,
        )  # fmt: skip
        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
            publisher.bind(endpoint)
            following = asyncio.create_task(follow([endpoint], tokens, "m"))
            sent = 0

            async def send(number: int, events: list[Any]) -> None:
                payload = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
                await publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])

            async def heard() -> bool:
                nonlocal sent
                sent += 1
                await send(sent, [event])
                return 7 in held

            # Who subscribes late misses what came before, which is no loss.
            await until("news to arrive", heard)
            await send(sent + 2, [])
            await until("the loss to be noticed", lambda: 7 not in held)
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following

    asyncio.run(run())
