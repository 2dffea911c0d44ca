"""What `pul.actor_system` raises when a cluster will not have it, and that a secret works (M6)."""

from __future__ import annotations

import asyncio
import socket

import pytest
from runtime_util import cluster, eventually, free_port, local_system, run

import pulsing as pul
from pulsing.exceptions import BindError, JoinError, RefusedError


@pul.remote
class Echo:
    def echo(self, value: str) -> str:
        return value


def test_a_passphrase_admits_those_who_know_it_and_says_so_to_others() -> None:
    async def main() -> None:
        async with cluster(2, passphrase="correct horse") as (one, two):
            await Echo.spawn(system=one, name="echo")
            assert await (await two.resolve("echo", timeout=5)).echo("x") == "x"
            for settings in ({"passphrase": "battery staple"}, {}):
                with pytest.raises((RefusedError, JoinError), match=r"(?i)passphrase|TLS"):
                    await pul.actor_system("127.0.0.1:0", seeds=[one.addr], join_timeout=5.0, **settings)
        assert "horse" not in repr(pul.SystemConfig(passphrase="correct horse"))

    run(main())


def test_a_seed_that_does_not_answer_is_named() -> None:
    async def main() -> None:
        seed = f"127.0.0.1:{free_port()}"
        with pytest.raises(JoinError, match=seed):
            await pul.actor_system("127.0.0.1:0", seeds=[seed], join_timeout=0.2)

    run(main())


def test_another_clusters_name_is_refused() -> None:
    async def main() -> None:
        async with local_system(cluster="blue") as blue:
            with pytest.raises((RefusedError, JoinError), match="blue"):
                await pul.actor_system("127.0.0.1:0", seeds=[blue.addr], cluster="green", join_timeout=5.0)

    run(main())


def test_cancelling_a_start_that_waits_leaves_nothing_behind() -> None:
    import asyncio

    async def main() -> None:
        seed = f"127.0.0.1:{free_port()}"
        task = asyncio.create_task(pul.init("127.0.0.1:0", seeds=[seed], join_timeout=None))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pul.is_initialized()
        await pul.init("127.0.0.1:0")
        await pul.shutdown()

    run(main())


def test_an_init_that_is_cancelled_stops_dialling() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as seed:
            seed.setblocking(False)
            host, port = seed.getsockname()
            addr = f"127.0.0.1:{free_port()}"
            start = asyncio.create_task(pul.init(addr, seeds=[f"{host}:{port}"], join_timeout=None))

            def dialled() -> bool:
                try:
                    seed.accept()[0].close()
                except BlockingIOError:
                    return False
                return True

            await eventually("it dials", dialled)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start

            async def port_is_free() -> bool:
                try:
                    system = await pul.actor_system(addr)
                except BindError:
                    return False
                await system.shutdown(0.0)
                return True

            await eventually("its port is free", port_is_free)
            while dialled():
                pass
            # Twice the pause between two rounds over the seeds.
            await asyncio.sleep(1.0)
            assert not dialled()

    run(main())
