"""The same generator as an HTTP server of its own: a bare asyncio protocol on uvloop, as fast as Python gets."""

import asyncio
import sys
from typing import cast

import uvloop

TOKENS = int(sys.argv[2])
CHUNK = (
    'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"trivial","choices":['
    '{"index":0,"delta":%s,"finish_reason":%s}]}\n\n'
)
BODY = (
    '{"id":"x","object":"chat.completion","created":1,"model":"trivial","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"' + "word " * TOKENS + '"},"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9}}'
)
PLAIN = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}".encode()
MODELS = b'{"object":"list","data":[{"id":"trivial","object":"model","created":1,"owned_by":"bench"}]}'
LIST = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(MODELS), MODELS)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods without the base class.
        self.transport = cast(asyncio.Transport, transport)
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            length = 0
            for line in head.split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            whole = end + 4 + length
            if len(self.data) < whole:
                return
            body, self.data = self.data[end + 4 : whole], self.data[whole:]
            if head.startswith(b"get"):
                self.transport.write(LIST)
            elif b'"stream":true' in body or b'"stream": true' in body:
                self.task = asyncio.ensure_future(self.stream())
            else:
                self.transport.write(PLAIN)

    async def stream(self) -> None:
        self.transport.write(HEAD + chunk(CHUNK % ('{"role":"assistant","content":""}', "null")))
        for _ in range(TOKENS):
            self.transport.write(chunk(CHUNK % ('{"content":"word "}', "null")))
            await asyncio.sleep(0)
        self.transport.write(chunk(CHUNK % ("{}", '"stop"')) + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


uvloop.run(main())
