"""Observers at an address of their own (`observe_addr`)."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest
from runtime_util import local_system, run

import pulsing as pul
from pulsing.exceptions import BindError


@pul.remote
class Ready:
    def ready(self) -> bool:
        return True


def look(at: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{at}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_prometheus_sees_a_cluster_under_tls_and_an_actors_own_process_takes_no_second_address() -> None:
    async def main() -> None:
        settings = {"passphrase": "correct horse battery staple", "cluster": "observed"}
        async with local_system(observe_addr="127.0.0.1:0", **settings) as system:
            at = system.observed_at
            assert at is not None
            assert at != system.addr
            assert await (await Ready.spawn(system=system, name="own", new_process=True)).ready()
            text = await asyncio.to_thread(look, at, "/metrics")
            assert f'pulsing_cluster_members{{node_id="{system.node_id}",state="alive"}} 2\n' in text
            assert '"own"' in await asyncio.to_thread(look, at, "/actors")
            with pytest.raises(BindError, match="--observe_addr"):
                await pul.actor_system("127.0.0.1:0", observe_addr=at, **settings)

    run(main())
