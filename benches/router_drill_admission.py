"""Drills of who is let in: what a refusal costs, and what one tenant's flood does to another."""

import asyncio
import pathlib
import statistics
import tempfile
import time
from typing import Any

import router_client as client
import router_load as load
from router_subjects import Kind, Range, Subject, until

Result = dict[str, Any]

# What one request takes a Worker. It takes so many at once.
WORK = 0.05
PLACES = 8


def refused(field: Range, kind: Kind, policy: str) -> Result:
    """Requests beyond what the Router takes at once, 16 connections: CPU of the Router for each one refused."""

    async def held(subject: Subject) -> Result:
        holder = client.Load(subject.port, "first=600000", timeout=600)
        holder.burst(1)
        await asyncio.to_thread(until, "", lambda: subject.total("running") > 0, 10)
        # Connections are open, code is warm.
        await asyncio.to_thread(load.wrk, subject.port, client.body().decode(), 16, 1)
        before, cpu, began = await asyncio.to_thread(subject.total, "served"), subject.router.cpu(), time.monotonic()
        run = await asyncio.to_thread(load.wrk, subject.port, client.body().decode(), 16, 5)
        cpu, took = subject.router.cpu() - cpu, time.monotonic() - began
        served = await asyncio.to_thread(subject.total, "served") - before
        holder.cancel()
        micros = cpu / run["requests"] * 1e6
        said = {"requests": run["requests"], "served": served, "cpu_us": micros, "seconds": took}
        return {**said, "kept": micros <= 20 and served == 0 and run["failed"] == run["requests"]}

    with field.subject(kind, policy, 2, "--max_requests", "1") as subject:
        return asyncio.run(held(subject))


def fair(field: Range, kind: Kind, policy: str) -> Result:
    """Tenant A floods with 256 clients, B asks one by one: B's time to a first token, in terms of what it is alone."""

    async def as_tenant(port: int, key: str) -> float:
        data = client.body(f"first={WORK * 1000:.0f}")
        began = time.monotonic()
        head = client.head(len(data), "/v1/chat/completions", f"authorization: Bearer {key}")
        status, *_ = await client.raw(port, head + data, 60)
        if status != 200:
            raise SystemExit(f"tenant {key} was answered {status}")
        return time.monotonic() - began

    async def run(subject: Subject) -> Result:
        alone = [await as_tenant(subject.port, "b") for _ in range(40)]
        over = False

        async def again() -> int:
            count = 0
            while not over:
                await as_tenant(subject.port, "a")
                count += 1
            return count

        flood = [asyncio.create_task(again()) for _ in range(256)]
        await asyncio.sleep(3)
        beside = [await as_tenant(subject.port, "b") for _ in range(40)]
        over = True
        served = sum(await asyncio.gather(*flood))
        before, after = statistics.median(alone), statistics.median(beside)
        said = {"alone_ms": before * 1e3, "beside_ms": after * 1e3, "flood": served, "share": after / before}
        return {**said, "kept": after <= 2 * before}

    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("a:a\nb:b\n")
        keys.flush()
        pathlib.Path(keys.name).chmod(0o600)
        with field.subject(kind, policy, 2, "--api_keys_file", keys.name, places=PLACES) as subject:
            return asyncio.run(run(subject))
