"""Seeds that change, addresses that differ from the bound one, and the head of older programs (M6)."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest
from runtime_util import eventually, free_port, local_system, run
from tcp_server import listening

import pulsing as pul
from pulsing._core import seed_places
from pulsing.exceptions import ConfigError, JoinError
from pulsing.testing import Network, simulate


@pul.remote
class Echo:
    def echo(self, value: str) -> str:
        return value


async def alive(system: pul.ActorSystem) -> int:
    return sum(member["state"] == "alive" for member in await system.members())


async def all_see(*systems: pul.ActorSystem) -> None:
    async def together() -> bool:
        return all([await alive(system) == len(systems) for system in systems])

    await eventually(f"{len(systems)} see each other", together)


@contextlib.asynccontextmanager
async def forward(port: int) -> AsyncIterator[int]:
    """A port that leads to another one, as NAT and the ports of a container do."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, far_writer), pipe(far_reader, writer))

    async with listening(serve) as addr:
        yield int(addr.rpartition(":")[2])


@pytest.mark.parametrize("listened", ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"])
def test_m6_a_wildcard_as_seed_is_this_host(listened: str) -> None:
    async def main() -> None:
        first = await pul.actor_system(listened)
        port = first.addr.rpartition(":")[2]
        try:
            for wildcard in (f"0.0.0.0:{port}", f"[::]:{port}"):
                async with local_system(seeds=[wildcard], join_timeout=20) as second:
                    await all_see(first, second)
        finally:
            await first.shutdown(0.0)
        # It may be the node's own.
        for own in (f"0.0.0.0:{port}", f"[::]:{port}"):
            alone = await pul.actor_system(own, seeds=[own], join_timeout=20)
            try:
                assert await alive(alone) == 1
            finally:
                await alone.shutdown(0.0)

    run(main())


def test_m6_a_file_of_seeds_may_be_written_later(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        file = tmp_path / "seeds"
        async with local_system() as first:
            with pytest.raises(JoinError, match="cannot be opened"):
                await pul.actor_system("127.0.0.1:0", seeds=[f"file://{file}"], join_timeout=0.2)
            joining = asyncio.create_task(pul.actor_system("127.0.0.1:0", seeds=[f"file://{file}"], join_timeout=30))
            file.write_text(f"# the first\n{first.addr}\n")
            second = await joining
            await all_see(first, second)
            await second.shutdown(0.0)

    run(main())


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        ("node1", "'node1'|\"node1\".*the port is missing"),
        ("srv://node1:1", r"srv://node1:1.*host:port, k8s://service.namespace:port and file:///path"),
        ("::1:8000", r"brackets, as in \[::1\]:8000"),
        ("[fe80::1%eth0]:8000", "link-local"),
    ],
)
def test_m6_what_can_be_no_seed_is_refused_at_once_in_words(seed: str, words: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=words):
            await pul.actor_system("127.0.0.1:0", seeds=[seed], join_timeout=None)

    run(main())
    with pytest.raises(ValueError, match=words):
        seed_places(seed)


def test_m6_seeds_stand_for_places(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "seeds"
    file.write_text("a:1\nk8s://pulsing.serving:8000 # a service\n")
    assert seed_places(f"file://{file}") == ["a:1", "pulsing.serving.svc:8000"]
    assert seed_places(f"file://{file}.missing", read=False) == []


def test_m6_a_node_and_its_processes_are_reached_at_what_they_advertise() -> None:
    async def main() -> None:
        port = free_port()
        async with forward(port) as outside, local_system() as peer:
            told = f"127.0.0.1:{outside}"
            hidden = await pul.actor_system(f"127.0.0.1:{port}", seeds=[peer.addr], advertise=told)
            try:
                assert (hidden.addr, hidden.core.bound) == (told, f"127.0.0.1:{port}")
                await Echo.spawn(system=hidden, name="echo")
                assert await (await peer.resolve("echo", timeout=5)).echo("x") == "x"
                # Its process has a port of its own, and the host that it advertises.
                await Echo.spawn(system=hidden, name="apart", new_process=True)
                assert await (await peer.resolve("apart", timeout=5)).echo("y") == "y"
                addrs = {member["addr"] for member in await peer.members()}
                assert told in addrs
                assert len(addrs) == 3
            finally:
                await hidden.shutdown(0.0)

    run(main())


def test_m6_ipv6_is_as_good_as_ipv4() -> None:
    async def main() -> None:
        first = await pul.actor_system("[::]:0")
        port = first.addr.rpartition(":")[2]
        second = await pul.actor_system(seeds=[f"[::1]:{port}"])
        third = await pul.actor_system(seeds=[f"127.0.0.1:{port}"])
        try:
            assert second.addr.startswith("[::1]:")
            assert third.addr.startswith("127.0.0.1:")
            await all_see(first, second, third)
            await Echo.spawn(system=second, name="echo")
            assert await (await third.resolve("echo", timeout=5)).echo("x") == "x"
        finally:
            for system in (third, second, first):
                await system.shutdown(0.0)

    run(main())


def test_a_head_and_its_workers_are_one_cluster_that_outlives_the_head() -> None:
    async def main() -> None:
        head = await pul.actor_system("127.0.0.1:0", is_head_node=True)
        # By host name, which the head mode of older programs did not take.
        addr = f"localhost:{head.addr.rpartition(':')[2]}"
        workers = [await pul.actor_system("127.0.0.1:0", head_addr=addr) for _ in range(3)]
        try:
            await all_see(head, *workers)
            await Echo.spawn(system=workers[0], name="echo")
            assert await (await workers[1].resolve("echo", timeout=1)).echo("x") == "x"
            await head.shutdown(0.0)
            await all_see(*workers)
            assert await (await workers[2].resolve("echo", timeout=1)).echo("y") == "y"
            await Echo.spawn(system=workers[1], name="later")
            assert await (await workers[2].resolve("later", timeout=1)).echo("z") == "z"
        finally:
            for worker in workers:
                await worker.shutdown(0.0)

    run(main())


def test_a_worker_whose_head_is_not_there_says_so() -> None:
    async def main() -> None:
        head = f"127.0.0.1:{free_port()}"
        with pytest.raises(JoinError, match=head):
            await pul.actor_system("127.0.0.1:0", head_addr=head, join_timeout=0.3)
        config = pul.SystemConfig.with_addr("127.0.0.1:0").with_head_addr(head)
        assert config.seeds == (head,)
        assert pul.SystemConfig.standalone().with_head_node() == pul.SystemConfig.standalone()

    run(main())


@simulate(seed=1)
async def test_m6_a_name_is_looked_up_again_until_somebody_has_it(net: Network) -> None:
    waiting = asyncio.create_task(net.system("b", seeds=["a"], join_timeout=None))
    await asyncio.sleep(20)
    assert not waiting.done()
    a = await net.system("a")
    b = await waiting
    await net.until(lambda: net.members(a) == net.members(b) == {a.addr, b.addr}, within=5)


@simulate(seed=1)
async def test_m6_a_seed_that_does_not_answer_holds_nobody_up(net: Network) -> None:
    before = [await net.system(name) for name in ("silent", "a", "b")]
    await before[2].shutdown()
    net.partition({"b"}, {"silent"})
    begun = net.now
    b = await net.system("b", seeds=["silent", "a"])
    assert net.now - begun < 0.5
    assert len(net.members(b)) >= 2


@simulate(seed=1)
async def test_m4_a_lone_node_looks_for_its_seeds_for_ever(net: Network) -> None:
    await net.system("a")
    b = await net.system("b", seeds=["a"])
    c = await net.system("c", seeds=["a"])
    await net.until(lambda: len(net.members(b)) == 3, within=5)
    await net.kill("a")
    await c.shutdown()
    # Longer than anybody remembers its members.
    await asyncio.sleep(300)
    assert net.members(b) == {b.addr}
    again = await net.system("a")
    await net.until(lambda: net.members(again) == net.members(b) == {again.addr, b.addr}, within=5)
