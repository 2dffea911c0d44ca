"""Clients of the drills: one request a connection, and what became of it in a word."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections import Counter
from typing import Any

from router_house import MODEL


@dataclasses.dataclass(frozen=True)
class End:
    """What became of one request.

    Attributes:
        word: "whole", "status 503" and the like, "error event" (said so, and the body was cut), "cut" (without a word),
            "truncated" (a proper end without the whole answer), "timeout" or "refused".
        began: When it was sent, on `time.monotonic`'s clock.
        seconds: How long it took.
        text: The body.
    """

    word: str
    began: float
    seconds: float
    text: str = ""


def body(command: str = "", *, stream: bool = False, **fields: Any) -> bytes:
    """A request that tells the mock engine what to do."""
    messages = [{"role": "user", "content": f"mock:{command} hello" if command else "hello"}]
    request = {"model": MODEL, "messages": messages, "stream": stream, "temperature": 0, **fields}
    return json.dumps(request, separators=(",", ":")).encode()


def head(length: int, path: str = "/v1/chat/completions", *more: str) -> bytes:
    """The head of a POST."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: router",
        "content-type: application/json",
        f"content-length: {length}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def raw(port: int, data: bytes, timeout: float = 30.0) -> tuple[int, dict[str, str], bytes, bool]:
    """Sends bytes and reads one answer: status, headers, body, and whether the body ended as HTTP says.

    Raises:
        ConnectionError, TimeoutError: There is no answer.
    """
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            writer.write(data)
            return await answer(reader)
        finally:
            writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes, bool]:
    """Reads one answer."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("closed without an answer") from None
    status = int(lines[0].split(" ")[1])
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        content, clean = await chunks(reader)
        return status, headers, content, clean
    length = int(headers.get("content-length", "0"))
    try:
        return status, headers, await reader.readexactly(length), True
    except (asyncio.IncompleteReadError, ConnectionError):
        return status, headers, b"", False


async def chunks(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """A chunked body, and whether it came to its end."""
    content = b""
    try:
        while size := int(await reader.readline() or b"x", 16):
            content += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return content, False
    return content, True


def judged(status: int, content: bytes, clean: bool, tokens: int, *, stream: bool) -> str:
    """The word for an answer of `tokens` tokens, which the mock engine counts out."""
    if status != 200:
        return f"status {status}"
    whole = "".join(f"{number} " for number in range(tokens))
    if not stream:
        if not clean:
            return "cut"
        return "whole" if json.loads(content)["choices"][0]["message"]["content"] == whole else "truncated"
    events = [line[6:] for line in content.decode().split("\n\n") if line.startswith("data: ")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    said = any("error" in event for event in parsed)
    choices = [choice for event in parsed for choice in event.get("choices", ())]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    finished = any(choice.get("finish_reason") for choice in choices)
    if said:
        return "error event" if not clean and not finished else "error event, but ended as if whole"
    if clean and finished and events[-1:] == ["[DONE]"] and text == whole:
        return "whole"
    return "truncated" if clean else "cut"


async def ask(
    port: int, command: str, *, tokens: int = 1, stream: bool = False, timeout: float = 30.0, **fields: Any
) -> End:
    """One request to its end."""
    data = body(command, stream=stream, **fields)
    began = time.monotonic()
    text = ""
    try:
        status, _, content, clean = await raw(port, head(len(data)) + data, timeout)
        word, text = judged(status, content, clean, tokens, stream=stream), content.decode(errors="replace")
    except TimeoutError:
        word = "timeout"
    except OSError:
        word = "refused"
    return End(word, began, time.monotonic() - began, text)


class Load:
    """Requests under way in the background.

    Args:
        port: Of the router.
        command: What the mock engine is told.
        tokens: Tokens of a whole answer.
        stream: Whether answers are streamed.
        timeout: Seconds that a client waits.
    """

    def __init__(
        self, port: int, command: str, *, tokens: int = 1, stream: bool = False, timeout: float = 30.0
    ) -> None:
        self.ends: list[End] = []
        self._ask = lambda: ask(port, command, tokens=tokens, stream=stream, timeout=timeout)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = False

    async def _one(self) -> None:
        self.ends.append(await self._ask())

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self) -> None:
        while not self._over:
            await self._one()
            if self.ends[-1].word == "refused":
                await asyncio.sleep(0.05)

    def closed(self, clients: int) -> None:
        """So many clients, each with one request after the other."""
        for _ in range(clients):
            self._spawn(self._again())

    async def open(self, rate: float, seconds: float) -> None:
        """Requests at a fixed rate, whatever becomes of the others."""
        begin = time.monotonic()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            self._spawn(self._one())

    def burst(self, count: int) -> None:
        """So many at once."""
        for _ in range(count):
            self._spawn(self._one())

    async def finish(self) -> None:
        """Lets what is under way come to its end."""
        self._over = True
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def cancel(self) -> None:
        """Ends everything at once."""
        self._over = True
        for task in self._tasks:
            task.cancel()

    def between(self, begin: float, end: float) -> float:
        """Whole answers a second that came within this time."""
        came = [one for one in self.ends if one.word == "whole" and begin <= one.began + one.seconds < end]
        return len(came) / (end - begin)

    def words(self) -> dict[str, int]:
        """How requests ended."""
        return dict(Counter(end.word for end in self.ends))


@contextlib.asynccontextmanager
async def connection(port: int) -> Any:
    """A connection that is closed with a reset, so that nothing lingers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
