"""Prefill and decode on two servers or workers, paired by the Router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_server import EngineServer
from router_kit import chat, ready, system

from pulsing.core import ActorSystem
from pulsing.serving import Delta, EngineWorker, GenerateRequest, Worker, start_router, stop_router

PARAMS = {"remote_engine_id": "e1", "remote_block_ids": [1, 2], "remote_port": 12345678901234567890}


def bodies(server: EngineServer) -> list[dict[str, Any]]:
    return [json.loads(body) for _, body in server.seen]


@contextlib.asynccontextmanager
async def paired(node: ActorSystem, pd: Any) -> AsyncIterator[tuple[str, EngineServer, EngineServer]]:
    """A Router's address and the two servers behind it."""
    async with (
        system(node.addr) as other,
        EngineServer(kv_transfer_params=PARAMS).running() as prefill,
        EngineServer().running() as decode,
    ):
        await node.spawn(EngineWorker(prefill.url, role="prefill", pd=pd, bootstrap_port=9001), name="worker")
        await other.spawn(EngineWorker(decode.url, role="decode", pd=pd), name="worker")
        runner = await start_router(node, "127.0.0.1", 0, "alias")
        try:
            await ready(runner.addr, 2)
            yield runner.addr, prefill, decode
        finally:
            await stop_router(runner)


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_servers_are_asked_one_after_the_other(stream: bool) -> None:
    async def run() -> None:
        async with system() as node, paired(node, "sequential") as (addr, prefill, decode):
            status, body = await chat(addr, "say this", stream=stream, max_tokens=50)
            assert status == 200
            assert "say" in (body if stream else body["choices"][0]["message"]["content"])
            (first,), (second,) = bodies(prefill), bodies(decode)
            assert (first["max_tokens"], first["stream"]) == (1, False)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert second["kv_transfer_params"] == PARAMS
            assert (second["max_tokens"], second.get("stream", False)) == (50, stream)
            (headers, _), (others, _) = prefill.seen[0], decode.seen[0]
            assert headers["x-request-id"] == others["x-request-id"]

    asyncio.run(run())


def test_sglang_servers_are_asked_at_once_and_told_where_to_meet() -> None:
    async def run() -> None:
        async with system() as node, paired(node, "concurrent") as (addr, prefill, decode):
            # A server that decodes has nothing to say before the other one has read.
            decode.pause = 0.2
            status, body = await chat(addr, "say this", stream=True)
            assert status == 200
            assert "this" in body
            (first,), (second,) = bodies(prefill), bodies(decode)
            assert first == second
            assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 9001)
            assert 0 <= first["bootstrap_room"] < 2**63

    asyncio.run(run())


class Reads(Worker):
    role, pd = "prefill", "sequential"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        yield Delta(finish_reason="length", handoff=request.last_text.upper().encode())


class Writes(Worker):
    role, pd = "decode", "sequential"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        yield Delta(request.handoff.decode())


def test_a_pair_of_workers_of_ones_own() -> None:
    async def run() -> None:
        async with system() as node, system(node.addr) as other:
            await node.spawn(Reads("m"), name="worker")
            await other.spawn(Writes("m"), name="worker")
            runner = await start_router(node, "127.0.0.1", 0, "alias")
            try:
                await ready(runner.addr, 2)
                status, body = await chat(runner.addr, "read me")
                assert (status, body["choices"][0]["message"]["content"]) == (200, "READ ME")
            finally:
                await stop_router(runner)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"role": "chef"}, "role must be one of aggregated, prefill, decode"),
        ({"role": "prefill"}, "role=prefill needs pd=sequential"),
        ({"pd": "sequential"}, "this one does all"),
        ({"role": "prefill", "pd": "concurrent", "bootstrap_port": 0}, "bootstrap_port must be a port"),
    ],
)
def test_halves_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineWorker("http://127.0.0.1:1", **settings)
