"""A scripted OpenAI-compatible server on loopback, for the command's tests: answers what its script says, logs all."""

import asyncio
import dataclasses
import json
import subprocess
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tcp_server import listening

# Runs the command to its end: (*arguments, **environment).
Bench = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclasses.dataclass
class Script:
    """One answer: a status other than 200 with an error's text, or a stream."""

    first: float = 0.01
    gap: float = 0.002
    tokens: int = 4
    usage: bool = True
    status: int = 200
    error: str = ""


@dataclasses.dataclass
class Request:
    """What a client sent."""

    path: str
    headers: dict[str, str]
    body: bytes


class Server:
    """Runs in a thread of its own for the length of a `with`."""

    def __init__(self, script: Callable[[int], Script] = lambda index: Script()) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with listening(self._connection) as addr:
            self.url = f"http://{addr}"
            self._ready.set()
            await self._stop.wait()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._answer(head[0].split(" ")[1], headers, body, writer)

    async def _answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if path.endswith("/models"):
            return writer.write(_plain(200, {"data": [{"id": "mock"}]}))
        self.requests.append(Request(path, headers, body))
        script = self.script(len(self.requests) - 1)
        if script.status != 200:
            return writer.write(_plain(script.status, {"error": {"message": script.error}}))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for at in range(script.tokens):
            await asyncio.sleep(script.gap if at else script.first)
            writer.write(_event({"choices": [{"delta": {"content": " word"}}]}))
            await writer.drain()
        writer.write(_event({"choices": [{"delta": {}, "finish_reason": "length"}]}))
        if script.usage:
            usage = {"prompt_tokens": len(body.split()), "completion_tokens": script.tokens}
            writer.write(_event({"choices": [], "usage": usage}))
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return await writer.drain()


def _plain(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(body: object) -> bytes:
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")
