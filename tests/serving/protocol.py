"""A client of the worker protocol, as a Router is one, in Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from pulsing import _core
from pulsing.core import _bridge
from pulsing.core._errors import from_core

CODEC = 3
WINDOW = 16


class Call:
    """One call that is out: iterate over the heads of its stream."""

    def __init__(self, ref: Any, head: bytes, body: bytes | None = None, *, window: int = WINDOW) -> None:
        self._bridge = _bridge.bridge_of(asyncio.get_running_loop())
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self.handle = ref._system.core.call(
            self._bridge.core, ref.node_id.raw, ref.actor_id.raw, CODEC, head,
            [] if body is None else [body], 30.0, None, [], None, False, window,
        )  # fmt: skip
        self.token = self.handle.token
        self._bridge.handlers[self.token] = self._events.put_nowait

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while True:
                event = await asyncio.wait_for(self._events.get(), 30)
                kind = event[0]
                if kind == _bridge.ITEM:
                    self.handle.grant(1)
                    yield event[3]
                elif kind == _bridge.VALUE:
                    yield event[3]
                    return
                elif kind == _bridge.END:
                    return
                elif kind == _bridge.ERROR:
                    raise from_core(event[2])
        finally:
            self._bridge.forget(self.token)

    def cancel(self) -> None:
        self.handle.cancel()


def generate(
    ref: Any,
    *,
    api: str = "chat.completions",
    window: int = WINDOW,
    deadline: float | None = None,
    whole: bool = False,
    **body: Any,
) -> Call:
    if api == "chat.completions":
        body.setdefault("messages", [{"role": "user", "content": "hello"}])
    head = _core.encode_request("generate", api=api, request_id="r1", deadline=deadline, whole=whole)
    return Call(ref, head, json.dumps(body).encode(), window=window)


async def deltas(call: Call) -> AsyncIterator[Any]:
    async for head in call:
        for delta in _core.decode_deltas(head):
            yield delta


async def answer(ref: Any, **body: Any) -> list[Any]:
    return [delta async for delta in deltas(generate(ref, **body))]


def subscribe(ref: Any, *, blocks: bool = False) -> Call:
    return Call(ref, _core.encode_request("subscribe_load", blocks=blocks))


async def describe(ref: Any) -> Any:
    async for head in Call(ref, _core.encode_request("describe")):
        return _core.Description.decode(head)
    raise AssertionError("describe was not answered")
