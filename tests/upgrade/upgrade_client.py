"""One client of a cluster of mixed versions: calls, streams, large messages and names, from one of its nodes.

    python upgrade_client.py SEEDS NAME

Each line on stdin is answered with a line of JSON: what was done so far. The end of stdin ends the node.
"""

import asyncio
import contextlib
import json
import sys
from collections import Counter
from typing import Any

import upgrade_actor

import pulsing as pul

LIMIT = 20.0
"""Seconds that a call may take, whatever happens to nodes meanwhile."""


class Client:
    """The load and its bookkeeping."""

    def __init__(self, system: Any, name: str) -> None:
        self.system = system
        self.name = name
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []

    async def again(self, what: str, once: Any) -> None:
        """One kind of traffic: what an error interrupts is done again, on whoever has the name then."""
        number = 0
        while True:
            number += 1
            try:
                async with asyncio.timeout(LIMIT):
                    while True:
                        try:
                            await once(number)
                            break
                        except pul.PulsingError as error:
                            self.done[f"{what}: again after {type(error).__name__}"] += 1
                            await asyncio.sleep(0.01)
            except Exception as error:  # noqa: BLE001 - counted, and the upgrade has failed
                self.failed.append(f"{what}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)
            else:
                self.done[what] += 1

    async def call(self, number: int) -> None:
        """One that may run twice."""
        found = await self.system.resolve("echo", timeout=LIMIT)
        value, version = await found.options(idempotent=True, timeout=LIMIT).echo(number)
        if value != number:
            raise AssertionError(f"{value} came back for {number}")
        self.done[f"answers of {version} nodes"] += 1

    async def large(self, number: int) -> None:
        """One on the other lane."""
        found = await self.system.resolve("echo", timeout=LIMIT)
        sent = number.to_bytes(8, "big") * 40_000
        value, _ = await found.options(idempotent=True, timeout=LIMIT).echo(sent)
        if value != sent:
            raise AssertionError(f"{len(value)} other bytes came back for {len(sent)}")
        await asyncio.sleep(0.02)

    async def stream(self, _: int) -> None:
        """A stream to its end."""
        found = await self.system.resolve("echo", timeout=LIMIT)
        if [item async for item in found.items(20)] != list(range(20)):
            raise AssertionError("a stream lost items")

    async def passing(self, number: int) -> None:
        """A name of this node's own, which comes and goes."""
        actor = await upgrade_actor.Echo.spawn(system=self.system, name=f"{self.name}-{number}")
        found = await self.system.resolve(f"{self.name}-{number}", timeout=LIMIT)
        await found.echo(number)
        await self.system.stop(actor)
        await asyncio.sleep(0.05)

    async def report(self) -> dict[str, Any]:
        """What is known here."""
        members = Counter(member["state"] for member in await self.system.members())
        found = await self.system.get_named_instances("echo")
        return {
            "done": self.done,
            "failed": self.failed,
            "members": members,
            "echo": {one["addr"]: one["node_id"] for one in found},
        }


async def main() -> None:
    seeds, name = sys.argv[1:]
    system = await pul.actor_system("127.0.0.1:0", seeds=seeds.split(","), join_timeout=30)
    client = Client(system, name)
    kinds = {"calls": client.call, "large calls": client.large, "streams": client.stream, "names": client.passing}
    load = [asyncio.create_task(client.again(what, once)) for what, once in (*kinds.items(), ("calls", client.call))]
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await client.report()), flush=True)
    for task in load:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*load, return_exceptions=True)
    await system.shutdown(0.0)


if __name__ == "__main__":
    asyncio.run(main())
