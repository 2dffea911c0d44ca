"""What a handler may return to answer with a stream, as one kind of iterator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from pulsing.core.messaging import Message, StreamMessage

_TURN = 32
"""Items of a sync generator between two turns of the event loop."""

_END = object()


def stream_type(result: Any) -> str | None:
    """The message type of a streaming message; None for all else."""
    if isinstance(result, StreamMessage) or (isinstance(result, Message) and result.is_stream):
        return result.msg_type
    return None


async def close(iterator: AsyncIterator[Any]) -> None:
    """Ends an asynchronous iterator, if it can be ended."""
    aclose: Callable[[], Awaitable[None]] | None = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


async def as_items(result: Any, in_thread: Callable[..., Awaitable[Any]] | None) -> AsyncGenerator[Any, None]:
    """The items of a generator, an asynchronous iterator or a streaming message; closes it at the end."""
    if isinstance(result, StreamMessage):
        written = result._writer._iterate()
        try:
            async for item in written:
                yield item
        finally:
            await written.aclose()
    elif isinstance(result, (AsyncIterator, Message)):
        source = result.stream_reader() if isinstance(result, Message) else result
        try:
            async for item in source:
                yield item
        finally:
            await close(source)
    elif in_thread is not None:
        # A step that is cancelled runs on in its thread, and a generator that runs cannot be closed: closing waits.
        turn = threading.Lock()

        def step() -> Any:
            with turn:
                return next(result, _END)

        def end() -> None:
            with turn:
                result.close()

        try:
            while (item := await in_thread(step)) is not _END:
                yield item
        finally:
            await in_thread(end)
    else:
        try:
            since = 0
            for item in result:
                yield item
                since += 1
                if since == _TURN:
                    since = 0
                    await asyncio.sleep(0)
        finally:
            result.close()
