"""Two real vLLM servers behind a Router: one hangs, or is killed, in the middle of a stream, and the other goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import vllm_kit
from engine_server import EngineServer
from router_kit import http, ready, system, until

from pulsing.serving import EngineWorker, start_router, stop_router

# vLLM and what it stands on warn of one another's plans; none of it is ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

QUESTION: list[Any] = [{"role": "user", "content": "Tell me a story about a river and the town beside it."}]
TOKENS = 128
# Chunks of text after which something happens to a server.
KILLED_AT = 20
# Two engines load side by side on two cores, and other tests may run beside them.
START_LIMIT = 240.0


@dataclass
class Server:
    """A server in a process group of its own, with all that its engine started."""

    process: subprocess.Popen[bytes]
    addr: str
    log: Path

    async def serves(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        with contextlib.suppress(OSError):
            return (await http(self.addr, "GET", "/health"))[0] == 200
        return False

    async def works(self) -> bool:
        """Whether a request runs on it."""
        _, _, metrics = await http(self.addr, "GET", "/metrics")
        lines = [line for line in metrics.splitlines() if line.startswith(b"vllm:num_requests_running")]
        return any(float(line.rpartition(b" ")[2]) > 0 for line in lines)

    def signal(self, number: signal.Signals) -> None:
        """To the server and its engine."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """kill -9 of the server and of its engine, whatever is left of them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


async def free_addr() -> str:
    async with EngineServer().running() as probe:
        return probe.addr


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers with the same weights, starting."""
    env = {**os.environ, **vllm_kit.ENVIRONMENT}
    folder = tmp_path / "SmolLM2"
    subprocess.run([sys.executable, vllm_kit.__file__, "convert", str(folder)], env=env, check=True)
    started: list[Server] = []
    try:
        for number in range(2):
            addr = asyncio.run(free_addr())
            log = tmp_path / f"server{number}.log"
            with log.open("wb") as out:
                # In bfloat16 reading a text gives other numbers than writing it did: the next token may be another.
                command = vllm_kit.serve(folder, addr, "smol", "float32")
                process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
            started.append(Server(process, addr, log))
        yield started
    finally:
        for server in started:
            server.kill()


async def read(
    client: openai.AsyncOpenAI, chunks: asyncio.Queue[int]
) -> tuple[str, set[str], list[str], tuple[int, int]]:
    """Text, ids, finish reasons and usage of a greedy stream; tells how many chunks of text have come."""
    said, ids, reasons, usage = "", set(), [], (0, 0)
    stream = await client.chat.completions.create(
        model="alias",
        messages=QUESTION,
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    count = 0
    async for chunk in stream:
        ids.add(chunk.id)
        for choice in chunk.choices:
            said += choice.delta.content or ""
            count += bool(choice.delta.content)
            reasons += [choice.finish_reason] if choice.finish_reason else []
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        chunks.put_nowait(count)
    return said, ids, reasons, usage


def test_s4_a_vllm_server_that_hangs_or_dies_costs_a_greedy_stream_nothing(servers: list[Server]) -> None:
    async def test() -> None:
        async with system() as node, contextlib.AsyncExitStack() as stack:
            runner = await start_router(node, "127.0.0.1", 0, "alias")
            stack.push_async_callback(stop_router, runner, 1)
            for server in servers:
                await until("a server serves", server.serves, START_LIMIT)
                own = await stack.enter_async_context(system(node.addr))
                await own.spawn(EngineWorker(f"http://{server.addr}"), name="worker")
            await ready(runner.addr, 2)
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"http://{runner.addr}/v1", api_key="x", max_retries=0, timeout=120)
            )
            expected, _, reasons, usage = await read(client, asyncio.Queue())
            assert (reasons, usage[1]) == (["length"], TOKENS)

            async def through(deed: Callable[[Server], None]) -> Server:
                """A stream in whose middle something happens to its server, which is told."""
                chunks: asyncio.Queue[int] = asyncio.Queue()
                stream = asyncio.create_task(read(client, chunks))
                await chunks.get()
                working: list[Server] = []
                while not working:
                    assert not stream.done()
                    busy = await asyncio.gather(*(server.works() for server in servers))
                    working = [server for server, works in zip(servers, busy, strict=True) if works]
                while await chunks.get() < KILLED_AT:
                    pass
                assert not stream.done()
                await asyncio.to_thread(deed, working[0])
                said, ids, again, total = await stream
                assert said == expected
                assert (again, total, len(ids)) == (["length"], usage, 1)
                return working[0]

            hung = await through(lambda server: server.signal(signal.SIGSTOP))
            hung.signal(signal.SIGCONT)
            await ready(runner.addr, 2)

            async def idle() -> bool:
                return not await hung.works()

            await until("it has let go of the stream", idle)
            await through(Server.kill)
            _, _, metrics = await http(runner.addr, "GET", "/metrics")
            assert b"pulsing_router_resumed_streams_total 2" in metrics
            assert b"pulsing_router_broken_streams_total 0" in metrics

    asyncio.run(asyncio.wait_for(test(), 2 * START_LIMIT))
