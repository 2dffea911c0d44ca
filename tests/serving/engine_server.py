"""A small OpenAI-compatible server as an engine: in this process with switches, or as a process that can be killed.

python engine_server.py PORT NAME [PAUSE]

With PAUSE it is vLLM to whoever asks, and says a word every PAUSE seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tcp_server import listening


@dataclass
class EngineServer:
    """Echoes the last message, word by word when streaming."""

    name: str = "org/engine-model"
    health: int = 200
    """Status of /health; 404 = it has none."""
    models: list[dict[str, Any]] | None = None
    metrics: str | None = None
    key: str | None = None
    pause: float = 0.0
    """Seconds between two words of a stream."""
    kv_transfer_params: dict[str, Any] | None = None
    """What a prefill server of vLLM says beside its answer."""
    version: str | None = None
    """What vLLM says it is; such a server goes on with an unfinished message. A token is a character."""
    left: int = 0
    """Streams whose reader was gone before they were whole."""
    seen: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    addr: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.addr}"

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[EngineServer]:
        async with listening(self._serve, port, self.tls) as self.addr:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = lines[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.paths.append(path)
            if self.key is not None and headers.get("authorization") != f"Bearer {self.key}" and path != "/health":
                _answer(writer, 401, {"error": {"message": "Incorrect API key", "type": "x", "param": None}})
            elif method == "GET":
                self._get(writer, path)
            elif self.version is not None and path in ("/tokenize", "/detokenize"):
                _answer(writer, 200, _tokens(path, json.loads(body)))
            else:
                self.seen.append((headers, body))
                try:
                    await self._generate(writer, path, json.loads(body))
                except ConnectionError:
                    self.left += 1
                    raise
            await writer.drain()
            if headers.get("connection") == "close":
                return

    def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/v1/models":
            own = [{"id": self.name, "object": "model", "owned_by": "test", "max_model_len": 4096}]
            _answer(writer, 200, {"object": "list", "data": own if self.models is None else self.models})
        elif path == "/health":
            _answer(writer, self.health, {"status": self.health})
        elif path == "/metrics" and (self.metrics is not None or self.version is not None):
            own = f"vllm:num_requests_running 0.0\ntest:left {self.left}\n"
            _answer(writer, 200, self.metrics or own)
        elif path == "/version" and self.version is not None:
            _answer(writer, 200, {"version": self.version})
        else:
            _answer(writer, 404, {"detail": "Not Found"})

    async def _generate(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        if body["model"] != self.name:
            _answer(writer, 404, {"error": {"message": f"no model {body['model']}", "type": "x", "param": "model"}})
            return
        chat = path == "/v1/chat/completions"
        text = body["messages"][-1]["content"] if chat else str(body["prompt"])
        had = 0
        if body.get("continue_final_message"):
            had, text = len(text.split()), body["messages"][-2]["content"]
        words = [word + " " for word in text.split()][had:]
        base = {"id": "engine-1", "created": 1, "model": self.name}
        if not body.get("stream"):
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices = [{"index": 0, "finish_reason": "stop", "logprobs": None, **choice}]
            usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
            handed = {} if self.kv_transfer_params is None else {"kv_transfer_params": self.kv_transfer_params}
            _answer(writer, 200, {**base, "object": "chat.completion", "choices": choices, "usage": usage, **handed})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number, word in enumerate([*words, None]):
            delta = {} if word is None else {"role": "assistant", "content": word}
            choices = [{"index": 0, "delta": delta, "finish_reason": "stop" if word is None else None}]
            event = json.dumps({**base, "object": "chat.completion.chunk", "choices": choices}, ensure_ascii=False)
            _chunk(writer, f"data: {event}\n\n".encode())
            await writer.drain()
            if number and self.pause:
                await asyncio.sleep(self.pause)
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _tokens(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/detokenize":
        return {"prompt": "".join(map(chr, body["tokens"]))}
    text = body["messages"][-1]["content"] if body["continue_final_message"] else ""
    tokens = [0, *map(ord, text)]
    return {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    kind, data = ("text/plain", body) if isinstance(body, str) else ("application/json", json.dumps(body))
    raw = data.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)


@contextlib.asynccontextmanager
async def engine_process(port: int, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """This file as a process that listens: what stands on its command line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = (sys.executable, __file__, str(port), *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 20) == b"ready\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def main() -> None:
    server = EngineServer(name=sys.argv[2])
    if len(sys.argv) > 3:
        server.version, server.pause = "1.2.3", float(sys.argv[3])
    async with server.running(int(sys.argv[1])):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
