"""Drills with Workers that die, hang, come back, or are all gone."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import router_client as client
import router_house as house
from router_subjects import Kind, Range, Subject, until

Result = dict[str, Any]

CLIENTS = 16
# A Worker's answer takes this long, so that a rate depends on clients that wait for a dead one, not on the machine.
COMMAND = "first=100"
# What a client of the hang drills waits.
PATIENCE = 5.0


@contextlib.contextmanager
def standing(field: Range, kind: Kind, policy: str, workers: int = 2) -> Iterator[Subject]:
    with field.subject(kind, policy, workers) as subject:
        # Connections are open, code is warm.
        asyncio.run(warm(subject))
        yield subject


async def warm(subject: Subject) -> None:
    load = client.Load(subject.port, "first=20")
    load.burst(8)
    await load.finish()


def lost(words: dict[str, int]) -> dict[str, int]:
    return {word: count for word, count in words.items() if word != "whole"}


def kill_plain(field: Range, kind: Kind, policy: str) -> Result:
    """kill -9 of one of two Workers, 16 clients without streams: requests lost."""

    async def run(subject: Subject) -> Result:
        load = client.Load(subject.port, COMMAND)
        load.closed(CLIENTS)
        await asyncio.sleep(1.5)
        await asyncio.to_thread(subject.backends[0].signal, signal.SIGKILL)
        await asyncio.sleep(3)
        await load.finish()
        failed = lost(load.words())
        return {"lost": sum(failed.values()), "of": len(load.ends), "how": failed, "kept": not failed}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def kill_streams(field: Range, kind: Kind, policy: str) -> Result:
    """kill -9 of one of two Workers under 14 greedy streams: how many did not end whole, and whether all said so."""

    async def run(subject: Subject) -> Result:
        load = client.Load(subject.port, "pause=50,tokens=40", tokens=40, stream=True)
        load.burst(14)
        await asyncio.sleep(1)
        await asyncio.to_thread(subject.backends[0].signal, signal.SIGKILL)
        await load.finish()
        failed = lost(load.words())
        # What clients take for a whole answer.
        silent = sum(count for word, count in failed.items() if word not in ("error event", "cut"))
        return {"lost": sum(failed.values()), "of": 14, "silent": silent, "how": failed, "kept": not failed}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def hang_closed(field: Range, kind: Kind, policy: str) -> Result:
    """SIGSTOP of one of two Workers, 16 clients in a closed loop: share of the rate from 2 s later on."""

    async def run(subject: Subject) -> Result:
        load = client.Load(subject.port, COMMAND)
        load.closed(CLIENTS)
        begin = time.monotonic()
        await asyncio.sleep(3)
        subject.backends[0].signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await asyncio.sleep(8)
        end = time.monotonic()
        subject.backends[0].signal(signal.SIGCONT)
        await load.finish()
        before, after = load.between(begin + 0.5, stopped), load.between(stopped + 2, end)
        return {"share": after / before, "before": before, "after": after, "kept": after >= 0.95 * before}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def hang_open(field: Range, kind: Kind, policy: str, *, stream: bool = False) -> Result:
    """One of two Workers stopped, 40 requests a second for 20 s, clients wait 5 s: share lost."""

    async def run(subject: Subject) -> Result:
        command, tokens = ("pause=10,tokens=10", 10) if stream else (COMMAND, 1)
        load = client.Load(subject.port, command, tokens=tokens, stream=stream, timeout=PATIENCE)
        subject.backends[0].signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await load.open(40, 20)
        await load.finish()
        subject.backends[0].signal(signal.SIGCONT)
        failed = [end for end in load.ends if end.word != "whole"]
        late = [end for end in failed if end.began > stopped + 2]
        share = len(failed) / len(load.ends)
        return {"share": share, "after_2s": len(late), "how": lost(load.words()), "kept": share <= 0.01}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def hang_open_streams(field: Range, kind: Kind, policy: str) -> Result:
    """The same with streams."""
    return hang_open(field, kind, policy, stream=True)


def poison(field: Range, kind: Kind, policy: str) -> Result:
    """12 requests that Workers answer with 500, then 20 good ones: good ones lost."""

    async def run(subject: Subject) -> Result:
        bad = [await client.ask(subject.port, "status=500") for _ in range(12)]
        good = [await client.ask(subject.port, "first=1") for _ in range(20)]
        failed = [end.word for end in good if end.word != "whole"]
        return {
            "lost": len(failed),
            "of": 20,
            "how": sorted(set(failed)),
            "bad": sorted({one.word for one in bad}),
            "kept": not failed,
        }

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def restart(field: Range, kind: Kind, policy: str) -> Result:
    """kill -9 under load, started again 3 s later at the same address: seconds from ready to its first request."""

    async def run(subject: Subject) -> Result:
        load = client.Load(subject.port, "first=10")
        load.closed(4)
        await asyncio.sleep(1)
        backend = subject.backends[0]
        await asyncio.to_thread(backend.signal, signal.SIGKILL)
        await asyncio.sleep(3)
        backend.start(subject.log)

        def measured() -> float:
            until("", lambda: house.get(backend.tally, backend.ready)[0] == 200, 30)
            return until("", lambda: backend.counted()["served"] > 0, 75)

        took = await asyncio.to_thread(measured)
        await load.finish()
        return {"seconds": took, "how": lost(load.words()), "kept": took < 1}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))


def all_down(field: Range, kind: Kind, policy: str) -> Result:
    """Both Workers killed: what a request and the readiness check are answered."""

    async def run(subject: Subject) -> Result:
        for backend in subject.backends:
            await asyncio.to_thread(backend.signal, signal.SIGKILL)
        await asyncio.sleep(3)
        data = client.body()
        status, headers, content, _ = await client.raw(subject.port, client.head(len(data)) + data, 70)
        text = content.decode(errors="replace")
        leaks = any(f":{backend.tally}" in text for backend in subject.backends)
        ready = await asyncio.to_thread(subject.readiness)
        said = {"status": status, "retry_after": headers.get("retry-after"), "names_a_worker": leaks, "ready": ready}
        return {**said, "kept": status == 503 and "retry-after" in headers and ready == 503}

    with standing(field, kind, policy) as subject:
        return asyncio.run(run(subject))
