"""Promises under faults, on a network in memory and a clock that jumps: R1, R2, R5, R6, M2, M3, M4."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import pulsing as pul
from pulsing.exceptions import (
    ActorStoppedError,
    ConnectFailedError,
    ConnectionLostError,
    NodeNotFoundError,
    PulsingTimeoutError,
)
from pulsing.testing import Network, simulate

LOST = (ConnectionLostError, ConnectFailedError, NodeNotFoundError, ActorStoppedError)
"""What a call to a node that is away may end with, besides its deadline."""
GRAIN = 0.01
"""Seconds that timers of both sides may round away."""
SEEDS = 20


class Desk:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.open = 0

    async def double(self, n: int, after: float = 0.0) -> int:
        self.open += 1
        try:
            await asyncio.sleep(after)
            return 2 * n
        finally:
            self.open -= 1

    async def fail(self, n: int) -> None:
        raise KeyError(n)

    async def receive(self, message: dict[str, Any]) -> int:
        self.seen.append(message["n"])
        return int(message["n"])

    async def count(self, n: int, pause: float = 0.0) -> AsyncIterator[int]:
        self.open += 1
        try:
            for i in range(n):
                yield i
                await asyncio.sleep(pause)
        finally:
            self.open -= 1

    async def silent(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(100_000)

    async def never(self) -> None:
        self.open += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.open -= 1


async def _pair(net: Network) -> tuple[pul.ActorSystem, pul.ActorSystem, Desk, Any]:
    """Hosts a and b, the actor on b, and a proxy of it on a."""
    a = await net.system("a")
    b = await net.system("b", seeds=["a"])
    actor = Desk()
    await b.spawn(actor, name="desk", public=True)
    return a, b, actor, await a.resolve("desk", timeout=10)


async def _all_meet(net: Network, *systems: pul.ActorSystem, within: float = 30.0) -> None:
    await net.until(
        lambda: all(len(net.members(s)) == len(systems) for s in systems), within=within, what="all see all"
    )


@simulate(seed=1)
async def test_m4_both_sides_of_a_partition_rejoin_without_restart(net: Network) -> None:
    a, b, _, _ = await _pair(net)
    c = await net.system("c", seeds=["a"])
    await _all_meet(net, a, b, c)
    net.partition({"a"})
    await net.until(lambda: len(net.members(a)) == 1 and len(net.members(b)) == len(net.members(c)) == 2, within=30)
    await net.sleep(600)
    net.heal()
    await _all_meet(net, a, b, c)
    assert await (await a.resolve("desk", timeout=5)).double(4) == 8


@simulate(seed=1)
async def test_r5_the_idle_limit_of_a_stream_is_an_error(net: Network) -> None:
    _, _, _, desk = await _pair(net)
    began, items = net.now, []

    async def listen() -> None:
        async for item in desk.silent():
            items.append(item)

    with pytest.raises(PulsingTimeoutError, match="idle limit"):
        await listen()
    assert items == [1]
    assert net.now - began == pytest.approx(300, abs=1)


@simulate(seed=1)
async def test_r5_a_deadline_ends_the_call_on_both_sides_to_the_millisecond(net: Network) -> None:
    net.faults(delay=0.05)
    _, _, actor, desk = await _pair(net)
    for limit in (0.5, 30.0, 600.0):
        began = net.now
        with pytest.raises(PulsingTimeoutError):
            await desk.never.options(timeout=limit)()
        assert net.now - began == pytest.approx(limit, abs=GRAIN)
        await net.until(lambda: actor.open == 0, within=0.1, what="the handler is cancelled")


@simulate(seed=1)
async def test_a_jump_of_the_wall_clock_changes_nothing(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _, desk = await _pair(net)
    real = time.time
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        began = net.now
        with pytest.raises(PulsingTimeoutError):
            await desk.never()
        assert net.now - began == pytest.approx(30, abs=GRAIN)
        await net.sleep(120)
        assert len(net.members(a)) == len(net.members(b)) == 2
        assert await desk.double(1) == 2


@simulate(seeds=3)
async def test_r1_a_kill_with_100_asks_in_flight_fails_all_of_them(net: Network) -> None:
    net.faults(delay=(0.001, 0.005))
    _, b, _, desk = await _pair(net)
    node = str(b.node_id)
    asks = [asyncio.ensure_future(desk.never()) for _ in range(100)]
    await net.sleep(1)
    began = net.now
    await net.kill("b")
    ended = await asyncio.gather(*asks, return_exceptions=True)
    assert net.now - began < 2
    assert {type(error) for error in ended} <= set(LOST), ended
    address = b.addr
    assert all(address in str(error) or node in str(error) for error in ended), ended[0]


@simulate(seeds=3)
async def test_r1_a_call_after_a_long_silence_is_answered_or_fails(net: Network) -> None:
    net.faults(delay=(0.001, 0.005))
    a, _, _, desk = await _pair(net)
    await net.sleep(400)
    assert await desk.double(1) == 2
    # While nothing was said, the other side was lost and nobody could tell: this side's connections are half open.
    net.partition({"a"}, {"b"})
    await net.kill("b")
    net.heal()
    began = net.now
    with pytest.raises(LOST):
        await desk.double(1)
    assert net.now - began < 10
    b = await net.system("b", seeds=["a"])
    await b.spawn(Desk(), name="desk", public=True)
    await net.until(lambda: [i["node_id"] for i in a.core.instances("desk")] == [str(b.node_id)], within=5)
    again = await a.resolve("desk")
    assert await again.double(2) == 4
    # A silence that nobody ends costs the call its deadline, and no more.
    net.partition({"a"}, {"b"})
    began = net.now
    with pytest.raises((PulsingTimeoutError, *LOST)):
        await again.double(1)
    assert net.now - began <= 30.0 + GRAIN


@simulate(seeds=3)
async def test_m4_a_process_that_restarts_replaces_its_old_self_at_once(net: Network) -> None:
    net.faults(delay=(0.001, 0.005))
    a, b, _, _ = await _pair(net)
    before = b.node_id
    await net.kill("b")
    # Its death has not been seen when it is back.
    again = await net.system("b", seeds=["a"])
    assert again.addr == b.addr
    await again.spawn(Desk(), name="desk", public=True)
    await net.until(
        lambda: (
            {m["node_id"] for m in a.core.members() if m["state"] == "alive"} == {str(a.node_id), str(again.node_id)}
        ),
        within=2,
    )
    await net.until(lambda: [i["node_id"] for i in a.core.instances("desk")] == [str(again.node_id)], within=2)
    assert again.node_id != before
    assert await (await a.resolve("desk", timeout=2)).double(2) == 4


@simulate(seeds=SEEDS)
async def test_r1_r6_every_ask_and_stream_ends_in_exactly_one_way(net: Network) -> None:
    net.faults(delay=(0.001, 0.03), loss=0.03, reorder=0.05)
    a, b, actor, desk = await _pair(net)

    async def ask(n: int) -> str:
        kind = n % 4
        began = net.now
        try:
            if kind == 0:
                assert await desk.double(n, net.random.uniform(0, 3)) == 2 * n
                end = "value"
            elif kind == 1:
                await desk.fail(n)
                raise AssertionError("an error became nothing")
            else:
                await desk.never()
                raise AssertionError("nothing became an answer")
        except KeyError:
            end = "error"
        except PulsingTimeoutError:
            end = "deadline"
            assert net.now - began == pytest.approx(30.0, abs=GRAIN)
        except LOST:
            end = "lost"
        assert net.now - began <= 30.0 + GRAIN
        return end

    async def stream(n: int) -> str:
        got: list[int] = []
        try:
            async for item in desk.count(n, 0.02):
                got.append(item)
        except (PulsingTimeoutError, *LOST):
            assert got == list(range(len(got))), "a stream that failed delivered a prefix"
            return "lost"
        assert got == list(range(n)), "a stream that ended was complete"
        return "complete"

    async def cut() -> None:
        await net.sleep(net.random.uniform(0, 2))
        net.partition({"a"}, {"b"}, one_way=net.random.random() < 0.3)
        await net.sleep(net.random.choice([0.3, 2, 20]))
        net.heal()

    asks = [asyncio.ensure_future(ask(n)) for n in range(24)]
    streams = [asyncio.ensure_future(stream(n)) for n in (0, 1, 10, 200)]
    await cut()
    ends = await asyncio.gather(*asks)
    assert len(ends) == 24
    await asyncio.gather(*streams)
    await _all_meet(net, a, b)
    await net.until(lambda: actor.open == 0, within=60, what="nothing of a call that has ended is left at the callee")


@simulate(seeds=SEEDS)
async def test_r2_messages_of_one_sender_start_in_order(net: Network) -> None:
    net.faults(delay=(0.001, 0.05), loss=0.05, reorder=0.2)
    _, _, actor, desk = await _pair(net)
    asks = []
    for n in range(60):
        message = {"n": n, "pad": bytes(net.random.choice([0, 100, 200_000]))}
        asks.append(asyncio.ensure_future(desk.ref.ask(message)))
        await net.sleep(net.random.choice([0, 0, 0.01]))
    ended = await asyncio.gather(*asks, return_exceptions=True)
    answered = [n for n, end in enumerate(ended) if end == n]
    assert actor.seen == sorted(set(actor.seen)), "each once, in the order they were sent"
    assert set(answered) <= set(actor.seen)
    assert all(isinstance(end, (PulsingTimeoutError, *LOST)) for n, end in enumerate(ended) if n not in answered)


@simulate(seeds=3)
async def test_m3_mild_faults_kill_nobody(net: Network) -> None:
    net.faults(delay=(0.001, 0.05), loss=0.01, reorder=0.05)
    systems = [await net.system("a")]
    systems += [await net.system(name, seeds=["a"]) for name in "bcde"]
    await _all_meet(net, *systems)
    for _ in range(240):
        await net.sleep(0.5)
        assert [len(net.members(s)) for s in systems] == [5] * 5


@simulate(seeds=5)
async def test_m3_a_crash_is_seen_in_two_seconds_and_a_silent_loss_in_eight(net: Network) -> None:
    net.faults(delay=(0.001, 0.005))
    systems = [await net.system("a")]
    systems += [await net.system(name, seeds=["a"]) for name in "bcdefghij"]
    await _all_meet(net, *systems)
    await net.kill("j")
    rest = systems[:-1]
    await net.until(lambda: all(len(net.members(s)) == 9 for s in rest), within=2, what="the crash is seen")
    net.partition({"i"})
    rest = systems[:-2]
    await net.until(lambda: all(len(net.members(s)) == 8 for s in rest), within=8, what="the silent loss is seen")


@simulate(seeds=5)
async def test_m2_who_was_stopped_declares_nobody_dead(net: Network) -> None:
    net.faults(delay=(0.001, 0.01))
    a, b, _, _ = await _pair(net)
    c = await net.system("c", seeds=["a"])
    await _all_meet(net, a, b, c)
    net.pause("c")
    await net.sleep(60)
    assert len(net.members(a)) == len(net.members(b)) == 2
    net.resume("c")
    for _ in range(500):
        await net.sleep(0.01)
        assert len(net.members(c)) == 3
    await _all_meet(net, a, b, c)
