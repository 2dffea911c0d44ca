"""A node that says what it sees: one line of JSON for each change of the members and of the instances of a name.

    python reporting_node.py '{"name": "n0", "addr": "127.0.0.1:0", "seeds": [], ...}'

Times are of the monotonic clock, which all processes of a machine share. Commands come as lines of JSON on stdin, each
answered by a line with its `id`; the end of stdin ends the node without a goodbye.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pulsing as pul


@pul.remote
class Named:
    """What a node publishes under its name."""

    def __init__(self, node: str) -> None:
        self.node = node

    def who(self, value: int = 0) -> tuple[str, int]:
        """Proof that the call came here."""
        return self.node, value

    async def count(self, items: int) -> AsyncIterator[int]:
        """A stream of numbers."""
        for number in range(items):
            yield number
            await asyncio.sleep(0.001)


class Reporter:
    """One system and the commands about it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.name: str = settings.pop("name")
        self.settings = settings
        self.states: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def say(self, **event: Any) -> None:
        sys.stdout.write(json.dumps({"at": time.monotonic(), **event}) + "\n")
        sys.stdout.flush()

    def look(self) -> None:
        """Reports what differs from the last look."""
        states = {member["node_id"]: member["state"] for member in self.system.core.members() if not member["me"]}
        for node in sorted({*states, *self.states}):
            state = states.get(node, "forgotten")
            if state != self.states.get(node, "forgotten"):
                self.say(node=node, state=state)
        self.states = states
        counts = {name: len(found) for name, found in self.system.core.names().items() if not name.startswith("_")}
        for name in sorted({*counts, *self.counts}):
            if counts.get(name, 0) != self.counts.get(name, 0):
                self.say(named=name, count=counts.get(name, 0))
        self.counts = counts

    async def run(self) -> None:
        begun = time.monotonic()
        self.system = await pul.actor_system(**self.settings)
        joined = time.monotonic()
        await Named.spawn(self.name, system=self.system, name=self.name)
        await self.system.watch_names(self.look)
        self.say(ready=str(self.system.node_id), addr=self.system.addr, joined=joined - begun)
        self.look()
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        pending = set()
        while line := await reader.readline():
            task = asyncio.create_task(self.answer(json.loads(line)))
            pending.add(task)
            task.add_done_callback(pending.discard)
        os._exit(3)

    async def answer(self, command: dict[str, Any]) -> None:
        number = command.pop("id")
        try:
            result = await getattr(self, "do_" + command.pop("do"))(**command)
            self.say(id=number, result=result)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            self.say(id=number, error=type(error).__name__, text=str(error))

    async def do_metrics(self) -> dict[str, int]:
        return self.system.core.metrics()

    async def do_members(self) -> dict[str, str]:
        return {member["node_id"]: member["state"] for member in self.system.core.members()}

    async def do_census(self) -> dict[str, int]:
        """What a node that does nothing holds."""
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "tasks": len(asyncio.all_tasks()),
            "actors": len(self.system.cells()),
        }

    async def do_names(self) -> dict[str, int]:
        return self.counts

    async def do_call(self, name: str, timeout: float = 5.0) -> Any:
        found = await self.system.resolve(name, timeout=timeout)
        return await found.options(timeout=timeout).who(7)

    async def do_spawn(self, name: str) -> None:
        await Named.spawn(self.name, system=self.system, name=name)

    async def do_stop(self, name: str) -> None:
        await self.system.stop(name)

    async def do_join(self, **settings: Any) -> None:
        """Another system of this process: does it get in?"""
        await (await pul.actor_system(**settings)).shutdown(0.0)

    async def do_leave(self) -> None:
        await self.system.shutdown(0.0)


def main() -> None:
    asyncio.run(Reporter(json.loads(sys.argv[1])).run())


if __name__ == "__main__":
    main()
