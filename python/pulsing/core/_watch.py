"""Watching actors for their end, and linking their fates (R9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pulsing import _core
from pulsing.core._bridge import ERROR, bridge_of
from pulsing.core._delivery import Delivery
from pulsing.core._dispatch import spec_of
from pulsing.core._errors import from_core
from pulsing.core._proxy import ActorProxy
from pulsing.core._refs import ActorRef
from pulsing.core._reply import NoReply
from pulsing.core._shown import shown

if TYPE_CHECKING:
    from pulsing.core._bridge import Event, LoopBridge
    from pulsing.core._cell import Cell
    from pulsing.core._ids import ActorId, NodeId
    from pulsing.core._system import ActorSystem


@dataclass(frozen=True, slots=True)
class Ended:
    """How a watched actor ended.

    Attributes:
        ref: Which actor.
        reason: "stopped": stopped, drained, or ended itself. "failed": it, or an actor linked to it, failed and was
            given up. "killed". "node_lost": its node was declared down. "node_left": its node left the cluster.
            "not_found": its node knows no such actor; it never lived there, or ended long ago.
        error: What it failed with, in words; "" for the other reasons.
    """

    ref: ActorRef
    reason: str
    error: str = ""

    @property
    def actor_id(self) -> ActorId:
        """Id of the actor."""
        return self.ref.actor_id

    @property
    def node_id(self) -> NodeId:
        """Id of the node it lived on."""
        return self.ref.node_id

    @property
    def abnormal(self) -> bool:
        """Whether links pass it along: it failed, was killed, or its node was lost."""
        return self.reason in {"failed", "killed", "node_lost"}


class Watch:
    """A watch of one actor, from its making on: ``ended = await pul.watch(ref)``.

    It can be awaited several times, and be used as ``async with pul.watch(ref) as watch: ...``, which closes it at the
    end. Closed or dropped, it costs nothing more.
    """

    __slots__ = ("__weakref__", "_bridge", "_cell", "_future", "_handle", "_token", "ref")

    def __init__(self, ref: ActorRef, told: Callable[[Ended], None] | None = None) -> None:
        """Begins to watch `ref`; `told` is called on the loop with how it ended."""
        loop = asyncio.get_running_loop()
        system = ref._system
        self.ref = ref
        self._future: asyncio.Future[Ended] = loop.create_future()
        # Asked or not, the end of the own system is no error to shout about.
        self._future.add_done_callback(lambda future: future.cancelled() or future.exception())
        if told is not None:
            self._future.add_done_callback(lambda future: _tell(future, told))
        self._cell: Cell | None = None
        self._handle: _core.WatchHandle | None = None
        self._bridge: LoopBridge | None = None
        self._token: Any = None
        cell = system.cell(ref.actor_id) if ref.node_id == system.node_id and loop is system.loop else None
        if cell is not None:
            self._here(cell)
        else:
            self._there(system, bridge_of(loop))

    def _here(self, cell: Cell) -> None:
        ref, future = self.ref, self._future

        def ended(reason: str, error: str) -> None:
            if not future.done():
                future.set_result(Ended(ref, reason, error))

        if cell.life.watchers is None:
            cell.life.watchers = {}
        self._cell, self._token = cell, object()
        cell.life.watchers[self._token] = ended

    def _there(self, system: ActorSystem, bridge: LoopBridge) -> None:
        ref, future = self.ref, self._future

        def ended(event: Event) -> None:
            bridge.forget(event[1])
            if future.done():
                return
            if event[0] == ERROR:
                future.set_exception(from_core(event[2]))
            else:
                future.set_result(Ended(ref, *event[2]))

        self._bridge, self._token = bridge, bridge.token(ended)
        try:
            self._handle = system.core.watch_actor(bridge.core, self._token, ref.node_id.raw, ref.actor_id.raw)
        except BaseException:
            bridge.forget(self._token)
            raise

    @property
    def done(self) -> bool:
        """Whether the actor has ended, or the watch."""
        return self._future.done()

    def close(self) -> None:
        """Ends the watch; who awaits it gets CancelledError. Idempotent."""
        self._release()
        self._future.cancel()

    def _release(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None and cell.life.watchers is not None:
            cell.life.watchers.pop(self._token, None)
        handle, self._handle = self._handle, None
        if handle is not None and self._bridge is not None:
            self._bridge.forget(self._token)
            if not self._bridge.closed:
                handle.cancel()

    def __await__(self) -> Generator[Any, Any, Ended]:
        return self._wait().__await__()

    async def _wait(self) -> Ended:
        # Cancelling one who waits must not end the watch of others.
        return await asyncio.shield(self._future)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._future.done():
            self._release()

    def __repr__(self) -> str:
        return f"<Watch of {self.ref!r}{', done' if self.done else ''}>"


def _tell(future: asyncio.Future[Ended], told: Callable[[Ended], None]) -> None:
    if not future.cancelled() and future.exception() is None:
        told(future.result())


def ref_of(target: ActorRef | ActorProxy) -> ActorRef:
    """The reference behind a proxy.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(target, ActorRef):
        return target
    if isinstance(target, ActorProxy):
        return target.ref
    raise TypeError(f"expected an ActorRef or a proxy, not {shown(target)}; `await pul.resolve(name)` gives one")


def watch(target: ActorRef | ActorProxy) -> Watch:
    """Watches an actor, here or on another node, from now on: ``ended = await pul.watch(ref)``.

    A broken connection is not the end of an actor: the watch goes on when the node is reached again, and ends with
    "node_lost" when the cluster declares the node down.

    Args:
        target: A reference or proxy. One that has ended already is told at once.

    Raises:
        TypeError: Neither.
        SystemShutDownError: From `await`: the watching system was shut down first.
    """
    return Watch(ref_of(target))


async def link(one: ActorRef | ActorProxy, other: ActorRef | ActorProxy) -> None:
    """Links two actors, wherever they live: when one fails, is killed or its node is lost, the other is stopped and
    ends as "failed", naming the first. A stop or drain does not pass along. Linking twice changes nothing.

    Raises:
        ActorNotFoundError: One of them has ended; there is no link.
        ConnectionLostError, NodeNotFoundError: Its node cannot be asked.
    """
    await _link(ref_of(one), ref_of(other), True)


async def unlink(one: ActorRef | ActorProxy, other: ActorRef | ActorProxy) -> None:
    """Undoes `link`; nothing happens when there is none.

    Raises:
        ConnectionLostError, NodeNotFoundError: A node cannot be asked.
    """
    await _link(ref_of(one), ref_of(other), False)


async def _link(one: ActorRef, other: ActorRef, linked: bool) -> None:
    ends = [(ref.node_id.raw, ref.actor_id.raw) for ref in (one, other)]
    await one._system.run_core(lambda core, bridge, token: core.link(bridge, token, ends[0], ends[1], linked))


class Tools:
    """What one actor watches and is about to be linked to."""

    __slots__ = ("_cell", "_links", "_watches")

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._watches: dict[ActorRef, Watch] = {}
        self._links: list[ActorRef] = []

    def watch(self, target: ActorRef | ActorProxy) -> Watch:
        """See `Actor.watch`."""
        ref = ref_of(target)
        known = self._watches.get(ref)
        if known is None or known.done:
            known = self._watches[ref] = Watch(ref, self._told)
        return known

    def unwatch(self, target: ActorRef | ActorProxy) -> None:
        """See `Actor.unwatch`."""
        known = self._watches.pop(ref_of(target), None)
        if known is not None:
            known.close()

    async def link(self, target: ActorRef | ActorProxy) -> None:
        """See `Actor.link`."""
        if self._cell.key:
            await link(self._cell.system.ref_of(self._cell), target)
        else:
            # It is still in on_start, and no other node could find it.
            self._links.append(ref_of(target))

    async def unlink(self, target: ActorRef | ActorProxy) -> None:
        """See `Actor.unlink`."""
        ref = ref_of(target)
        if ref in self._links:
            self._links.remove(ref)
        if self._cell.key:
            await unlink(self._cell.system.ref_of(self._cell), ref)

    async def published(self) -> None:
        """The actor can be found: makes the links that `on_start` asked for; raises what `link` raises."""
        links, self._links = self._links, []
        for ref in links:
            await self.link(ref)

    def close(self) -> None:
        """The actor has ended."""
        watches, self._watches = self._watches, {}
        for one in watches.values():
            one.close()

    def _told(self, ended: Ended) -> None:
        if self._watches.get(ended.ref) is not None:
            del self._watches[ended.ref]
        cls = type(self._cell.instance)
        if callable(getattr(cls, "on_terminated", None)):
            spec = spec_of(cls, "on_terminated")
            d = Delivery(self._cell, spec, (ended,), {}, NoReply())
            d.one_way = True
            self._cell.mailbox.signal(d)


def tools_of(cell: Cell) -> Tools:
    """What an actor watches and links."""
    if cell.life.tools is None:
        cell.life.tools = Tools(cell)
    return cell.life.tools
