"""Watching a name: which instances it has, as they come, change and go (M5)."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from pulsing import _core
from pulsing.core._bridge import ERROR, bridge_of
from pulsing.core._errors import from_core
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._refs import ActorRef

if TYPE_CHECKING:
    from pulsing.core._bridge import Event, LoopBridge
    from pulsing.core._system import ActorSystem


@dataclass(frozen=True, slots=True)
class NameChange:
    """One change of the instances of a watched name.

    Attributes:
        kind: "added": it serves under the name, from now on or since before the watch. "updated": its metadata changed.
            "removed": it serves under the name no more: it ended, or its node did.
        name: The name.
        node_id: Id of the node it lives on.
        actor_id: Id of the instance.
        address: Address of its node, ``ip:port``.
        metadata: What is published with the name; of a removed instance what was told last.
        ref: A reference to it.
    """

    kind: Literal["added", "updated", "removed"]
    name: str
    node_id: NodeId
    actor_id: ActorId
    address: str
    metadata: dict[str, str]
    ref: ActorRef = field(repr=False, compare=False)


class NameWatch:
    """The changes of one name: ``async for change in pul.watch_name("worker")``.

    The instances that exist come first, as "added". What changes while nobody asks is folded: each instance is told of
    at most once, as it is by then. So a slow loop costs no memory and still ends at the truth.

    Closed (`close`, or leaving ``async with``) or dropped, it costs nothing more.
    """

    __slots__ = ("__weakref__", "_bridge", "_handle", "_known", "_system", "_token", "_told", "_wait", "name")

    def __init__(self, system: ActorSystem, name: str) -> None:
        """Begins to watch `name` as `system` sees it; `ActorSystem.watch_name` says what it raises."""
        self.name = name
        self._system = system
        self._told: deque[NameChange] = deque()
        self._known: dict[ActorId, NameChange] = {}
        self._wait: asyncio.Future[None] | None = None
        self._bridge: LoopBridge | None = None
        self._token = 0
        self._handle: _core.NameWatchHandle | None = None
        try:
            self._handle = system.core.watch_name(name)
        except _core.CoreError as error:
            raise from_core(error.args) from None

    @property
    def instances(self) -> list[ActorRef]:
        """The instances there are after the changes told so far."""
        return [change.ref for change in self._known.values()]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NameChange:
        """The next change. Cancelling the wait loses none.

        Raises:
            StopAsyncIteration: The watch was closed.
            SystemShutDownError: The watching system was shut down.
        """
        while not self._told:
            if self._handle is None:
                raise StopAsyncIteration
            wait = self._ask(self._handle) if self._wait is None else self._wait
            # A wait cut short goes on: what it brings is for whoever asks next.
            await asyncio.shield(wait)
        change = self._told.popleft()
        if change.kind == "removed":
            self._known.pop(change.actor_id, None)
        else:
            self._known[change.actor_id] = change
        return change

    def _ask(self, handle: _core.NameWatchHandle) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        bridge = self._bridge = bridge_of(loop)
        wait: asyncio.Future[None] = loop.create_future()
        # Who was cancelled meanwhile does not look at it.
        wait.add_done_callback(lambda future: future.cancelled() or future.exception())
        me = weakref.ref(self)

        def take(event: Event) -> None:
            bridge.forget(event[1])
            watch = me()
            if watch is not None:
                watch._take(event)

        # The bridge must not keep alive what nobody iterates over any more.
        self._token = bridge.token(take)
        self._wait = wait
        try:
            handle.next(bridge.core, self._token)
        except BaseException:
            bridge.forget(self._token)
            self._wait = None
            raise
        return wait

    def _take(self, event: Event) -> None:
        wait, self._wait = self._wait, None
        if wait is None or wait.done():
            return
        if event[0] == ERROR:
            wait.set_exception(from_core(event[2]))
            return
        self._told.extend(self._change(kind, one) for kind, one in event[2])
        wait.set_result(None)

    def _change(self, kind: Literal["added", "updated", "removed"], one: dict[str, Any]) -> NameChange:
        node, actor = NodeId(one["node_id"]), ActorId(one["actor_id"])
        ref = ActorRef(self._system, node, actor, self.name)
        return NameChange(kind, self.name, node, actor, one["addr"], one["metadata"], ref)

    def close(self) -> None:
        """Ends the watch, and loops over it. Idempotent."""
        self._told.clear()
        self._release()
        wait, self._wait = self._wait, None
        if wait is not None and not wait.done() and not wait.get_loop().is_closed():
            wait.set_result(None)

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and (self._bridge is None or not self._bridge.closed):
            if self._bridge is not None:
                self._bridge.forget(self._token)
            handle.close()

    def __del__(self) -> None:
        self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<NameWatch of {self.name!r}{', closed' if self._handle is None else ''}>"
