"""Streams of engine servers that are lost go on on another: what EngineWorkers declare, kill -9 (S4), SIGSTOP (S5)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from engine_server import EngineServer, engine_process
from router_kit import ready, system, until

from pulsing.serving import EngineWorker, start_router, stop_router
from pulsing.serving._probe import Url, get, version_in

MODEL = "org/engine-model"
FAST = {"probe_interval": 0.05, "probe_timeout": 0.5}
VLLM = "vllm:num_requests_running 0.0\n"
SGLANG = "sglang:num_running_reqs 0.0\n"


async def declared(engine: EngineServer, /, **settings: Any) -> tuple[str, str]:
    """What a Router reads of an EngineWorker: by whose rules its streams go on, and its fingerprint."""
    async with system() as node, engine.running():
        worker = EngineWorker(engine.url, **FAST, **settings)
        await node.spawn(worker, name="worker")
        await until("it serves", lambda: worker.load_report().state == "ready")
        metadata = worker.metadata()
        return metadata.get("continue", ""), metadata.get("fingerprint", "")


def test_s4_only_engines_that_go_on_with_a_message_declare_it() -> None:
    async def test() -> None:
        for engine, settings, expected in (
            (EngineServer(version="1"), {}, "vllm"),
            (EngineServer(metrics=SGLANG), {}, "sglang"),
            (EngineServer(), {"engine": "vllm"}, "vllm"),
            (EngineServer(), {"continue_streams": "sglang"}, "sglang"),
            (EngineServer(version="1"), {"continue_streams": "off"}, ""),
            (EngineServer(version="1"), {"role": "prefill", "pd": "sequential"}, "vllm"),
            (EngineServer(metrics="llamacpp:requests_processing 0\n"), {}, ""),
            (EngineServer(), {}, ""),
        ):
            said, fingerprint = await declared(engine, **settings)
            assert (said, bool(fingerprint)) == (expected, bool(expected)), settings

    asyncio.run(asyncio.wait_for(test(), 60))


def test_s4_engines_of_another_version_or_other_weights_are_told_apart() -> None:
    def model(root: str) -> list[dict[str, Any]]:
        return [{"id": MODEL, "object": "model", "owned_by": "vllm", "root": root, "max_model_len": 4096}]

    async def test() -> None:
        names = [
            (await declared(EngineServer(version=version, models=model(root))))[1]
            for version, root in (("1", "a"), ("1", "a"), ("2", "a"), ("1", "b"))
        ]
        assert names[0] == names[1]
        assert len(set(names)) == 3

    asyncio.run(asyncio.wait_for(test(), 60))


def test_s4_an_engine_that_comes_back_as_another_version_is_another_one() -> None:
    async def test() -> None:
        async with system() as node:
            engine = EngineServer(version="1")
            async with engine.running():
                worker = EngineWorker(engine.url, **FAST)
                await node.spawn(worker, name="worker")
                await until("it serves", lambda: worker.load_report().state == "ready")
                before = worker.metadata()
            await until("it is gone", lambda: worker.load_report().state == "failed")
            assert worker.metadata()["continue"] == ""
            async with EngineServer(version="2").running(int(engine.addr.rpartition(":")[2])):
                await until("it is back", lambda: worker.load_report().state == "ready")
                after = worker.metadata()
            assert (after["continue"], before["continue"]) == ("vllm", "vllm")
            assert after["fingerprint"] != before["fingerprint"]

    asyncio.run(asyncio.wait_for(test(), 60))


def test_bad_words_for_continue_streams_are_refused() -> None:
    with pytest.raises(ValueError, match=r"continue_streams 'ollama' is none of off, auto, vllm, sglang"):
        EngineWorker("http://127.0.0.1:1", continue_streams="ollama")  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'"x"', b'{"version":3}', b"\xff", b"[" * 100_000])
def test_a_version_that_cannot_be_read_is_none(body: bytes) -> None:
    assert version_in(body) == ""
    assert version_in(b'{"version": "0.32.0"}') == "0.32.0"


@contextlib.asynccontextmanager
async def slow_engine() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server in a process of its own, and where it listens."""
    async with EngineServer().running() as probe:
        addr = probe.addr
    async with engine_process(int(addr.rpartition(":")[2]), MODEL, "0.02") as process:
        yield process, f"http://{addr}"


async def metric(url: str, name: str) -> int:
    _, body = await get(Url.parse(url), "/metrics", {}, 5)
    found = re.search(rf"^{re.escape(name)} (\d+)$", body.decode(), re.MULTILINE)
    assert found, name
    return int(found[1])


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_s4_an_engine_that_dies_or_hangs_costs_its_greedy_streams_nothing(deed: signal.Signals) -> None:
    asked = " ".join(f"word{number}" for number in range(40))
    question: dict[str, Any] = {
        "model": "alias",
        "messages": [{"role": "user", "content": asked}],
        "stream": True,
    }

    async def read(client: openai.AsyncOpenAI, begun: asyncio.Event) -> tuple[str, set[str], list[str]]:
        said, ids, reasons = "", set(), []
        stream = await client.chat.completions.create(**question, temperature=0)
        async for chunk in stream:
            ids.add(chunk.id)
            for choice in chunk.choices:
                said += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
            if "word5" in said:
                begun.set()
        return said, ids, reasons

    async def test() -> None:
        async with system() as node, contextlib.AsyncExitStack() as stack:
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            stack.push_async_callback(stop_router, runner, 1)
            engines = []
            for _ in range(2):
                process, url = await stack.enter_async_context(slow_engine())
                engines.append((process, url))
                own = await stack.enter_async_context(system(node.addr))
                await own.spawn(EngineWorker(url, **FAST), name="worker")
            await ready(runner.addr, 2)
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"http://{runner.addr}/v1", api_key="x", max_retries=0)
            )
            begun = [asyncio.Event() for _ in range(6)]
            streams = [asyncio.create_task(read(client, one)) for one in begun]
            for one in begun:
                await one.wait()
            first, url = engines[0]
            first.send_signal(deed)
            for said, ids, reasons in await asyncio.gather(*streams):
                assert (said, len(ids), reasons) == (asked + " ", 1, ["stop"])
            router = f"http://{runner.addr}"
            assert await metric(router, "pulsing_router_resumed_streams_total") == 3
            assert await metric(router, "pulsing_router_broken_streams_total") == 0
            taken_back = 3 if deed == signal.SIGSTOP else 0
            assert await metric(router, 'pulsing_router_retries_total{reason="taken_back"}') == taken_back
            if deed == signal.SIGSTOP:
                first.send_signal(signal.SIGCONT)

                async def cancelled() -> bool:
                    return await metric(url, "test:left") == 3

                await until("it finds its streams cancelled", cancelled)
                await ready(runner.addr, 2)

    asyncio.run(asyncio.wait_for(test(), 60))
