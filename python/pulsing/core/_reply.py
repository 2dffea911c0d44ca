"""Where a handler's answer goes: to a caller on this loop, or to a call that came through Rust."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from pulsing import _core
from pulsing.core import _errors
from pulsing.core._pickle import copied, dumps, loads
from pulsing.core._streams import WINDOW, StreamReader
from pulsing.core.messaging import Message
from pulsing.exceptions import PulsingError, PulsingRuntimeError

if TYPE_CHECKING:
    from pulsing.core._bridge import Event, LoopBridge
    from pulsing.core._delivery import Delivery

RAW, PICKLE, JSON = 0, 1, 2


class Reply(Protocol):
    """One answer: a value, an error, or a stream. Nothing is taken after the end."""

    def value(self, value: Any) -> None:
        """The single answer."""

    def error(self, error: BaseException) -> None:
        """The failure of the call, or of its stream."""

    def start(self, msg_type: str | None = None) -> None:
        """The answer is a stream."""

    def try_send(self, item: Any) -> bool:
        """Sends an item if the consumer can take it."""

    async def wait_credit(self) -> None:
        """Returns when the consumer may take another item."""

    def end(self) -> None:
        """The stream is complete."""


class NoReply:
    """For `tell`: nobody waits."""

    def value(self, value: Any) -> None: ...
    def error(self, error: BaseException) -> None: ...
    def start(self, msg_type: str | None = None) -> None: ...
    def try_send(self, item: Any) -> bool:
        return True

    async def wait_credit(self) -> None: ...
    def end(self) -> None: ...


class TellReply(NoReply):
    """For a `tell` that came through Rust: its sender learns that it has a place, or that the actor has ended."""

    __slots__ = ("_call",)

    def __init__(self, call: _core.InboundCall) -> None:
        self._call = call

    def error(self, error: BaseException) -> None:
        refusal = _errors.to_refusal(error)
        if refusal is not None and refusal[0] == "actor_stopped":
            self._call.refuse("actor_stopped")
        else:
            self._call.accept()


class LocalReply:
    """For a caller on the actor's own loop: objects pass by reference (R15)."""

    # No slots: most answers are one value, and what is not set costs nothing.
    copy = False
    """Pass copies (`PULSING_DEBUG_COPY`)."""
    done = False
    result: Any = None
    failure: BaseException | None = None
    future: asyncio.Future[None] | None = None
    """What the caller waits for, if it has to."""
    delivery: Delivery | None = None
    # Weak: the consumer alone keeps its reader alive, and ends the producer by dropping it.
    _reader: weakref.ref[StreamReader] | None = None
    _credit = WINDOW
    _resume: asyncio.Future[None] | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, copy: bool = False) -> None:
        self._loop = loop
        if copy:
            self.copy = True

    def _settle(self) -> None:
        self.done = True
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def value(self, value: Any) -> None:
        if not self.done:
            if self.copy:
                try:
                    value = self._copied(value)
                except BaseException as error:  # noqa: BLE001 - as in `RemoteReply.value`
                    self.error(_as_answer(error, value))
                    return
            self.result = value
            self.done = True
            if self.future is not None and not self.future.done():
                self.future.set_result(None)

    def error(self, error: BaseException) -> None:
        if self._reader is not None:
            reader = self._reader()
            if reader is not None:
                reader.finish(error)
        elif not self.done:
            self.failure = error
            self._settle()

    def take(self) -> Any:
        """The result, no longer held here."""
        result, self.result = self.result, None
        if self._reader is None:
            # They hold each other, which is for the collector to find.
            self.delivery = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return result

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Message):
            return value
        try:
            return copied(value)
        except TypeError as error:
            raise _unsendable(error, value) from error.__cause__

    def start(self, msg_type: str | None = None) -> None:
        if self.done:
            return
        reader = StreamReader(self._loop, self._grant, self._abandon, self._idle_limit())
        self.result = reader if msg_type is None else Message._streaming(msg_type, reader)
        self._reader = weakref.ref(reader)
        self._settle()

    def _idle_limit(self) -> float | None:
        return None if self.delivery is None else self.delivery.cell.system.config.stream_idle

    def _grant(self, items: int) -> None:
        self._credit += items
        if self._resume is not None and not self._resume.done():
            self._resume.set_result(None)

    def _abandon(self) -> asyncio.Task[None] | None:
        return self.delivery.abandon() if self.delivery is not None else None

    def try_send(self, item: Any) -> bool:
        reader = self._reader() if self._reader is not None else None
        if reader is None:
            # Dropped. The producer hears of it in a later turn of the loop, which it must let come.
            self._credit = 0
            return False
        if self._credit == 0:
            return False
        self._credit -= 1
        reader.push(self._copied(item) if self.copy else item)
        return True

    async def wait_credit(self) -> None:
        if self._credit > 0:
            return
        self._resume = self._loop.create_future()
        try:
            await self._resume
        finally:
            self._resume = None

    def end(self) -> None:
        reader = self._reader() if self._reader is not None else None
        if reader is not None:
            reader.finish()


class RemoteReply:
    """For a call that came through Rust, from another node or another part of this process."""

    __slots__ = ("_bridge", "call", "done")

    def __init__(self, bridge: LoopBridge, call: _core.InboundCall) -> None:
        self._bridge = bridge
        self.call = call
        self.done = False

    def value(self, value: Any) -> None:
        if self.done:
            return
        if self.call.answer(value):
            self.done = True
            return
        try:
            codec, head, buffers = encode(value)
        except BaseException as error:  # noqa: BLE001 - whatever the value's own pickling raises is the answer (R1)
            self.error(_as_answer(error, value))
            return
        self.done = True
        self.call.reply(head, buffers, codec)

    def error(self, error: BaseException) -> None:
        if self.done:
            return
        self.done = True
        refusal = _errors.to_refusal(error)
        if refusal is not None:
            self.call.refuse(*refusal)
        else:
            self.call.fail(*_errors.encode(error))

    def start(self, msg_type: str | None = None) -> None:
        if self.done:
            return
        # The type of the message that the stream belongs to; "" for a bare generator.
        try:
            self.call.start((msg_type or "").encode())
        except _core.CoreError:
            raise consumer_gone() from None

    def try_send(self, item: Any) -> bool:
        if self.done:
            return True
        return self._send(*encode(item))

    def _send(self, codec: int, head: bytes, buffers: list[Any]) -> bool:
        try:
            return self.call.try_send(head, buffers, codec)
        except _core.CoreError:
            raise consumer_gone() from None

    async def wait_credit(self) -> None:
        await wait_credit(self._bridge, self.call)

    def end(self) -> None:
        if not self.done:
            self.done = True
            self.call.end()


def consumer_gone() -> PulsingError:
    """What a producer gets whose consumer has gone."""
    return PulsingRuntimeError("the consumer of this stream has gone")


async def wait_credit(bridge: LoopBridge, call: _core.InboundCall) -> None:
    """Returns when the stream that answers `call` may have credit."""
    future: asyncio.Future[None] = bridge.loop.create_future()

    def arrived(event: Event) -> None:
        if not future.done():
            future.set_result(None)

    token = bridge.token(arrived)
    try:
        call.wait_credit(token)
        await future
    finally:
        bridge.forget(token)


def encode(value: Any) -> tuple[int, bytes, list[Any]]:
    """``(codec, head, buffers)`` of a message, an answer or a stream item."""
    if type(value) is Message and not value.is_stream:
        return RAW, value.msg_type.encode(), [value.payload]
    try:
        head, buffers = dumps(value)
    except TypeError as error:
        raise _unsendable(error, value) from error.__cause__
    return PICKLE, head, buffers


def _unsendable(error: TypeError, answer: Any) -> TypeError:
    from pulsing.core._unsendable import unsendable

    return unsendable(error, "its caller", [("the answer", answer)])


def _as_answer(error: BaseException, value: Any) -> BaseException:
    """What the caller gets whose answer `value` raised `error` when it was pickled. An exit or a cancellation of its
    pickling is neither the caller's nor the loop's.
    """
    if isinstance(error, Exception):
        return error
    told = TypeError(f"cannot send the answer, a {type(value).__name__}, to its caller: {type(error).__name__}")
    told.__cause__ = error
    return told


def decode(codec: int, head: bytes, buffers: list[Any], system: Any) -> Any:
    """What `encode` took apart.

    Raises:
        PulsingError: The codec is none that Python values travel in.
    """
    if codec == PICKLE:
        return loads(head, buffers, system)
    if codec == RAW:
        body = bytes(buffers[0]) if buffers else b""
        if system is not None and len(body) >= 1 << 16:
            system.counts.bytes_copied += len(body)
        return Message(head.decode(), body)
    if codec == JSON:
        import json

        return json.loads(head)
    raise PulsingRuntimeError(f"codec {codec} does not carry Python values; call this actor through its own protocol")
