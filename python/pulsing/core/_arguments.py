"""Streams as arguments: what an iterator among a call's arguments is at the callee, and on the way there.

The caller keeps the iterator (`_sources`). The callee gets an `ArgumentStream` in its place, on the caller's loop as on
another node, and fetches the items with a credit window like those of any stream (R6). Both end with the call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, Self

from pulsing.core._bridge import bridge_of
from pulsing.core._context import current
from pulsing.core._dispatch import OP_MESSAGE
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._options import PLAIN
from pulsing.core._outbound import remote_ask
from pulsing.core._sources import END, Source
from pulsing.core._streams import WINDOW, StreamReader
from pulsing.core._threads import wait_for
from pulsing.core.messaging import Message, StreamMessage
from pulsing.exceptions import PulsingRuntimeError

if TYPE_CHECKING:
    from pulsing.core._options import Options
    from pulsing.core._refs import ActorRef
    from pulsing.core._system import ActorSystem

PLAIN_TYPES = frozenset({int, float, str, bytes, bool, type(None), list, dict, tuple, set})
"""Types that need no look: neither streams themselves, nor asked whether something in them is."""


def carries_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the arguments is a stream."""
    for one in args:
        if type(one) not in PLAIN_TYPES and is_stream(one):
            return True
    return any(type(one) not in PLAIN_TYPES and is_stream(one) for one in kwargs.values())


def is_stream(value: Any) -> bool:
    """Whether `value` streams: a generator of either kind, any asynchronous iterator, a call of an actor's generator
    that has not been awaited, or a message with a streamed body.
    """
    if isinstance(value, Message):
        return value.is_stream
    return (
        inspect.isgenerator(value)
        or isinstance(value, (AsyncIterator, StreamMessage))
        or getattr(type(value), "_pulsing_streams", False) is True
    )


def no_stream_in_tell(what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
    """Why `tell` takes no stream."""
    found = [str(at) for at, one in enumerate(args) if is_stream(one)]
    found += [repr(key) for key, one in kwargs.items() if is_stream(one)]
    return TypeError(
        f"tell cannot stream argument {', '.join(found)} to {what}: nobody would learn when it is over and close the "
        "stream; make it a call, in a task of its own if the answer does not matter"
    )


async def ask_streaming(
    ref: ActorRef, op: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """`ActorRef._ask` of a call with streams among its arguments; they are closed when it is over.

    A call that is answered by a stream is over when that stream is.
    """
    if options.idempotent:
        raise ValueError(
            f"an idempotent call of {ref._label()}.{name or 'receive'} cannot carry a stream: it could not be sent "
            "again once items of the stream are gone"
        )
    system = ref._system
    bridge = bridge_of(asyncio.get_running_loop())
    here = ref.is_local() and bridge.loop is system.loop and not system.debug_copy
    sources: list[Source] = []

    def sent(value: Any) -> Any:
        if type(value) in PLAIN_TYPES or not is_stream(value):
            return value
        source = Source(system, bridge, value, f"{ref._label()}.{name or 'receive'}")
        sources.append(source)
        if here:
            stream = ArgumentStream(system, source)
            return stream if source.msg_type is None else Message._streaming(source.msg_type, stream)
        return _Ticket(system.node_id, *source.offer(), source.msg_type)

    def over() -> list[asyncio.Task[None]]:
        return [task for source in sources if (task := source.stop()) is not None]

    try:
        args = tuple(sent(one) for one in args)
        kwargs = {key: sent(one) for key, one in kwargs.items()}
        result = await ref._ask(op, name, args, kwargs, options)
    except GeneratorExit:
        # The caller's loop is being torn down: nothing can be waited for.
        over()
        raise
    except BaseException:
        if ending := over():
            await asyncio.wait(ending)
        raise
    answer = result.stream_reader() if isinstance(result, Message) and result.is_stream else result
    if isinstance(answer, StreamReader):
        answer.when_over(over)
    elif ending := over():
        await asyncio.wait(ending)
    return result


class ArgumentStream(AsyncIterator[Any]):
    """A stream that came as an argument of a call. It ends with the call.

    Read it with ``async for``; in a ``@pul.blocking`` method, or where the caller gave a sync generator on the same
    loop, with ``for``. Whoever leaves the loop early calls `aclose` (or uses ``async with``), or just drops the object:
    either way the ``finally`` of the caller's generator runs promptly. What that generator raises is raised here.

    Raises:
        CallCancelledError: It is read after the end of its call.
        PulsingRuntimeError: It is read twice.
        ConnectionLostError: The caller's node is gone.
        PulsingTimeoutError: No item within the idle limit of streams.
    """

    __slots__ = ("__weakref__", "_closed", "_opening", "_origin", "_reader", "_system")

    def __init__(self, system: ActorSystem, origin: Source | _Elsewhere) -> None:
        self._system = system
        self._origin = origin
        self._reader: StreamReader | None = None
        self._opening = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        reader = self._reader
        return self._first() if reader is None else reader.__anext__()

    async def _first(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        if self._opening:
            raise RuntimeError("this stream is being read by another task already")
        self._opening = True
        try:
            reader = self._reader = await self._origin.open()
        finally:
            self._opening = False
        return await reader.__anext__()

    async def aclose(self) -> None:
        """Gives up the rest of the stream and ends the caller's iterator; idempotent."""
        self._closed = True
        if self._reader is not None:
            await self._reader.aclose()
        elif isinstance(self._origin, Source):
            ending = self._origin.stop()
            if ending is not None:
                await asyncio.wait([ending])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __iter__(self) -> Iterator[Any]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._waiting()
        return self._inline(self._origin)

    def _inline(self, origin: Source | _Elsewhere) -> Generator[Any, None, None]:
        step = origin.step()

        def items() -> Generator[Any, None, None]:
            try:
                while (item := step()) is not END:
                    yield item
            finally:
                origin.stop()

        return items()

    def _waiting(self) -> Generator[Any, None, None]:
        loop = self._system.loop
        try:
            while items := wait_for(loop, self._some):
                yield from items
        finally:
            wait_for(loop, self.aclose)

    async def _some(self) -> list[Any]:
        """The next item with those that have arrived behind it; none after the last."""
        try:
            items = [await self.__anext__()]
        except StopAsyncIteration:
            return []
        reader = self._reader
        while reader is not None and reader.buffered and len(items) < WINDOW:
            items.append(await reader.__anext__())
        return items

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a stream travels as an argument of its own, not inside other objects")

    def __repr__(self) -> str:
        return f"<ArgumentStream {'closed' if self._closed else 'open' if self._reader else 'not begun'}>"


class _Ticket:
    """What travels in place of an iterator: where its items can be fetched."""

    __slots__ = ("_parts",)

    def __init__(self, node: NodeId, actor: bytes, key: int, msg_type: str | None) -> None:
        self._parts = (node.raw, actor, key, msg_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return redeem, self._parts


def redeem(node: bytes, actor: bytes, key: int, msg_type: str | None) -> ArgumentStream | Message:
    """The stream that a call brought from elsewhere."""
    from pulsing.core._pickle import decoding_system
    from pulsing.core._refs import ActorRef

    system = decoding_system()
    if system is None:
        raise PulsingRuntimeError("a stream can be read by the callee of its call only")
    stream = ArgumentStream(system, _Elsewhere(ActorRef(system, NodeId(node), ActorId(actor)), key))
    return stream if msg_type is None else Message._streaming(msg_type, stream)


class _Elsewhere:
    """The origin of a stream whose iterator lives on another node or loop."""

    __slots__ = ("_key", "_ref")

    def __init__(self, ref: ActorRef, key: int) -> None:
        self._ref = ref
        self._key = key

    async def open(self) -> StreamReader:
        """Asks for the items."""
        context = current.get()
        limit = self._ref._system.default_timeout
        if context is not None and context.deadline is not None:
            left = max(0.001, context.deadline - asyncio.get_running_loop().time())
            limit = left if limit is None else min(limit, left)
        ticket = Message("", str(self._key).encode())
        reader: StreamReader = await remote_ask(self._ref, OP_MESSAGE, "", (ticket,), {}, limit, PLAIN, context)
        return reader

    def step(self) -> Any:
        """A sync method on the loop cannot wait for another node.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a stream from elsewhere cannot be read by a sync method on the event loop: make the method async and read "
            "with 'async for', or mark it @pul.blocking"
        )

    def stop(self) -> None:
        """Nothing is open yet: the end of the call closes the caller's iterator."""
