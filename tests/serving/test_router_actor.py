"""The Router as an actor: its life, its messages, its refusals (S1, S7, S8)."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from router_kit import Scripted, chat, http, ready, system, until

from pulsing.core import Message
from pulsing.exceptions import BindError
from pulsing.serving import Router, start_router, stop_router
from pulsing.serving._router_settings import SETTINGS


def test_importing_serving_imports_no_engine() -> None:
    code = (
        "import sys, pulsing.serving as s; s.Router; s.get_scheduler\n"
        "print([m for m in ('torch', 'transformers', 'mistralrs', 'vllm', 'aiohttp') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_name_of_serving_exists() -> None:
    import pulsing.serving

    for name in pulsing.serving.__all__:
        assert getattr(pulsing.serving, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Ruter'"):
        pulsing.serving.Ruter  # noqa: B018


def test_a_router_serves_workers_of_its_node_and_of_others_and_says_who_it_is() -> None:
    async def run() -> None:
        async with system() as first, system(first.addr) as second:
            router = Router("127.0.0.1", 0, "alias")
            ref = await first.spawn(router, name="router")
            assert router.addr is not None
            (published,) = await first.get_named_instances("router")
            assert published["metadata"] == {"kind": "router", "model": "alias", "http": router.addr}
            port = int(router.addr.rsplit(":", 1)[1])
            health = await ref.ask(Message.from_json("HealthCheck", {}))
            assert (health.msg_type, health.to_json()) == (
                "Ok",
                {"status": "healthy", "http_port": port, "model_name": "alias"},
            )
            config = await ref.ask(Message.from_json("GetConfig", {}))
            assert config.msg_type == "Config"
            assert config.to_json()["worker_name"] == "worker"
            assert (await ref.ask(Message.from_json("Nope", {}))).msg_type == "Error"

            status, body = await chat(router.addr)
            assert status == 503
            assert body["error"]["message"].startswith("No available workers")
            assert "router (router)" in body["error"]["message"]
            workers = [Scripted(), Scripted()]
            await first.spawn(workers[0], name="worker")
            await second.spawn(workers[1], name="worker")
            await ready(router.addr, 2)
            answers = await asyncio.gather(*(chat(router.addr, "sleep 0.2") for _ in range(8)))
            assert [status for status, _ in answers] == [200] * 8
            assert [len(worker.requests) for worker in workers] == [4, 4]
            status, text = await chat(router.addr, "a b", stream=True)
            assert text.endswith("data: [DONE]\n\n")
            assert text.count('"content":"a "') == 1

    asyncio.run(run())


def test_a_client_that_leaves_stops_generation_on_another_node() -> None:
    async def run() -> None:
        async with system() as first, system(first.addr) as second:
            router = Router("127.0.0.1", 0, "alias")
            await first.spawn(router, name="router")
            worker = Scripted()
            await second.spawn(worker, name="worker")
            assert router.addr is not None
            await ready(router.addr)
            host, port = router.addr.rsplit(":", 1)
            for number, stream in enumerate((True, False), 1):
                reader, writer = await asyncio.open_connection(host, int(port))
                body = json.dumps({"messages": [{"role": "user", "content": "hang"}], "stream": stream}).encode()
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                )
                if stream:
                    assert b"begun" in await asyncio.wait_for(reader.readuntil(b"begun"), 10)
                await until("the worker has it", lambda number=number: len(worker.requests) == number)
                writer.close()
                await until("the worker is told", lambda number=number: worker.cancelled == number)

    asyncio.run(run())


def test_a_router_must_not_have_the_name_of_its_workers() -> None:
    async def run() -> None:
        async with system() as node:
            with pytest.raises(ValueError, match="the name of the workers it routes to"):
                await node.spawn(Router("127.0.0.1", 0), name="worker")
            # The name is free again, and a Router with another one starts.
            await node.spawn(Scripted(), name="worker")
            await node.spawn(Router("127.0.0.1", 0), name=Router.default_name)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scheduler_type": "stream_lode"}, "stream_load, round_robin, random, power_of_two, consistent_hash"),
        ({"session_headers": "x session"}, r"session_headers=\['x session'\]: expected names of headers"),
        ({"session_headers": ["x-a", 3]}, "session_headers: 3 is not str"),
        ({"balance_relative": 0.5}, "balance_relative=0.5: expected 1 or more"),
        ({"http_port": 70000}, "http_port=70000"),
        ({"request_timeout": 0}, "request_timeout=0"),
        ({"drain_timeout": -1}, "drain_timeout=-1"),
        ({"model_name": ""}, "model_name"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Router(**arguments)  # type: ignore[arg-type]


def test_times_beyond_any_clock_are_as_good_as_for_ever() -> None:
    times: Any = {one.name: 1.7e308 for one in SETTINGS if one.unit == "s"}

    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0, "alias", **times)
            worker = Scripted()
            await node.spawn(worker, name="worker")
            await ready(runner.addr)
            status, _ = await chat(runner.addr, "hi")
            assert status == 200
            await stop_router(runner)

    asyncio.run(run())


def test_a_busy_port_is_an_error_that_names_it() -> None:
    async def run() -> None:
        async with system() as node:
            runner = await start_router(node, "127.0.0.1", 0)
            with pytest.raises(BindError, match=f"127.0.0.1:{runner.port}"):
                await node.spawn(Router("127.0.0.1", runner.port), name="router")
            await stop_router(runner)
            again = await start_router(node, "127.0.0.1", runner.port)
            await stop_router(again)

    asyncio.run(run())


def test_stopping_the_actor_lets_running_requests_finish() -> None:
    async def run() -> None:
        async with system() as node:
            router = Router("127.0.0.1", 0, "alias")
            await node.spawn(router, name="router")
            worker = Scripted()
            await node.spawn(worker, name="worker")
            assert router.addr is not None
            await ready(router.addr)
            asked = asyncio.create_task(chat(router.addr, "sleep 0.5"))
            await until("the worker has it", lambda: worker.requests)
            await node.stop("router", grace=20)
            status, body = await asked
            assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
            with pytest.raises(ConnectionRefusedError):
                await http(router.addr, "GET", "/health")

    asyncio.run(run())


def test_a_worker_that_drains_gets_nothing_new_and_loses_nothing() -> None:
    async def run() -> None:
        async with system() as first, system(first.addr) as second, system(first.addr) as third:
            router = Router("127.0.0.1", 0, "alias")
            await first.spawn(router, name="router")
            leaving = Scripted()
            staying = Scripted()
            await second.spawn(leaving, name="worker")
            await third.spawn(staying, name="worker")
            assert router.addr is not None
            await ready(router.addr, 2)
            slow = [asyncio.create_task(chat(router.addr, "sleep 0.5")) for _ in range(4)]
            await until("both work", lambda: leaving.requests and staying.requests)
            stopping = asyncio.create_task(second.stop("worker", grace=20))
            await until("it drains", lambda: leaving.state == "draining")
            quick = [asyncio.create_task(chat(router.addr, "x")) for _ in range(10)]
            answers = await asyncio.gather(*slow, *quick)
            assert [status for status, _ in answers] == [200] * 14
            await stopping

    asyncio.run(run())
