"""S5: workers tell Routers what their prompt caches hold and lose, and ``cache_aware`` goes by it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import protocol
import pytest
from router_kit import CHAT, http, ready, system, until

from pulsing._core import LoadReport, prompt_blocks
from pulsing.core import ActorSystem
from pulsing.serving import Delta, GenerateRequest, Worker, start_router, stop_router
from pulsing.serving._blocks import HeldBlocks
from pulsing.serving._token_blocks import TokenBlocks


def text(seed: int, blocks: int) -> str:
    """A prompt that fills that many blocks, and shares none with another seed's."""
    words = "".join(hashlib.sha256(f"{seed} {at}".encode()).hexdigest() for at in range(blocks * 4 + 1))
    return words[: blocks * 256]


def body(content: str) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": content}]}


def names(content: str) -> list[int]:
    return prompt_blocks("chat.completions", json.dumps(body(content)).encode())[0]


class Caching(Worker):
    """Stores what it is sent, in a cache that the test evicts from."""

    reports_blocks = True

    def __init__(self, model: str = "tiny") -> None:
        super().__init__(model)
        self.seen: list[tuple[int, ...]] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.seen.append(request.blocks)
        self.blocks_stored(request.blocks)
        yield Delta("ok", finish_reason="stop")


@contextlib.asynccontextmanager
async def routed(*workers: Worker) -> AsyncIterator[tuple[str, list[ActorSystem]]]:
    """Workers behind a Router: its address, and the workers' nodes."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(system())
        nodes = [await stack.enter_async_context(system(node.addr)) for _ in workers]
        for worker, its in zip(workers, nodes, strict=True):
            await its.spawn(worker, name="worker", public=True)
        runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="cache_aware", debug_routing=True)
        try:
            await ready(runner.addr, len(workers))
            yield runner.addr, nodes
        finally:
            await stop_router(runner)


async def ask(addr: str, content: str) -> str:
    """Why it went where it went."""
    host, port = addr.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body(content)).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nx-pulsing-debug: routing\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    raw = (await reader.read()).decode()
    writer.close()
    assert " 200 " in raw.splitlines()[0], raw
    return next(line for line in raw.splitlines() if line.startswith("x-pulsing-routing"))


async def known(addr: str) -> list[int]:
    """Blocks that the Router knows of each worker."""
    _, _, page = await http(addr, "GET", "/v1/_routing")
    return [worker["cached_blocks"] for worker in json.loads(page)["workers"]]


def test_s5_a_prompt_goes_to_who_holds_it_and_by_load_once_it_is_evicted() -> None:
    async def run() -> None:
        one, other = Caching(), Caching()
        async with routed(one, other) as (addr, _):
            prompt = text(1, 8)
            assert "0/8 blocks known" in await ask(addr, prompt)
            holder = one if one.seen else other
            assert holder.seen == [tuple(names(prompt))]
            assert "8/8 blocks cached" in await ask(addr, prompt)
            assert len(holder.seen) == 2
            # The engine evicts the end of it, then all.
            holder.blocks_dropped(names(prompt)[5:])
            await until("the Router to hear of it", lambda: heard(addr, 5))
            assert "5/8 blocks cached" in await ask(addr, prompt)
            holder.blocks_dropped(names(prompt))
            await until("the Router to hear of it", lambda: heard(addr, 0))
            assert "0/8 blocks known" in await ask(addr, prompt)

    asyncio.run(run())


async def heard(addr: str, blocks: int) -> bool:
    return sum(await known(addr)) == blocks


def test_s5_what_a_worker_has_had_for_long_is_told_to_a_router_that_starts_later() -> None:
    async def run() -> None:
        one, other = Caching(), Caching()
        prompt = text(2, 6)
        one.blocks_stored(names(prompt))
        async with routed(one, other) as (addr, _):
            await until("the Router to hear of it", lambda: heard(addr, 6))
            for _ in range(3):
                assert "6/6 blocks cached" in await ask(addr, prompt)
            assert (len(one.seen), len(other.seen)) == (3, 0)

    asyncio.run(run())


def test_s5_a_restarted_worker_starts_clean() -> None:
    async def run() -> None:
        one, other = Caching(), Caching()
        prompt = text(3, 6)
        one.blocks_stored(names(prompt))
        async with routed(one, other) as (addr, (node, _)):
            await until("the Router to hear of it", lambda: heard(addr, 6))
            await node.stop("worker")
            await node.spawn(Caching(), name="worker", public=True)
            await ready(addr, 2)
            await until("the Router to forget it", lambda: heard(addr, 0))
            assert "0/6 blocks known" in await ask(addr, prompt)

    asyncio.run(run())


def test_s5_only_who_asks_hears_of_blocks_and_the_first_news_is_all_there_is() -> None:
    async def run() -> None:
        worker = Caching()
        worker.blocks_stored(range(1, 10_001))
        async with system() as node:
            ref = await node.spawn(worker)
            plain, told = protocol.subscribe(ref), protocol.subscribe(ref, blocks=True)
            async for head in plain:
                assert LoadReport.decode(head).blocks is None
                break
            stored: list[int] = []
            async for head in told:
                assert len(head) < 34_000
                news = LoadReport.decode(head).blocks
                if news is None:
                    break
                number, reset, more, dropped = news
                assert (reset, dropped) == (not stored, [])
                stored += more
            assert stored == list(range(1, 10_001))
            assert number == 3
            plain.cancel()
            told.cancel()

    asyncio.run(run())


def test_s5_what_changes_back_is_not_told_and_who_falls_far_behind_is_told_all_anew() -> None:
    blocks = HeldBlocks(limit=10, in_one=4)
    blocks.stored([1, 2])
    reader = blocks.reader()
    assert reader.take() == (1, True, [1, 2], [])
    assert reader.take() is None
    blocks.stored([3])
    blocks.dropped([3, 4])
    assert reader.take() == (2, False, [], [3, 4]), "a Router may have guessed that they are there"
    blocks.stored(range(10, 15))
    assert (reader.take(), reader.take()) == ((3, False, [10, 11, 12, 13], []), (4, False, [14], []))
    # Its memory is bounded, whatever comes and goes.
    for block in range(100, 200):
        blocks.stored([block])
    assert len(blocks) == 10
    told: list[int] = []
    while (news := reader.take()) is not None:
        told = ([] if news[1] else told) + news[2]
        told = [block for block in told if block not in news[3]]
    assert told == list(range(190, 200))
    blocks.cleared()
    last = reader.take()
    assert last is not None
    assert last[1:] == (True, [], [])
    reader.close()
    blocks.stored([1])
    assert not reader.behind


def test_s5_blocks_of_tokens_are_mapped_to_the_blocks_of_the_prompts_that_made_them() -> None:
    held = HeldBlocks()
    tokens = TokenBlocks(held.stored, held.dropped, held.cleared)
    prompt = list(range(1000, 1080))
    # 1024 bytes in 80 tokens: 20 tokens a block of bytes; the engine's blocks have 16.
    names = (11, 12, 13, 14)
    claim = tokens.begin(names, 1024, prompt)
    assert not claim.complete
    tokens.stored(None, ["a", "b"], prompt[:32], 16)
    assert list(held._held) == [11]
    tokens.stored("b", ["c", "d", "e"], prompt[32:], 16)
    assert list(held._held) == [11, 12, 13, 14]
    assert claim.complete
    tokens.settle(claim)
    # Another one that begins alike knows at once what it shares, and settles what was never stored.
    other = tokens.begin((11, 12, 99), 1024 * 3 // 4, prompt[:40] + [7] * 20)
    tokens.stored("x", ["y"], [7] * 16, 16)
    tokens.settle(other)
    assert 99 not in held
    # The engine evicts from the end.
    tokens.removed(["e", "d"])
    assert set(held._held) == {11, 12}
    tokens.removed(["a"])
    assert len(tokens._nodes) == 2
    tokens.cleared()
    assert (len(held), tokens._awaiting, tokens._nodes) == (0, {}, {})


def test_more_blocks_at_once_than_are_remembered_are_not_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldBlocks(limit=100, in_one=10)
    reader = held.reader()
    anew = []
    monkeypatch.setattr(reader, "begin_anew", lambda begin=reader.begin_anew: (anew.append(1), begin()))
    held.stored(range(5000))
    assert len(anew) < 100
    assert len(held) == 100
    told: dict[int, None] = {}
    while (news := reader.take()) is not None:
        _, reset, stored, dropped = news
        if reset:
            told.clear()
        told.update(dict.fromkeys(stored))
        for block in dropped:
            told.pop(block, None)
    assert list(told) == list(range(4900, 5000))


@pytest.mark.parametrize("block", [-1, 2**64, "a", 1.5, None])
def test_what_is_no_block_is_refused_where_it_is_told_and_load_reports_go_on(block: Any) -> None:
    worker = Caching()
    for tell in (worker.blocks_stored, worker.blocks_dropped):
        with pytest.raises(ValueError, match="64 bits"):
            tell([1, block])
    reader = worker._blocks.reader()
    assert worker.load_report().encode(reader.take())
    assert not worker._blocks
