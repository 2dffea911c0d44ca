"""Messages with a type and a plain body, for raw actors and for callers that are not Python."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pulsing.core._shown import shown
from pulsing.core._streams import StreamReader
from pulsing.exceptions import PulsingActorError, PulsingRuntimeError

__all__ = ["Message", "StreamMessage", "StreamReader", "StreamWriter"]


class Message:
    """A type and a body of plain bytes.

    Args:
        msg_type: What kind of message it is.
        payload: Its body.

    Raises:
        TypeError: A type that is no string, a body that is no bytes.
    """

    __slots__ = ("_reader", "msg_type", "payload")

    def __init__(self, msg_type: str, payload: bytes = b"") -> None:
        if not isinstance(msg_type, str):
            raise TypeError(f"msg_type={shown(msg_type)}: expected a string")
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"payload={shown(payload)}: expected bytes; Message.from_json(msg_type, data) takes other data"
            )
        self.msg_type = msg_type
        self.payload = payload
        self._reader: AsyncIterator[Any] | None = None

    @classmethod
    def from_json(cls, msg_type: str, data: Any) -> Message:
        """A message whose body is `data` as JSON."""
        return cls(msg_type, json.dumps(data).encode())

    @classmethod
    def empty(cls) -> Message:
        """A message without type and body."""
        return cls("")

    @classmethod
    def _streaming(cls, msg_type: str, reader: AsyncIterator[Any]) -> Message:
        message = cls(msg_type)
        message._reader = reader
        return message

    @property
    def is_stream(self) -> bool:
        """True when the body is a stream: read it with `stream_reader`."""
        return self._reader is not None

    def to_json(self) -> Any:
        """The body, read as JSON.

        Raises:
            ValueError: The body is no JSON.
        """
        return json.loads(self.payload)

    def stream_reader(self) -> AsyncIterator[Any]:
        """The items of a streamed body.

        Raises:
            PulsingRuntimeError: The body is no stream.
        """
        if self._reader is None:
            raise PulsingRuntimeError(f"message {self.msg_type!r} has a plain body, not a stream: read .payload")
        return self._reader

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.stream_reader()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and (self.msg_type, self.payload) == (other.msg_type, other.payload)

    def __hash__(self) -> int:
        return hash((self.msg_type, self.payload))

    def __repr__(self) -> str:
        body = "a stream" if self.is_stream else f"{len(self.payload)} bytes"
        return f"<Message {self.msg_type!r}, {body}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reader is not None:
            raise TypeError("a streaming Message cannot be pickled; return it from the handler to stream it")
        return Message, (self.msg_type, self.payload)


class StreamWriter:
    """The producer's end of a `StreamMessage`."""

    __slots__ = ("_capacity", "_closed", "_error", "_gone", "_items", "_readable", "_writable")

    def __init__(self, buffer_size: int) -> None:
        self._capacity = buffer_size
        self._items: deque[Any] = deque()
        self._closed = False
        self._gone = False
        self._error: BaseException | None = None
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    async def write(self, item: Any) -> None:
        """Sends one item, waiting while the buffer is full.

        Raises:
            PulsingRuntimeError: The stream is closed, or its reader has gone.
        """
        while not self._writable.is_set():
            await self._writable.wait()
        if self._gone:
            raise PulsingRuntimeError("the reader of this stream has gone")
        if self._closed:
            raise PulsingRuntimeError("this stream is closed")
        self._items.append(item)
        self._readable.set()
        if len(self._items) >= self._capacity:
            self._writable.clear()

    def close(self) -> None:
        """The stream is complete; idempotent."""
        self._closed = True
        self._readable.set()
        self._writable.set()

    def error(self, error: str | BaseException) -> None:
        """The stream failed: its reader gets `error`."""
        if not self._closed:
            self._error = error if isinstance(error, BaseException) else PulsingActorError(error)
            self.close()

    async def _iterate(self) -> AsyncGenerator[Any, None]:
        try:
            while True:
                while self._items:
                    item = self._items.popleft()
                    self._writable.set()
                    yield item
                if self._closed:
                    if self._error is not None:
                        raise self._error
                    return
                self._readable.clear()
                await self._readable.wait()
        finally:
            self._gone = True
            self._writable.set()


class StreamMessage:
    """A message whose body is a stream. `create` makes one with its writer; return the message, feed the writer."""

    __slots__ = ("_writer", "msg_type")

    def __init__(self, msg_type: str, writer: StreamWriter) -> None:
        self.msg_type = msg_type
        self._writer = writer

    @classmethod
    def create(cls, msg_type: str, buffer_size: int = 32) -> tuple[StreamMessage, StreamWriter]:
        """A streaming message and its writer.

        Args:
            msg_type: What kind of message it is.
            buffer_size: Items that `write` takes before it waits for the reader.

        Raises:
            ValueError: `buffer_size` is below 1.
        """
        if buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size}: a stream needs room for one item at least")
        writer = StreamWriter(buffer_size)
        return cls(msg_type, writer), writer

    def __repr__(self) -> str:
        return f"<StreamMessage {self.msg_type!r}>"
