"""Watches and links on one node: R9."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from runtime_util import eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import ActorNotFoundError, SystemShutDownError


@pul.remote(restart_policy="on_failure", max_restarts=0)
class Frail:
    """Any failure is its last."""

    def ping(self) -> str:
        return "pong"

    def crash(self) -> None:
        raise RuntimeError("crash")


async def ended_by(system: pul.ActorSystem, how: str) -> pul.ActorProxy:
    one = await Frail.spawn(system=system)
    if how == "crash":
        with pytest.raises(RuntimeError):
            await one.crash()
    else:
        await getattr(system, how)(one)
    return one


ENDS = (
    ("stop", "stopped", ""),
    ("drain", "stopped", ""),
    ("kill", "killed", ""),
    ("crash", "failed", "RuntimeError: crash"),
)


def test_r9_a_watch_tells_why_an_actor_ended_also_when_it_had() -> None:
    async def main() -> None:
        async with local_system() as system:
            for how, reason, error in ENDS:
                one = await Frail.spawn(system=system)
                watches = [pul.watch(one), pul.watch(one.ref)]
                if how == "crash":
                    with pytest.raises(RuntimeError):
                        await one.crash()
                else:
                    await getattr(system, how)(one)
                for watch in (*watches, pul.watch(one)):
                    ended = await asyncio.wait_for(watch, 5)
                    assert (ended.reason, ended.error, ended.ref) == (reason, error, one.ref)
                    assert (ended.actor_id, ended.node_id) == (one.actor_id, system.node_id)
                    assert ended.abnormal == (reason in {"killed", "failed"})
                    assert await watch is await watch
            never = pul.ActorRef(system, system.node_id, pul.ActorId.generate())
            assert (await pul.watch(never)).reason == "not_found"
            with pytest.raises(TypeError, match="ActorRef or a proxy"):
                pul.watch("name")

    run(main())


def test_r9_watches_survive_a_waiter_and_cost_nothing_once_closed_or_dropped() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Frail.spawn(system=system)
            cell = system.cell(one.actor_id)
            assert cell is not None
            watch = pul.watch(one)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch, 0.01)
            assert not watch.done
            async with pul.watch(one) as closed:
                waiting = asyncio.ensure_future(closed._wait())
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            dropped = [pul.watch(one) for _ in range(100)]
            assert len(cell.life.watchers or ()) == 101
            dropped.clear()
            gc.collect()
            assert len(cell.life.watchers or ()) == 1
            await system.stop(one)
            assert (await watch).reason == "stopped"

    run(main())


def test_r9_ten_thousand_watches() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Frail.spawn(system=system)
            watches = [pul.watch(one) for _ in range(10_000)]
            await system.kill(one)
            assert {(await watch).reason for watch in watches} == {"killed"}

    run(main())


class Guardian(pul.Actor):
    """Notes who ended."""

    def __init__(self, *watched: Any) -> None:
        self.watched = watched
        self.seen: list[Any] = []
        self.gate = asyncio.Event()

    def on_start(self) -> None:
        for one in self.watched:
            self.watch(one)
            self.watch(one)

    async def receive(self, msg: Any) -> Any:
        self.seen.append(msg)
        await self.gate.wait()

    async def forget(self, one: Any) -> None:
        self.unwatch(one)

    async def on_terminated(self, ended: pul.Ended) -> None:
        self.seen.append((ended.actor_id, ended.reason))


def test_r4_an_actor_hears_of_an_end_before_the_messages_that_wait() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Frail.spawn(system=system)
            other = await Frail.spawn(system=system)
            guardian = Guardian(one, other)
            ref = await system.spawn(guardian)
            await ref.as_any().forget(other)
            for n in range(3):
                await ref.tell(n)
            await eventually("the first runs", lambda: guardian.seen == [0])
            await system.kill(other)
            await system.kill(one)
            await eventually("it hears of it", lambda: len(guardian.seen) == 2)
            guardian.gate.set()
            await eventually("all is handled", lambda: len(guardian.seen) == 4)
            assert guardian.seen == [0, (one.actor_id, "killed"), 1, 2]

    run(main())


@pytest.mark.parametrize("waiting", [0, 2])
def test_r4_a_serial_hook_takes_its_turn_before_the_messages_that_wait(waiting: int) -> None:
    seen: list[Any] = []

    @pul.remote
    class Plain:
        """No Actor: the runtime gives it `watch`."""

        watch: Any

        def __init__(self, one: Any) -> None:
            self.one = one
            self.gate = asyncio.Event()

        def on_start(self) -> None:
            self.watch(self.one)

        @pul.serial
        async def slow(self, n: int) -> None:
            seen.append(n)
            await self.gate.wait()

        def on_terminated(self, ended: pul.Ended) -> None:
            seen.append(ended.reason)

        async def let(self) -> None:
            self.gate.set()

    async def main() -> None:
        async with local_system() as system:
            one = await Frail.spawn(system=system)
            plain = await Plain.spawn(one, system=system)
            asks = [asyncio.create_task(plain.slow(n)) for n in range(1 + waiting)]
            await eventually("the first runs", lambda: seen == [0])
            await system.stop(one)
            await asyncio.sleep(0)
            assert seen == [0]
            # The gate is opened from outside the mailbox, which is busy.
            cell = system.cell(plain.actor_id)
            assert cell is not None
            cell.instance.gate.set()
            await asyncio.gather(*asks)
            await eventually("the hook ran", lambda: "stopped" in seen)
            assert seen == [0, "stopped", *range(1, 1 + waiting)]

    run(main())


def test_names_of_the_runtime_may_be_methods_of_a_class() -> None:
    @pul.remote
    class Shop:
        def watch(self, what: str) -> str:
            return f"watching {what}"

        def link(self) -> str:
            return "link"

    class Raw(pul.Actor):
        def unlink(self, target: Any) -> Any:
            return f"unlinked {target}"

        def other(self) -> None: ...

    async def main() -> None:
        async with local_system() as system:
            shop = await Shop.spawn(system=system)
            assert (await shop.watch("tv"), await shop.link()) == ("watching tv", "link")
            raw = (await system.spawn(Raw())).as_any()
            assert await raw.unlink(1) == "unlinked 1"
            with pytest.raises(AttributeError, match=r"it has: other, unlink$"):
                await raw.watch(1)

    run(main())


def test_r9_links_pass_failures_and_kills_along_but_no_stop() -> None:
    async def main() -> None:
        async with local_system() as system:
            for how, passes in (
                ("kill", True),
                ("crash", True),
                ("stop", False),
                ("drain", False),
                ("unlinked", False),
            ):
                one, two = [await Frail.spawn(system=system) for _ in range(2)]
                await pul.link(one, two.ref)
                watch = pul.watch(one)
                if how == "crash":
                    with pytest.raises(RuntimeError):
                        await two.crash()
                elif how == "unlinked":
                    await pul.unlink(one, two)
                    await system.kill(two)
                else:
                    await getattr(system, how)(two)
                if passes:
                    ended = await asyncio.wait_for(watch, 5)
                    assert ended.reason == "failed"
                    assert str(two.actor_id) in ended.error
                else:
                    assert await one.ping() == "pong"
                    assert not watch.done
            gone = await ended_by(system, "stop")
            with pytest.raises(ActorNotFoundError):
                await pul.link(one, gone)
            with pytest.raises(ValueError, match="itself"):
                await pul.link(one, one)

    run(main())


def test_r9_an_actor_links_itself_also_while_it_starts() -> None:
    class Twin(pul.Actor):
        def __init__(self, other: Any = None) -> None:
            self.other = other

        async def on_start(self, actor_id: pul.ActorId) -> None:
            if self.other is not None:
                await self.link(self.other)

        async def join(self, other: Any) -> None:
            await self.link(other)

        async def leave(self, other: Any) -> None:
            await self.unlink(other)

    async def main() -> None:
        async with local_system() as system:
            first = await system.spawn(Twin())
            second = await system.spawn(Twin(first))
            third = await system.spawn(Twin())
            loose = await system.spawn(Twin())
            await third.as_any().join(second)
            await loose.as_any().join(second)
            await loose.as_any().leave(second)
            watches = [pul.watch(first), pul.watch(third)]
            await system.kill(second)
            for watch in watches:
                assert (await asyncio.wait_for(watch, 5)).reason == "failed"
            assert not pul.watch(loose).done
            with pytest.raises(ActorNotFoundError):
                await system.spawn(Twin(first), name="late")
            assert system.local_actor_names() == []

    run(main())


def test_a_shutdown_ends_every_watch() -> None:
    async def main() -> None:
        async with local_system() as system, local_system(seeds=[system.addr]) as other:
            near = await Frail.spawn(system=system)
            far = await Frail.spawn(system=other)
            ref = pul.ActorRef(system, far.node_id, far.actor_id)
            watches = pul.watch(near), pul.watch(ref)
            await system.shutdown()
            assert (await asyncio.wait_for(watches[0], 5)).reason == "node_left"
            with pytest.raises(SystemShutDownError):
                await asyncio.wait_for(watches[1], 5)

    run(main())
