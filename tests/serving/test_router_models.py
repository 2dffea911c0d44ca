"""Several models behind one Router (S7): how they are written down, and that each name means its own workers."""

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from router_kit import CHAT, Scripted, http, ready, system

from pulsing.exceptions import ConfigError
from pulsing.serving import Router, start_router, stop_router
from pulsing.serving._router_settings import resolve, served
from pulsing.serving._served import parse_models

TABLE = [("chat", "worker", None), ("big", "gpu", "org/big"), ("l", "gpu", "llama3:8b")]


@pytest.mark.parametrize(
    "models",
    [
        "chat=worker, big=gpu:org/big,l=gpu:llama3:8b",
        ["chat=worker", "big=gpu:org/big", "l=gpu:llama3:8b"],
        {"chat": "worker", "big": "gpu:org/big", "l": "gpu:llama3:8b"},
        tomllib.loads('[models]\nchat = "worker"\nbig = "gpu:org/big"\nl = "gpu:llama3:8b"')["models"],
    ],
)
def test_s7_a_table_of_models_has_three_forms(models: Any) -> None:
    assert parse_models(models) == TABLE


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ("", "has no '='"),
        ([], "models is empty"),
        ("chat", "'chat' has no '='"),
        ("chat=", "empty part"),
        ("=worker", "empty part"),
        ("a=gpu:", "empty part"),
        ("a=x,a=y", "'a' is given twice"),
        ({"a": 3}, "'a' stands for 3"),
        (7, "7 is no table"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_in_words(models: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_models(models)


def test_s7_the_table_may_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('[models]\nchat = "worker"\n"org/x" = "gpu:org/big"\n')
    values = resolve({}, file, {})
    assert served(values) == [("chat", "worker", None), ("org/x", "gpu", "org/big")]
    assert served(resolve({}, None, {"PULSING_ROUTER_MODELS": "a=x"})) == [("a", "x", None)]
    file.write_text('models = "a"')
    with pytest.raises(ConfigError, match=r"router\.toml: models: 'a' has no '='"):
        resolve({}, file, {})


def test_s7_the_pair_counts_only_where_it_is_given() -> None:
    assert [one.name for one in Router(models="a=x,b=y").served] == ["a", "b"]
    assert [one.name for one in Router(model_name="m", models="a=x").served] == ["m", "a"]
    assert Router(worker_name="w", models={"a": "x"}).served[0] == ("pulsing-model", "w", None)
    assert Router().served == [("pulsing-model", "worker", None)]
    with pytest.raises(ConfigError, match="'m' is given twice"):
        Router(model_name="m", models="m=x")


def test_s7_requests_go_by_model_and_the_list_has_all() -> None:
    async def ask(addr: str, model: str | None) -> tuple[int, Any]:
        status, _, body = await http(addr, "POST", "/v1/chat/completions", {**CHAT, "model": model})
        return status, json.loads(body)

    async def run() -> None:
        async with system() as node:
            first, second = Scripted("tiny"), Scripted("org/big")
            await node.spawn(first, name="worker")
            await node.spawn(second, name="gpu")
            router = Router("127.0.0.1", 0, models="chat=worker,big=gpu:org/big")
            await node.spawn(router, name="router")
            assert router.addr is not None
            await ready(router.addr, 2)
            for model, taker in (("chat", first), ("tiny", first), (None, first), ("big", second), ("org/big", second)):
                before = len(taker.requests)
                status, body = await ask(router.addr, model)
                assert (status, body["model"]) == (200, model or "chat")
                assert len(taker.requests) == before + 1, model
            status, body = await ask(router.addr, "worker")
            assert (status, body["error"]["code"]) == (404, "model_not_found")
            assert "chat, big, tiny, org/big" in body["error"]["message"]
            _, _, listed = await http(router.addr, "GET", "/v1/models")
            assert [model["id"] for model in json.loads(listed)["data"]] == ["chat", "big", "tiny", "org/big"]

            runner = await start_router(node, "127.0.0.1", 0, models={"only": "gpu"})
            await ready(runner.addr, 1)
            assert (await ask(runner.addr, "only"))[0] == 200
            await stop_router(runner)
            with pytest.raises(ConfigError, match="named 'later'"):
                await node.spawn(Router("127.0.0.1", 0, models="chat=worker,big=later"), name="later")

    asyncio.run(run())
