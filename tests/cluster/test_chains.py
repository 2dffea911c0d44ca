"""Chains of calls that come back to a serial actor: R11, and a call to an actor that restarts: R1, R9."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing.core import ActorProxy, ActorRef
from pulsing.exceptions import DeadlockError, PulsingTimeoutError


@pul.remote
class Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.peers: dict[str, ActorProxy] = {}

    def meet(self, peers: dict[str, ActorProxy]) -> None:
        self.peers = peers

    @pul.serial
    async def serial(self, path: list[str]) -> str:
        return str(await self.peers[path[0]].serial(path[1:])) if path else self.name

    async def free(self, path: list[str]) -> str:
        return str(await self.peers[path[0]].free(path[1:])) if path else self.name

    @pul.blocking
    def blocking(self, path: list[str]) -> str:
        return str(pul.sync.proxy(self.peers[path[0]]).blocking(path[1:])) if path else self.name


async def know_each_other(systems: list[pul.ActorSystem], names: str) -> dict[str, ActorProxy]:
    """One node a name, spread over the systems; each knows all, the returned proxies call from the first system."""
    await eventually("all know all", lambda: all(len(one.core.members()) == len(systems) for one in systems))
    homes = {name: systems[at % len(systems)] for at, name in enumerate(names)}
    refs = {name: (await Node.spawn(name, system=home, name=name)).ref for name, home in homes.items()}

    def seen_from(system: pul.ActorSystem) -> dict[str, ActorProxy]:
        return {name: ActorRef(system, ref.node_id, ref.actor_id).as_any() for name, ref in refs.items()}

    for name, home in homes.items():
        await ActorRef(home, refs[name].node_id, refs[name].actor_id).as_any().meet(seen_from(home))
    for one in systems:
        await eventually("names are known", lambda one=one: all(one.core.instances(name) for name in names))
    return seen_from(systems[0])


@pytest.mark.parametrize("size", [1, 3], ids=["one node", "three nodes"])
@pytest.mark.parametrize("method", ["serial", "blocking"])
def test_r11_a_to_b_to_c_to_a_fails_at_once_naming_the_chain(size: int, method: str) -> None:
    async def main() -> None:
        async with cluster(size) as systems:
            peers = await know_each_other(systems, "abc")
            patient = getattr(peers["a"].options(timeout=None), method)
            with pytest.raises(DeadlockError, match="a -> b -> c -> a"):
                await patient(["b", "c", "a"])
            # The chain begins where it closes, not where it began.
            with pytest.raises(DeadlockError, match="deadlock: b -> c -> b"):
                await patient(["b", "c", "b"])
            assert await patient(["b", "c"]) == "c"

    run(main())


def test_r11_chains_of_any_length_are_seen_and_open_ones_pass() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            names = "abcdefghijklmnopqrst"
            peers = await know_each_other(systems, names)
            around = [*names[1:], "a"]
            with pytest.raises(DeadlockError, match=" -> ".join([*names, "a"])):
                await peers["a"].serial(around)
            assert await peers["a"].serial(around[:-1]) == "t"
            assert await peers["a"].free([*around, *around]) == "a"

    run(main())


@pytest.mark.parametrize(
    "where", [{"new_process": True}, {"placement": "remote"}], ids=["a process of its own", "another node"]
)
@pytest.mark.parametrize("method", ["serial", "blocking"])
def test_r11_a_chain_is_seen_where_the_serial_actor_was_sent_elsewhere(where: dict[str, Any], method: str) -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            here = systems[0]
            b = await Node.spawn("b", system=here, name="b")
            a = await Node.spawn("a", system=here, name="a", **where)
            await a.meet({"b": b})
            await b.meet({"a": a})
            with pytest.raises(DeadlockError, match="deadlock: a -> b -> a"):
                await getattr(a, method)(["b", "a"])
            with pytest.raises(DeadlockError, match="deadlock: b -> a -> b"):
                await getattr(b, method)(["a", "b"])
            assert await getattr(a, method)(["b"]) == "b"

    run(main())


@pul.remote
class Waiter:
    def __init__(self) -> None:
        self.peer: ActorProxy | None = None

    def meet(self, peer: ActorProxy) -> None:
        self.peer = peer

    @pul.serial
    async def wait_on_peer(self, timeout: float) -> Any:
        assert self.peer is not None
        return await self.peer.options(timeout=timeout).work()

    @pul.serial
    async def ready(self) -> str:
        return "ready"


@pul.remote(restart_policy="on_failure", min_backoff=0.0, max_backoff=0.0)
class Crasher:
    """On every start but the first it asks its partner before it is ready."""

    partner: ActorProxy | None = None
    starts = 0
    ready = 0

    async def on_start(self) -> None:
        Crasher.cls.starts += 1
        if Crasher.cls.starts > 1:
            assert Crasher.cls.partner is not None
            assert await Crasher.cls.partner.ready() == "ready"
        Crasher.cls.ready += 1

    async def crash(self) -> None:
        raise RuntimeError("crashed")

    async def work(self) -> str:
        return "worked"


@pytest.mark.parametrize("size", [1, 2], ids=["one node", "two nodes"])
def test_r1_a_call_to_an_actor_whose_restart_asks_its_caller_ends_and_the_restart_too(size: int) -> None:
    async def main() -> None:
        async with cluster(size) as systems:
            waiter = await Waiter.spawn(system=systems[0], name="waiter")
            Crasher.cls.starts = Crasher.cls.ready = 0
            crasher = await Crasher.spawn(system=systems[-1], name="crasher")
            Crasher.cls.partner = await systems[-1].resolve("waiter", timeout=5)
            here = await systems[0].resolve("crasher", timeout=5)
            await waiter.meet(here)
            with pytest.raises(RuntimeError, match="crashed"):
                await crasher.crash()
            # The waiter is busy with a call that waits for the restart, which waits for the waiter.
            with pytest.raises(PulsingTimeoutError):
                await waiter.wait_on_peer(0.3)
            await eventually("the restart is over", lambda: Crasher.cls.ready == 2)
            assert await waiter.wait_on_peer(10.0) == "worked"
            assert Crasher.cls.starts == 2

    run(main())
