"""What a handler may return to answer with a stream, as one kind of iterator."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from pulsing.core._streams import StreamReader
from pulsing.core.messaging import Message, StreamMessage

_TURN = 32
"""Items of a sync generator between two turns of the event loop."""

_END = object()


def stream_type(result: Any) -> str | None:
    """The message type of a streaming message; None for all else."""
    if isinstance(result, StreamMessage) or (isinstance(result, Message) and result.is_stream):
        return result.msg_type
    return None


async def as_items(result: Any, in_thread: Callable[..., Awaitable[Any]] | None) -> AsyncGenerator[Any, None]:
    """The items of a generator, an asynchronous generator or a streaming message; closes it at the end."""
    if isinstance(result, StreamMessage):
        source = result._writer._iterate()
        try:
            async for item in source:
                yield item
        finally:
            await source.aclose()
    elif inspect.isasyncgen(result):
        try:
            async for item in result:
                yield item
        finally:
            await result.aclose()
    elif isinstance(result, Message):
        reader = result.stream_reader()
        try:
            async for item in reader:
                yield item
        finally:
            if isinstance(reader, StreamReader):
                await reader.aclose()
    elif in_thread is not None:
        try:
            while (item := await in_thread(next, result, _END)) is not _END:
                yield item
        finally:
            await in_thread(result.close)
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
