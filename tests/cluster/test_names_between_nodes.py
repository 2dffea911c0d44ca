"""Watching a name from another node (M5)."""

from __future__ import annotations

import asyncio

from runtime_util import cluster, run

import pulsing as pul


@pul.remote
class Worker:
    def ping(self) -> str:
        return "pong"


def test_m5_instances_of_other_nodes_come_and_go_with_them() -> None:
    async def main() -> None:
        async with cluster(3) as (a, b, c):
            refs = {(await Worker.spawn(system=system, name="worker")).ref for system in (b, c)}
            async with a.watch_name("worker") as watch, asyncio.timeout(20):
                added = [await anext(watch), await anext(watch)]
                assert {change.ref for change in added} == refs
                assert {change.address for change in added} == {b.addr, c.addr}
                assert await Worker.resolve("worker", system=a, node_id=c.node_id) is not None
                assert await pul.as_any(added[0].ref).ping() == "pong"
                await c.shutdown(0.0)
                gone = await anext(watch)
                assert (gone.kind, gone.node_id) == ("removed", c.node_id)
                assert [ref.node_id for ref in watch.instances] == [b.node_id]
                again = await Worker.spawn(system=a, name="worker")
                assert (await anext(watch)).ref == again.ref

    run(main())
