"""An EngineWorker relays to its engine for Routers that cannot reach it (S4; proto/worker.proto, Relay)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from engine_server import EngineServer
from protocol import Call
from router_kit import system, until
from tcp_server import listening

from pulsing import _core
from pulsing.exceptions import PulsingActorError
from pulsing.serving import EngineWorker

QUESTION = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def relayed(ref: Any, request: bytes) -> Call:
    return Call(ref, _core.encode_request("relay"), request)


async def whole(call: Call) -> bytes:
    return b"".join([piece async for piece in call])


def test_the_servers_bytes_come_back_as_they_are() -> None:
    async def test() -> None:
        async with system() as node, EngineServer().running() as engine:
            ref = await node.spawn(EngineWorker(engine.url), name="worker")
            answer = await whole(relayed(ref, QUESTION))
            assert answer.startswith(b"HTTP/1.1 200")
            assert engine.name.encode() in answer

    run(test)


def test_large_requests_and_answers_pass_and_a_slow_reader_holds_up_the_server_alone() -> None:
    large = bytes(range(256)) * 40_000

    async def test() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(len(large)))
            await writer.drain()

        async with listening(echo) as addr, system() as node:
            ref = await node.spawn(EngineWorker(f"http://{addr}"), name="worker")
            assert await whole(relayed(ref, large)) == large

    run(test)


def test_without_bytes_it_says_whether_the_server_can_be_connected_to() -> None:
    async def test() -> None:
        async with system() as node:
            async with EngineServer().running() as engine:
                ref = await node.spawn(EngineWorker(engine.url), name="worker")
                assert await whole(relayed(ref, b"")) == b""
            for request in (b"", QUESTION):
                with pytest.raises(PulsingActorError, match="cannot connect"):
                    await whole(relayed(ref, request))

    run(test)


def test_s4_a_router_that_leaves_closes_the_connection() -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n")
            await reader.read()
            left.set()

        async with listening(silent) as addr, system() as node:
            ref = await node.spawn(EngineWorker(f"http://{addr}", probe_interval=60, probe_timeout=60), name="worker")
            call = relayed(ref, QUESTION)
            async for piece in call:
                assert piece == b"HTTP/1.1 200 OK\r\n"
                break
            assert not left.is_set()
            call.cancel()
            await until("the server sees it", left.is_set)

    run(test)


def test_a_worker_that_stops_lets_what_it_relays_end() -> None:
    async def test() -> None:
        go, asked = asyncio.Event(), asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"/slow" in await reader.readuntil(b"\r\n\r\n"):
                asked.set()
                await go.wait()
                writer.write(b"done")

        async with listening(slow) as addr, system() as node:
            ref = await node.spawn(EngineWorker(f"http://{addr}"), name="worker")
            answer = asyncio.create_task(whole(relayed(ref, b"GET /slow HTTP/1.1\r\n\r\n")))
            await asked.wait()
            stopping = asyncio.create_task(node.stop("worker"))
            await asyncio.sleep(0)
            go.set()
            assert await answer == b"done"
            await stopping

    run(test)
