"""An engine that counts, slowly: an OpenAI-compatible HTTP server in a process of its own.

python counting_engine.py PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from counting_worker import PAUSE, WORDS

_BASE = {"id": "engine-1", "created": 1, "model": "counting"}
_MODELS = {"object": "list", "data": [{"id": "counting", "object": "model", "created": 1, "owned_by": "chaos"}]}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine:
    """One server; `running` requests are being answered."""

    def __init__(self) -> None:
        self.running = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
                request = json.loads(await reader.readexactly(length) or b"null")
                self.running += 1
                try:
                    await self._answer(writer, lines[0].split(" ")[1], request)
                finally:
                    self.running -= 1
                if "connection: close" in lines:
                    break
        writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, request: dict[str, Any] | None) -> None:
        if path == "/v1/models":
            _whole(writer, 200, _MODELS)
        elif path == "/health":
            # This question is none of the requests.
            _whole(writer, 200, {"running": self.running - 1})
        elif request is None:
            error = {"message": "no such path", "type": "not_found", "param": None, "code": None}
            _whole(writer, 404, {"error": error})
        elif request.get("stream"):
            await self._stream(writer)
        else:
            await asyncio.sleep(WORDS * PAUSE)
            content = "".join(f"{number} " for number in range(WORDS))
            message = {"role": "assistant", "content": content}
            choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
            usage = {"prompt_tokens": 1, "completion_tokens": WORDS, "total_tokens": 1 + WORDS}
            _whole(writer, 200, {**_BASE, "object": "chat.completion", "choices": choices, "usage": usage})
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + _event({"role": "assistant", "content": ""}, None))
        for number in range(WORDS):
            writer.write(_event({"content": f"{number} "}, None))
            await writer.drain()
            await asyncio.sleep(PAUSE)
        writer.write(_event({}, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _event(delta: dict[str, str], finish: str | None) -> bytes:
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    data = {**_BASE, "object": "chat.completion.chunk", "choices": choices}
    return _chunk(f"data: {json.dumps(data)}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def main() -> None:
    server = await asyncio.start_server(Engine().connected, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
