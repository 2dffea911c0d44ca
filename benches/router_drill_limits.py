"""Drills with clients that leave, large bodies, many prompts, and bodies and manners that strict clients rely on."""

import asyncio
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile
import time
from typing import Any

import router_client as client
import router_house as house
import router_load as load
from router_drill_faults import standing
from router_subjects import Kind, Range, Subject, until

Result = dict[str, Any]

BIG = 20_000_000

# Nulls, large integers, numbers that a float would spoil, keys twice, escapes, and fields that no router knows.
ODD = (
    '{"zeta": 1, "model":"mock", "messages": [ {"role":"user","content":"caf\\u00e9 \\ud83d\\ude00 \\/"} ],"name":null,'
    ' "stream" :false,"logprobs":null,"tools":null,"seed":9007199254740993,"x_big":123456789012345678901234567890,'
    '"x_float":0.1000000000000000055511151231257827, "x_exp":1E+2,"user":"u","x_twice":1,"x_twice":2,'
    '"extra_body":{"guided":{"b":1,"a":[ ]}},"max_completion_tokens":7}'
)


def leave(field: Range, kind: Kind, policy: str) -> Result:
    """Clients that leave while they wait, in a stream, and without one: until the Worker is free."""
    stages = {"before the first token": ("first=3000", True), "in a stream": ("pause=20,tokens=200", True)}
    stages["waiting for a whole answer"] = ("first=3000", False)

    async def one(subject: Subject, command: str, stream: bool) -> float:
        before = subject.total("left")
        data = client.body(command, stream=stream)
        async with client.connection(subject.port) as (_, writer):
            writer.write(client.head(len(data)) + data)
            await asyncio.to_thread(until, "", lambda: subject.total("running") > 0, 3.0)
            await asyncio.sleep(0.1)
            writer.transport.abort()
            gone = time.time()
        if await asyncio.to_thread(until, "", lambda: subject.total("left") > before, 3.0) >= 3:
            return 3.0
        counted = [backend.counted() for backend in subject.backends]
        return max(0.0, max(tally["left_at"] for tally in counted) / 1e6 - gone)

    async def run(subject: Subject) -> Result:
        found: Result = {}
        for stage, (command, stream) in stages.items():
            found[stage] = sorted([await one(subject, command, stream) for _ in range(5)])
        # The median: on a busy machine one of five waits for a core.
        worst = max(statistics.median(times) for times in found.values())
        return {"stages": found, "worst_ms": worst * 1e3, "kept": worst <= 0.03}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


async def posts(port: int, data: bytes, times: int) -> list[float]:
    """Seconds of requests on one connection."""
    taken = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    for _ in range(times):
        began = time.perf_counter()
        writer.write(data)
        await writer.drain()
        status, *_ = await client.answer(reader)
        taken.append(time.perf_counter() - began)
        if status != 200:
            raise SystemExit(f"a large body was answered {status}")
    writer.transport.abort()
    return taken


def large_body(field: Range, kind: Kind, policy: str) -> Result:
    """A body of 20 MB: what the router adds to the engine asked directly."""
    text = client.body().replace(b"hello", b"x" * BIG)
    data = client.head(len(text)) + text
    port = house.free_ports(1)[0]
    # Actors have no address of their own: the mock engine is what they are compared with too.
    with standing(field, kind, policy) as subject, house.engine(field.engine, [port]):
        direct = asyncio.run(posts(port, data, 5))
        cpu = subject.router.cpu()
        through = asyncio.run(posts(subject.port, data, 5))
        cpu = (subject.router.cpu() - cpu) / 5
    added = statistics.median(through) - statistics.median(direct)
    return {
        "direct_ms": statistics.median(direct) * 1e3,
        "through_ms": statistics.median(through) * 1e3,
        "added_ms": added * 1e3,
        "cpu_ms": cpu * 1e3,
        "kept": added < 0.02,
    }


def unique_prompts(port: int, connections: int, seconds: int) -> int:
    """Requests of wrk with prompts of 16 KB that have nothing in common; how many were answered."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write("local n = 0\nlocal text = string.rep('lorem ipsum dolor ', 900)\n")
        script.write("local id = 0\nfunction setup(t) t:set('id', id) id = id + 1 end\n")
        script.write("function request() n = n + 1\nlocal mark = id .. 'x' .. n .. ' '\n")
        script.write('local body = \'{"model":"mock","messages":[{"role":"user","content":"\'')
        script.write(" .. string.rep(mark, 8) .. text:gsub('lorem', mark) .. '\"}]}'\n")
        script.write(
            "return wrk.format('POST', '/v1/chat/completions', {['content-type'] = 'application/json'}, body) end\n"
        )
        script.write(
            "done = function(s, l, r) io.write(string.format('R %d %d\\n', s.requests, s.errors.status)) end\n"
        )
        script.flush()
        words = ["wrk", f"-t{min(2, connections)}", f"-c{connections}", f"-d{seconds}s", "-s", script.name]
        out = subprocess.run([*words, f"http://127.0.0.1:{port}"], check=True, capture_output=True, text=True).stdout
    return int(out.rsplit("R ", 1)[1].split()[0])


def prompts(field: Range, kind: Kind, policy: str, count: int = 100_000) -> Result:
    """100,000 prompts of 16 KB, all different: growth of the router's memory."""
    with standing(field, kind, policy) as subject:
        unique_prompts(subject.port, 16, 2)
        before, served = subject.router.rss_mb(), 0
        while served < count:
            served += unique_prompts(subject.port, 16, 5)
        growth = subject.router.rss_mb() - before
        peak = subject.router.peak_mb()
    return {"prompts": served, "before_mb": before, "growth_mb": growth, "peak_mb": peak, "kept": growth <= 64}


def bits(field: Range, kind: Kind, policy: str) -> Result:
    """A body with nulls, large integers, doubled keys and unknown fields: what of it reaches the engine as it was."""

    async def run(subject: Subject) -> Result:
        sent = ODD.encode()
        status, *_ = await client.raw(subject.port, client.head(len(sent)) + sent, 10)
        seen = b""
        for backend in subject.backends:
            if backend.counted()["served"]:
                seen = house.get(backend.tally, "/mock/last")[1].partition(b"\r\n\r\n")[2]
        if not seen:
            return {"status": status, "kept": False, "how": "it did not reach an engine"}
        mine, theirs = json.loads(sent), json.loads(seen)
        return {
            "status": status,
            "same_bytes": seen == sent,
            "dropped": sorted(set(mine) - set(theirs)),
            "added": sorted(set(theirs) - set(mine)),
            "changed": sorted(key for key in set(mine) & set(theirs) if mine[key] != theirs[key]),
            "kept": seen == sent,
        }

    with field.subject(kind, policy) as subject:
        return asyncio.run(run(subject))


def manners(field: Range, kind: Kind, policy: str) -> Result:
    """A preflight, a trailing slash, a wrong path and a wrong method."""

    async def run(subject: Subject) -> Result:
        async def ask(first: str, data: bytes = b"", *more: str) -> tuple[int, dict[str, str], bytes, bool]:
            lines = [first, "host: r", "content-type: application/json", f"content-length: {len(data)}", *more]
            return await client.raw(subject.port, ("\r\n".join(lines) + "\r\n\r\n").encode() + data, 10)

        def is_json(content: bytes) -> bool:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return isinstance(json.loads(content)["error"]["message"], str)
            return False

        asked = (
            "origin: http://x",
            "access-control-request-method: POST",
            "access-control-request-headers: authorization",
        )
        preflight = await ask("OPTIONS /v1/chat/completions HTTP/1.1", b"", *asked)
        slash = await ask("POST /v1/chat/completions/ HTTP/1.1", client.body())
        nowhere = await ask("GET /v1/nowhere HTTP/1.1")
        method = await ask("DELETE /v1/chat/completions HTTP/1.1")
        passed = {
            "OPTIONS": preflight[0] in (200, 204) and "access-control-allow-headers" in preflight[1],
            "trailing slash": slash[0] == 200,
            "JSON 404": nowhere[0] == 404 and is_json(nowhere[2]),
            "JSON 405": method[0] == 405 and is_json(method[2]) and "allow" in method[1],
        }
        return {"passed": passed, "kept": all(passed.values())}

    # Ours answers other pages' origins only where it is told which (`--cors_origins`); the peers take any.
    origins = ("--cors_origins", "http://x") if kind.who == "pulsing" else ()
    with field.subject(kind, policy, 2, *origins) as subject:
        return asyncio.run(run(subject))


def in_flight(subject: Subject) -> int | None:
    """Requests that the router counts as under way; None where it does not tell."""
    if not subject.ours:
        return None
    for line in house.get(subject.port, "/metrics")[1].decode().splitlines():
        if line.startswith("pulsing_router_in_flight "):
            return int(float(line.split()[1]))
    return -1


def descriptors(subject: Subject) -> int:
    return len(list(pathlib.Path(f"/proc/{subject.router.pid}/fd").iterdir()))


async def abort_one(port: int, dice: random.Random) -> None:
    """A client that leaves somewhere between its first byte and the end of the answer."""
    stream = dice.random() < 0.7
    data = client.body(f"first={dice.choice([0, 0, 20])},pause={dice.choice([0, 2])},tokens=20", stream=stream)
    whole = client.head(len(data)) + data
    stage = dice.randrange(5)
    with contextlib.suppress(OSError):
        async with client.connection(port) as (reader, writer):
            if stage == 0:
                writer.write(whole[: dice.randrange(len(whole))])
            else:
                writer.write(whole)
            await writer.drain()
            if stage > 1:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(dice.uniform(0, 0.06)):
                        await reader.read(1 << 16 if stage == 4 else 1)
            elif stage == 1:
                await asyncio.sleep(dice.uniform(0, 0.03))


def aborts(field: Range, kind: Kind, policy: str, count: int = 10_000) -> Result:
    """10,000 clients that leave at random stages: what is left in flight, and descriptors."""
    seed = int(os.environ.get("PULSING_DRILL_SEED", "1"))

    async def run(subject: Subject) -> Result:
        before, left, dice = descriptors(subject), count, random.Random(seed)

        async def again() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await abort_one(subject.port, dice)

        await asyncio.gather(*(again() for _ in range(32)))

        def rest() -> tuple[int | None, int, int]:
            return in_flight(subject), subject.total("running"), descriptors(subject) - before

        # Connections kept to the Workers may stay.
        await asyncio.to_thread(until, "", lambda: not rest()[0] and rest()[1] == 0 and rest()[2] <= 64, 10)
        routers, workers, files = rest()
        after = [await client.ask(subject.port, "first=1") for _ in range(8)]
        good = all(end.word == "whole" for end in after)
        said = {"in_flight": routers, "running": workers, "descriptors": files, "serves": good}
        return {**said, "kept": not routers and workers == 0 and files <= 64 and good}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def million(field: Range, kind: Kind, policy: str, count: int = 1_000_000) -> Result:
    """A million requests, streams among them: growth of the router's memory after the first tenth."""
    plain, stream = client.body().decode(), client.body("tokens=8", stream=True).decode()
    with standing(field, kind, policy) as subject:
        served, memory = 0.0, []
        while served < count:
            for text, seconds in ((plain, 8), (stream, 2)):
                run = load.wrk(subject.port, text, 64, seconds)
                if run["failed"]:
                    return {"error": f"{run['failed']:.0f} requests failed", "kept": False}
                served += run["requests"]
            memory.append((served, subject.router.rss_mb()))
        files, flights = descriptors(subject), in_flight(subject)
    settled = [rss for done, rss in memory if done >= count / 10]
    growth = settled[-1] - settled[0]
    # A tenth of what it has is what an allocator keeps back or not.
    kept = growth <= 0.1 * settled[0] and not flights
    return {"requests": served, "memory": memory, "growth_mb": growth, "descriptors": files, "kept": kept}
