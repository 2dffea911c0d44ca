"""Engine servers that joined through an EngineWorker: found, served by Routers themselves, gone when they stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_server import EngineServer, engine_process
from protocol import describe, generate
from router_kit import chat, http, ready, system, until
from tcp_server import listening

from pulsing import _core
from pulsing.core import ActorSystem
from pulsing.exceptions import PulsingActorError
from pulsing.serving import (
    Delta,
    EngineWorker,
    GenerateRequest,
    RouterRunner,
    Usage,
    Worker,
    start_router,
    stop_router,
)
from pulsing.serving._probe import EngineLoad, Models, ProbeError, Url, engine_load, engine_of, get

MODEL = "org/engine-model"
FAST = {"probe_interval": 0.05, "probe_timeout": 0.5}


class Words(Worker):
    """An actor that says the words of the last text, one every 0.2 s."""

    served = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.served += 1
        for word in request.last_text.split():
            yield Delta(word + " ")
            await asyncio.sleep(0.2 if request.messages else 0)
        yield Delta(finish_reason="stop", usage=Usage(1, 1))


@contextlib.asynccontextmanager
async def routed(node: ActorSystem, **settings: Any) -> AsyncIterator[RouterRunner]:
    runner = await start_router(node, "127.0.0.1", 0, "alias", **settings)
    try:
        yield runner
    finally:
        await stop_router(runner, 1)


def run(test: Callable[..., Awaitable[None]], *arguments: Any, limit: float = 60) -> None:
    asyncio.run(asyncio.wait_for(test(*arguments), limit))  # type: ignore[arg-type]


async def health(addr: str) -> dict[str, Any]:
    status, _, body = await http(addr, "GET", "/ready")
    return {"code": status, **json.loads(body)}


async def says(addr: str, text: str) -> None:
    """Waits until the Router, without a ready worker, explains it with these words."""

    async def explained() -> bool:
        told = await health(addr)
        return told["code"] == 503 and text in told.get("detail", "")

    await until(f"/ready says {text!r}", explained)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- through a Router ---------------------------------------------------------------------------------------------


def test_the_openai_client_is_served_by_the_engine() -> None:
    async def test() -> None:
        async with system() as node, EngineServer().running() as engine, routed(node) as runner:
            await node.spawn(EngineWorker(engine.url, **FAST), name="worker")
            await ready(runner.addr)
            async with openai.AsyncOpenAI(base_url=f"http://{runner.addr}/v1", api_key="client-key") as client:
                names = [model.id async for model in await client.models.list()]
                assert names == ["alias", MODEL]
                for name in names:
                    answer = await client.chat.completions.create(
                        model=name, messages=[{"role": "user", "content": "Grüße 日本"}]
                    )
                    assert answer.choices[0].message.content == "Grüße 日本"
                    assert (answer.id, answer.model) == ("engine-1", MODEL)
                    assert answer.usage is not None
                    assert answer.usage.total_tokens == 3
                stream = await client.chat.completions.create(
                    model="alias", messages=[{"role": "user", "content": "a b c"}], stream=True
                )
                chunks = [chunk async for chunk in stream]
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a b c "
                assert chunks[-1].choices[0].finish_reason == "stop"
                done = await client.completions.create(model="alias", prompt=["x", "y"])
                assert done.choices[0].text == "['x', 'y']", "an engine gets several prompts whole"
                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    await client.completions.create(model="nope", prompt="x")
            assert all(headers["authorization"] == "Bearer client-key" for headers, _ in engine.seen)

    run(test)


def test_the_body_reaches_the_engine_byte_for_byte() -> None:
    body = (
        '{ "zz":null,"messages":[{"role":"user","content":"\\u65e5 😀"}],"big":12345678901234567890123,'
        '"a":{"b":[1.10,1e3]},'
        '%s"seed":null , "metadata":{"x":"y"}}'
    )

    async def test() -> None:
        async with system() as node, EngineServer().running() as engine, routed(node) as runner:
            await node.spawn(EngineWorker(engine.url, **FAST), name="worker")
            await ready(runner.addr)
            for sent, seen in [
                (f'"model":"{MODEL}",', f'"model":"{MODEL}",'),
                ('"model": "alias" ,', f'"model": "{MODEL}" ,'),
            ]:
                reader, writer = await asyncio.open_connection(*runner.addr.rsplit(":", 1))
                raw = (body % sent).encode()
                head = f"POST /v1/chat/completions HTTP/1.0\r\nx-custom: 7\r\ncontent-length: {len(raw)}\r\n\r\n"
                writer.write(head.encode() + raw)
                assert b" 200 " in await reader.read()
                writer.close()
                headers, got = engine.seen[-1]
                assert got == (body % seen).encode()
                assert headers["x-custom"] == "7"
                assert headers["x-request-id"].startswith("req-")

    run(test)


def test_s5_a_server_that_hangs_is_off_the_road_within_three_seconds_and_loses_nothing() -> None:
    async def test() -> None:
        ports = [free_port(), free_port()]
        async with (
            system() as node,
            system(node.addr) as other,
            engine_process(ports[0], MODEL) as hung,
            engine_process(ports[1], MODEL),
        ):
            runner = await start_router(node, "127.0.0.1", 0, "alias", scheduler_type="round_robin")
            try:
                for home, port in zip((node, other), ports, strict=True):
                    await home.spawn(EngineWorker(f"http://127.0.0.1:{port}"), name="worker")
                await ready(runner.addr, 2)
                over = False
                begun: dict[int, float] = {}
                statuses: list[int] = []

                async def client(number: int) -> None:
                    while not over:
                        begun[number] = time.monotonic()
                        status, _ = await chat(runner.addr, "hello", stream=number % 2 == 0)
                        statuses.append(status)
                        await asyncio.sleep(0.05)

                clients = [asyncio.create_task(client(number)) for number in range(8)]
                await until("the load is on", lambda: len(statuses) >= 32)
                hung.send_signal(signal.SIGSTOP)
                stopped = time.monotonic()
                await until("each has been served since", lambda: min(begun.values()) > stopped, 3)
                seen = len(statuses)
                await until("all get on", lambda: len(statuses) >= seen + 32)
                over = True
                await asyncio.gather(*clients)
                assert set(statuses) == {200}
                hung.send_signal(signal.SIGCONT)
                await ready(runner.addr, 2)
            finally:
                await stop_router(runner, 1)

    run(test)


def test_a_killed_engine_leaves_routing_and_comes_back() -> None:
    async def test() -> None:
        port = free_port()
        async with system() as node, routed(node) as runner:
            # With the defaults: they promise that it takes no longer than 2 to 3 s.
            await node.spawn(EngineWorker(f"http://127.0.0.1:{port}"), name="worker")
            await says(runner.addr, "loading (")
            await says(runner.addr, "its engine: cannot connect")
            async with engine_process(port, MODEL) as process:
                await ready(runner.addr)
                assert (await chat(runner.addr, "one"))[0] == 200
                process.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                await says(runner.addr, "failed (")
                assert time.monotonic() - killed < 3
                status, answer = await chat(runner.addr, "two")
                assert status == 503
                assert answer["error"]["message"].startswith("No available workers")
            async with engine_process(port, MODEL) as process:
                back = time.monotonic()
                await ready(runner.addr)
                assert time.monotonic() - back < 3
                status, answer = await chat(runner.addr, "three")
                assert (status, answer["choices"][0]["message"]["content"]) == (200, "three")
                process.send_signal(signal.SIGSTOP)
                stopped = time.monotonic()
                await says(runner.addr, "no answer within 1 s")
                assert time.monotonic() - stopped < 4
                process.send_signal(signal.SIGCONT)
                await ready(runner.addr)
                assert (await chat(runner.addr, "four"))[0] == 200

    run(test)


def test_two_engines_and_an_actor_serve_under_one_name() -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            node = await stack.enter_async_context(system())
            others = [await stack.enter_async_context(system(node.addr)) for _ in range(2)]
            engines = [await stack.enter_async_context(EngineServer(pause=0.2).running()) for _ in range(2)]
            runner = await stack.enter_async_context(routed(node))
            for other, engine in zip(others, engines, strict=True):
                await other.spawn(EngineWorker(engine.url, capacity=4, **FAST), name="worker")
            actor = Words(MODEL, capacity=4)
            await node.spawn(actor, name="worker")
            await ready(runner.addr, 3)
            answers = await asyncio.gather(*(chat(runner.addr, "one two three", stream=True) for _ in range(12)))
            assert all(answer.endswith("data: [DONE]\n\n") and '"two ' in answer for _, answer in answers)
            assert [status for status, _ in answers] == [200] * 12
            assert all(len(engine.seen) for engine in engines)
            assert actor.served
            # Several prompts: whole to an engine, divided for an actor; both answer.
            texts = set()

            async def both_kinds() -> bool:
                body = {"model": "alias", "prompt": ["x", "y"]}
                status, _, answer = await http(runner.addr, "POST", "/v1/completions", body)
                assert status == 200
                texts.add(tuple(choice["text"] for choice in json.loads(answer)["choices"]))
                return len(texts) == 2

            await until("engines and the actor have answered", both_kinds)
            assert texts == {("['x', 'y']",), ("x ", "y ")}

    run(test)


def test_the_command_line_joins_and_leaves() -> None:
    async def test() -> None:
        async with system() as node, EngineServer().running() as engine, routed(node) as runner:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pulsing.cli", "actor", "pulsing.serving.EngineWorker"),
                *("--seeds", node.addr, "--name", "worker", "--", "--url", engine.url),
                env=environment,
            )
            try:
                await ready(runner.addr)
                assert (await chat(runner.addr, "hello"))[1]["choices"][0]["message"]["content"] == "hello"
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 20) == 0
                await ready(runner.addr, 0)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    run(test)


# ---- keys, health, load -------------------------------------------------------------------------------------------


def test_the_engines_key_comes_from_the_file_and_the_clients_stays_here(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")

    async def test() -> None:
        async with system() as node, EngineServer(key="s3cret").running() as engine, routed(node) as runner:
            await node.spawn(EngineWorker(engine.url, **FAST), name="keyless")
            worker = await node.spawn(EngineWorker(engine.url, api_key_file=str(file), **FAST), name="worker")
            await ready(runner.addr)
            async with openai.AsyncOpenAI(base_url=f"http://{runner.addr}/v1", api_key="client-key") as client:
                await client.chat.completions.create(model="alias", messages=[{"role": "user", "content": "x"}])
            assert engine.seen[-1][0]["authorization"] == "Bearer s3cret"
            description = await describe(worker)
            assert description.authorization == "Bearer s3cret"
            entries = str(await node.get_named_instances("worker"))
            assert engine.url in entries
            assert "s3cret" not in entries, "metadata is for everyone to see"

    run(test)


def test_an_engine_under_https_is_served_where_its_authority_is_believed(tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey ed25519 -noenc -days 2 -subj /CN=engine -addext subjectAltName=IP:127.0.0.1"
    command += " -addext basicConstraints=critical,CA:FALSE"
    subprocess.run(
        [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, stderr=subprocess.PIPE
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    ca = str(tmp_path / "cert.pem")

    async def test() -> None:
        async with (
            system() as node,
            EngineServer(tls=tls).running() as engine,
            routed(node, engine_ca_file=ca) as runner,
        ):
            await node.spawn(EngineWorker(engine.url, **FAST, ca_file=ca), name="worker")
            await ready(runner.addr)
            for stream in (False, True):
                status, answer = await chat(runner.addr, "Grüße", stream=stream)
                assert status == 200
                assert "Gr" in str(answer)
            # A Router that believes others only does not send anything there, and says why.
            async with routed(node) as strict:
                await says(strict.addr, "cannot connect to its engine: ")
        async with system() as node, EngineServer(tls=tls).running() as engine, routed(node) as runner:
            await node.spawn(EngineWorker(engine.url, **FAST), name="worker")
            await says(runner.addr, "certificate")

    run(test)


def test_what_keeps_an_engine_from_serving_is_said() -> None:
    async def test() -> None:
        async with system() as node, EngineServer(key="k").running() as engine, routed(node) as runner:
            await node.spawn(EngineWorker(engine.url, **FAST), name="worker")
            await says(runner.addr, "--api_key_file")
            engine.key, engine.health = None, 503
            await says(runner.addr, "GET /health is answered 503")
            engine.health, engine.models = 200, []
            await says(runner.addr, "it lists no model yet")
            engine.models = [{"nothing": 1}]
            await says(runner.addr, "list of models")
            engine.models, engine.health = None, 404
            await ready(runner.addr)
            engine.paths.clear()
            await until("it goes on looking", lambda: engine.paths.count("/v1/models") > 3)
            assert "/health" not in engine.paths, "what a server does not have is let be"
            engine.models = [{"id": "other"}, {"id": "lora"}]

            async def renamed() -> bool:
                _, _, body = await http(runner.addr, "GET", "/v1/models")
                return [model["id"] for model in json.loads(body)["data"]] == ["alias", "other", "lora"]

            await until("another model is listed", renamed)

    run(test)


def test_load_and_engine_come_from_its_metrics() -> None:
    metrics = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
        'vllm:num_requests_waiting{engine="0"} 4.0\nvllm:num_requests_waiting_by_reason{reason="x"} 9.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    )

    async def test() -> None:
        async with system() as node, EngineServer(metrics=metrics).running() as engine:
            worker = await node.spawn(EngineWorker(engine.url, **FAST), name="worker")

            async def told() -> bool:
                load = (await describe(worker)).load
                return bool(load.state == "ready" and load.running == 5)

            await until("the load is reported", told)
            description = await describe(worker)
            load = description.load
            assert (description.engine, load.waiting, load.capacity) == ("vllm", 4, 256)
            assert load.kv_usage == pytest.approx(0.5)
            assert (load.models, load.max_model_len) == ([MODEL], 4096)
            engine.metrics = None
            await until("without metrics it is 0", lambda: _running(worker, 0))

    async def _running(worker: Any, count: int) -> bool:
        return bool((await describe(worker)).load.running == count)

    run(test)


def test_a_request_that_comes_here_is_refused_in_words() -> None:
    async def test() -> None:
        async with system() as node, EngineServer().running() as engine:
            worker = await node.spawn(EngineWorker(engine.url, **FAST), name="worker")
            with pytest.raises(PulsingActorError, match="over HTTP"):
                async for _ in generate(worker, top_k=5):
                    pass

    run(test)


def test_s5_an_engine_that_stands_still_behind_a_server_that_answers_is_told() -> None:
    def metrics(running: int, tokens: int) -> str:
        return f"vllm:num_requests_running {running}\nvllm:generation_tokens_total {tokens}\n"

    async def test() -> None:
        async with system() as node:
            engine = EngineServer(metrics=metrics(1, 5))
            async with engine.running():
                worker = EngineWorker(engine.url, probe_interval=0.02)
                await node.spawn(worker, name="worker")

                def age() -> int:
                    return worker.load_report().progress_age_ms

                await until("it stands still", lambda: age() > 300)
                engine.metrics = metrics(1, 6)
                await until("it gets on", lambda: age() == 0)
                await until("it stands still again", lambda: age() > 300)
                engine.metrics = metrics(0, 6)
                await until("it has let go of its request", lambda: worker.load_report().running == 0)
                # What hangs before it shows its first request is known by this and by who sent the request.
                await until("it stands still once more", lambda: age() > 300)
                # Who counts no tokens says nothing of them.
                engine.metrics = "vllm:num_requests_running 1\n"
                asked = len(engine.paths)
                await until("it was looked at", lambda: len(engine.paths) > asked + 20)
                assert (worker.load_report().running, age()) == (1, 0)

    run(test)


# ---- parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("", EngineLoad()),
        (
            "sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\n",
            EngineLoad(2, 1, 0.5, "sglang"),
        ),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 3\n", EngineLoad(1, 3, 0.0, "llama_cpp")),
        ("tgi_batch_current_size 4\ntgi_queue_size 2\n", EngineLoad(4, 2, 0.0, "tgi")),
        ("tgi_queue_size 1\n", EngineLoad(0, 1, 0.0, "tgi")),
        # As a proxy of them writes it.
        ('sglang_num_running_reqs{a="b"} 2\nsglang_token_usage 0.5\n', EngineLoad(2, 0, 0.5, "sglang")),
        (
            "vllm:num_requests_running NaN\nvllm:num_requests_running 1e99\nvllm:gpu_cache_usage_perc 7",
            EngineLoad(2**31, 0, 1.0, "vllm"),
        ),
        ("vllm:num_requests_running what\n{}{}\n\x00", EngineLoad()),
        (
            'vllm:num_requests_running{e="0"} 1\nvllm:num_requests_running{e="1"} 2\nvllm:kv_cache_usage_perc 0.25\n'
            'vllm:prompt_tokens_total 7\nvllm:generation_tokens_total{e="0"} 1\nvllm:generation_tokens_total{e="1"} 4',
            EngineLoad(3, 0, 0.25, "vllm", (7, 5, 3, 0, 0.25)),
        ),
    ],
)
def test_metrics(text: str, load: EngineLoad) -> None:
    assert engine_load(text) == load


def test_engine_names() -> None:
    named = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama_cpp", "library": "ollama"}
    assert {owner: engine_of(EngineLoad(), owner) for owner in named} == named
    assert engine_of(EngineLoad(), "HuggingFaceTB") == engine_of(EngineLoad(), "") == "openai"
    assert engine_of(EngineLoad(engine="tgi"), "library") == "tgi"


def test_model_lists() -> None:
    llama = {
        "object": "list",
        "data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 2048}}, {"id": "m"}],
    }
    assert Models.parse(json.dumps(llama).encode()) == Models(("m",), 2048, "llamacpp")
    for bad in (b"", b"[]", b"{}", b'{"data":[1]}', b'{"data":3}', b'{"data":[{}]}', b"\xff"):
        with pytest.raises(ProbeError):
            Models.parse(bad)


def test_urls() -> None:
    for text, shown in [
        ("http://127.0.0.1:9001", "http://127.0.0.1:9001"),
        ("http://host/v1/", "http://host:80"),
        ("http://host:1/a/v1", "http://host:1/a"),
        ("http://[::1]:2/", "http://[::1]:2"),
        ("https://host/v1", "https://host:443"),
    ]:
        assert str(Url.parse(text)) == shown
    for bad in (
        "",
        "host:1",
        "ftp://host",
        "http://",
        "http://u:p@h",
        "http://h?x=1",
        "http://h:99999",
        "http://h/ü",
    ):
        with pytest.raises(ValueError, match="url "):
            EngineWorker(bad)
    for bad in (
        "http://u:hunter2@h",
        "u:hunter2@h:1",
        "http://u:hunter2@[h",
        "http://u:hunter2/@h",
        "http://u:hunter2?@h",
        "http://h?key=hunter2",
        "http://u:hunter2@h\u2100",
    ):
        with pytest.raises(ValueError, match="url ") as caught:
            EngineWorker(bad)
        assert "hunter" not in str(caught.value)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for setting, match in [
        ({"probe_interval": 0}, "probe_interval"),
        ({"probe_timeout": 61}, "probe_timeout"),
        ({"capacity": 0}, "capacity"),
        ({"engine": ""}, "engine"),
        ({"api_key_file": str(tmp_path / "none")}, "api_key_file"),
        ({"api_key_file": str(empty)}, "one line"),
    ]:
        with pytest.raises(ValueError, match=match):
            EngineWorker("http://h:1", **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", (200, b"hi")),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\nh\r\n1\r\ni\r\n0\r\n\r\n", (200, b"hi")),
        (b"HTTP/1.0 503 Busy\r\n\r\nhi", (503, b"hi")),
        (b"220 mail.example.com ESMTP\r\n\r\n", ProbeError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhi", ProbeError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nhi", ProbeError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", ProbeError),
        (b"x" * 200_000, ProbeError),
        (b"", ConnectionError),
    ],
)
def test_answers_of_all_kinds(raw: bytes, answer: Any) -> None:
    async def test() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            await writer.drain()

        async with listening(connected) as addr:
            url = Url.parse(f"http://{addr}")
            if isinstance(answer, tuple):
                assert await get(url, "/x", {}, 5) == answer
            else:
                with pytest.raises(answer):
                    await get(url, "/x", {}, 5)

    run(test)


def test_a_silent_server_is_a_timeout() -> None:
    async def test() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with listening(connected) as addr:
            url = Url.parse(f"http://{addr}")
            with pytest.raises(TimeoutError):
                await get(url, "/x", {}, 0.05)

    run(test)


def test_the_wire_carries_a_key_apart_from_the_report() -> None:
    report = _core.LoadReport(state="ready", capacity=1)
    assert _core.Description.decode(report.describe("e", "", "Bearer x")).authorization == "Bearer x"
    assert _core.Description.decode(report.describe("e", "")).authorization == ""
    assert b"Bearer" not in report.encode()
