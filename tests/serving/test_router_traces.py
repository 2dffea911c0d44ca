"""Traces and the access log across a Router and a worker in Python (S7)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from router_kit import CHAT, Scripted, chat, http, ready, system, until
from tcp_server import listening

from pulsing.serving import start_router, stop_router


class Collector:
    """Takes what OTLP/HTTP posts."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any]]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        for resource in json.loads(await reader.readexactly(length))["resourceSpans"]:
            service = resource["resource"]["attributes"][0]["value"]["stringValue"]
            self.spans += [(service, span) for scope in resource["scopeSpans"] for span in scope["spans"]]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    def of(self, service: str) -> list[dict[str, Any]]:
        return [span for name, span in self.spans if name == service]


def test_s7_a_workers_span_hangs_below_the_routers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "access.log"

    async def run() -> None:
        collector = Collector()
        async with listening(collector.connected) as addr, system() as first, system(first.addr) as second:
            monkeypatch.setenv("PULSING_OTLP_ENDPOINT", f"http://{addr}")
            runner = await start_router(first, "127.0.0.1", 0, "alias", access_log=str(log))
            await second.spawn(Scripted(), name="worker")
            await ready(runner.addr)
            assert (await chat(runner.addr, "hello"))[0] == 200
            assert (await chat(runner.addr, "fail 422"))[0] == 422
            await until("the collector has all", lambda: len(collector.spans) >= 6)
            await stop_router(runner)
        routers = {span["spanId"]: span for span in collector.of("pulsing-router")}
        workers = collector.of("pulsing-worker")
        assert len(workers) == 2
        for span in workers:
            dispatch = routers[span["parentSpanId"]]
            request = routers[dispatch["parentSpanId"]]
            assert (dispatch["name"], request["name"]) == ("dispatch", "POST /v1/chat/completions")
            assert span["traceId"] == dispatch["traceId"] == request["traceId"]
            assert span["name"] == "generate tiny"
        outcomes = sorted(
            one["value"]["stringValue"]
            for span in workers
            for one in span["attributes"]
            if one["key"] == "pulsing.outcome"
        )
        assert outcomes == ["complete", "failed"]
        assert [span["status"]["message"] for span in workers if "status" in span] == ["422"]
        assert "hello" not in json.dumps(collector.spans)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["status"] for line in lines if line["method"] == "POST"] == [200, 422]
        assert {line["trace_id"] for line in lines if line["method"] == "POST"} == {span["traceId"] for span in workers}

    asyncio.run(run())


def test_s7_a_key_of_the_environment_closes_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSING_API_KEY", "sk-test")

    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias")
            await node.spawn(Scripted(), name="worker")
            await ready(runner.addr)
            status, headers, body = await http(runner.addr, "POST", "/v1/chat/completions", CHAT)
            assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="pulsing"')
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert "sk-test" not in repr(runner)
            await stop_router(runner)

    asyncio.run(run())
