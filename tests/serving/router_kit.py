"""Workers that do as they are told, and a small HTTP client, for the Router's tests."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pulsing as pul
from pulsing.core import ActorSystem
from pulsing.serving import Delta, GenerateRequest, RequestError, Usage, Worker

CHAT = {"model": "alias", "messages": [{"role": "user", "content": "hi"}]}


class Scripted(Worker):
    """Answers by the last message: ``fail STATUS``, ``sleep SECONDS``, ``hang``, ``count WORDS GAP`` (0, 1, 2, ... with
    GAP seconds between, from where the client is), or an echo of it."""

    continues = "greedy"

    def __init__(self, model_name: str = "tiny", *, capacity: int = 8) -> None:
        super().__init__(model_name, capacity=capacity)
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.fingerprint = "scripted"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.requests.append(request)
        text = request.messages[-1]["content"]
        command, _, argument = text.partition(" ")
        try:
            if command == "fail":
                raise RequestError(int(argument), f"failed as told with {argument}", "messages")
            if command == "sleep":
                await asyncio.sleep(float(argument))
            if command == "hang":
                yield Delta("begun")
                await asyncio.Event().wait()
            if command == "count":
                words, gap = argument.split()
                for number in range(len(request.continue_tokens), int(words)):
                    yield Delta(f"{number} ", token_ids=(number,))
                    await asyncio.sleep(float(gap))
                counted = int(words) - len(request.continue_tokens)
                yield Delta(finish_reason="stop", usage=Usage(1, counted))
                return
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        for word in text.split():
            yield Delta(word + " ")
        yield Delta(finish_reason="stop", usage=Usage(1, len(text.split())))


async def http(addr: str, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
    """One request on its own connection: status, headers, raw body up to the end of the connection."""
    host, port = addr.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    data = b"" if body is None else json.dumps(body).encode()
    writer.write(f"{method} {path} HTTP/1.0\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    try:
        # Real engines on a busy machine take their time.
        raw = await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *others = head.decode().split("\r\n")
    headers = {line.partition(": ")[0]: line.partition(": ")[2] for line in others}
    return int(first.split(" ")[1]), headers, rest


async def chat(addr: str, content: str = "hi", **fields: Any) -> tuple[int, Any]:
    status, _, body = await http(
        addr, "POST", "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": content}], **fields}
    )
    return status, json.loads(body) if not fields.get("stream") else body.decode()


async def until(what: str, condition: Callable[[], Any], limit: float = 10.0) -> None:
    """Polls a condition, plain or async."""
    deadline = time.monotonic() + limit
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        await asyncio.sleep(0.01)


async def ready(addr: str, workers: int = 1) -> None:
    """Waits until the Router sees that many ready workers."""

    async def enough() -> bool:
        _, _, body = await http(addr, "GET", "/health")
        return bool(json.loads(body)["healthy_workers"] == workers)

    await until(f"{workers} ready workers", enough)


@contextlib.asynccontextmanager
async def system(*seeds: str) -> AsyncIterator[ActorSystem]:
    """A node on a free port."""
    node = await pul.actor_system("127.0.0.1:0", seeds=list(seeds))
    try:
        yield node
    finally:
        await node.shutdown()
