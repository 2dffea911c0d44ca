"""All Workers and both Routers are restarted one after the other under 64 connections: nobody notices (S4, S6)."""

from __future__ import annotations

import asyncio
import pathlib
from collections import Counter
from collections.abc import Callable

from two_routers import Client, House, house, stop, wait_for

WORKERS = 4
CLIENTS = 64


async def roll(made: House) -> Counter[str]:
    """Restarts everything under load; how requests ended."""
    ends: Counter[str] = Counter()
    over = False

    async def again(client: Client) -> None:
        while not over:
            ends[await client.ask()] += 1
        client.close()

    clients = [Client(made.doors, stream=bool(number % 2), at=number // 2 % 2) for number in range(CLIENTS)]
    tasks = [asyncio.create_task(again(client)) for client in clients]

    async def step(work: Callable[..., None], *arguments: object) -> None:
        await asyncio.to_thread(work, *arguments)
        seen = sum(ends.values())
        # Each state is lived in: every client has had an answer or two.
        while True:
            await asyncio.sleep(0.02)
            if sum(ends.values()) >= seen + 2 * CLIENTS:
                return

    await step(made.wait_whole)
    for at in range(WORKERS):
        await step(stop, made.workers[at])
        made.workers[at] = made.worker()
        await step(made.wait_whole)
    for door in made.doors:
        await step(stop, door.process)
        made.reopen(door)
        await step(made.wait_whole)
    over = True
    await asyncio.gather(*tasks)
    return ends


def test_s6_a_rolling_restart_of_all_workers_and_both_routers_fails_no_request(tmp_path: pathlib.Path) -> None:
    with house(tmp_path, WORKERS) as made:
        ends = asyncio.run(asyncio.wait_for(roll(made), 300))
        assert set(ends) == {"whole"}, f"{dict(ends)}\n{made.logs()}"
        for door in made.doors:
            wait_for("no place is held", lambda door=door: door.in_flight() == 0, 10)
