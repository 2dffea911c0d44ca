"""The generator of `trivial_worker.py` as an HTTP server: a bare asyncio protocol on uvloop, as fast as Python gets.

It does what an engine's own server has to do: read the request's JSON, run the generator, write JSON.
"""

import asyncio
import json
import sys
from typing import Any, cast

import uvloop
from trivial_worker import words

MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"bench"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BASE = {"id": "x", "created": 1, "model": "mock"}


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def event(delta: dict[str, str], finish: str | None) -> bytes:
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    data = json.dumps({**BASE, "object": "chat.completion.chunk", "choices": choices}, separators=(",", ":"))
    text = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


class Engine(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods without the base class.
        self.transport = cast(asyncio.Transport, transport)
        self.data = bytearray()

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.data[:end]).lower()
            length = 0
            for line in head.split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            rest = end + 4 + length
            if len(self.data) < rest:
                return
            body = bytes(self.data[end + 4 : rest])
            del self.data[:rest]
            if head.startswith(b"get"):
                self.transport.write(whole(MODELS))
            else:
                self.task = asyncio.ensure_future(self.answer(json.loads(body)))

    async def answer(self, request: dict[str, Any]) -> None:
        text = request["messages"][-1]["content"]
        if not request.get("stream"):
            content = "".join([word async for word in words(text)])
            message = {"role": "assistant", "content": content}
            usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
            choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
            answer = {**BASE, "object": "chat.completion", "choices": choices, "usage": usage}
            self.transport.write(whole(json.dumps(answer, separators=(",", ":")).encode()))
            return
        self.transport.write(HEAD + event({"role": "assistant", "content": ""}, None))
        async for word in words(text):
            self.transport.write(event({"content": word}, None))
        self.transport.write(event({}, "stop") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


uvloop.run(main())
