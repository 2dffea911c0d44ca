"""Golden command lines and shapes of every spec the project ships."""

from typing import Any, Literal

import pytest

from pulsing.fleet import (
    CommandWorkerSpec,
    Deployment,
    Half,
    Join,
    Pool,
    Ready,
    ServerGroup,
    command,
    engine_worker_command,
    inference_engine,
    router,
    session_server,
)
from pulsing.fleet._placement import rendered_statically


def rendered(*specs: CommandWorkerSpec, **fleet: Any) -> dict[str, tuple[str, dict[str, str]]]:
    """Worker label -> (command line, environment), with ports counted from the static ones."""
    pools = tuple(Pool(spec=spec, ready=Ready(port="primary" if spec.port_infos else None)) for spec in specs)
    layout = rendered_statically(Deployment(name="f", pools=pools, **fleet))
    return {one.worker.label: (" ".join(one.argv), one.env) for cell in layout.cells for one in layout.commands(cell)}


def engine(engine: Any, group: ServerGroup | None = None, model: str = "org/m", **more: Any) -> CommandWorkerSpec:
    (spec,) = inference_engine(engine=engine, model=model, server_groups=[group or ServerGroup()], **more)
    return spec


def test_vllm() -> None:
    group = ServerGroup(num_gpus=4, num_gpus_per_engine=2, overrides={"max_model_len": 4096, "enforce-eager": True})
    got = rendered(engine("vllm", group))
    line = "vllm serve org/m --host 127.0.0.1 --port {} --tensor-parallel-size 2 --max-model-len 4096 --enforce-eager"
    assert got == {
        "inference-engine-m/0/0": (line.format(8000), {"CUDA_VISIBLE_DEVICES": "0,1"}),
        "inference-engine-m/1/0": (line.format(8001), {"CUDA_VISIBLE_DEVICES": "2,3"}),
    }


def test_vllm_on_several_nodes() -> None:
    group = ServerGroup(num_gpus=8, num_gpus_per_engine=4, overrides={"pipeline_parallel_size": 2})
    got = rendered(engine("vllm", group, num_gpus_per_node=2))
    head = (
        "vllm serve org/m --host 127.0.0.1 --port {} --tensor-parallel-size 2 --pipeline-parallel-size 2 --nnodes 2"
        " --node-rank {} --master-addr 127.0.0.1 --master-port 9001"
    )
    assert got["inference-engine-m/1/0"] == (head.format(8002, 0), {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert got["inference-engine-m/1/1"] == (head.format(8003, 1) + " --headless", {"CUDA_VISIBLE_DEVICES": "6,7"})


def test_sglang_on_several_nodes() -> None:
    group = ServerGroup(num_gpus=4, num_gpus_per_engine=4, overrides={"mem_fraction_static": 0.8})
    got = rendered(engine("sglang", group, num_gpus_per_node=2))
    line = (
        "python3 -m sglang.launch_server --model-path org/m --host 127.0.0.1 --port {} --tp-size 4 --nnodes 2"
        " --node-rank {} --dist-init-addr 127.0.0.1:9000 --nccl-port {} --base-gpu-id {}"
        " --engine-info-bootstrap-port {} --mem-fraction-static 0.8"
    )
    assert got == {
        "inference-engine-m/0/0": (line.format(8000, 0, 10000, 0, 12000), {}),
        "inference-engine-m/0/1": (line.format(8001, 1, 10001, 2, 12001), {}),
    }


def test_base_gpu_is_the_physical_one_and_needs_neighbours() -> None:
    spec = engine("sglang", ServerGroup(num_gpus=2, num_gpus_per_engine=2))
    assert "--base-gpu-id 6" in rendered(spec, gpus=(6, 7))["inference-engine-m/0/0"][0]
    with pytest.raises(ValueError, match=r"SGLang takes consecutive GPUs, and this worker's are \[5, 7\]"):
        rendered(spec, gpus=(5, 7))


def test_sglang_on_the_cpu() -> None:
    line, env = rendered(engine("sglang"))["inference-engine-m/0/0"]
    assert line.endswith("--engine-info-bootstrap-port 12000 --device cpu")
    assert "--base-gpu-id" not in line
    assert env == {"CUDA_VISIBLE_DEVICES": ""}


def test_transformers() -> None:
    assert rendered(engine("transformers", ServerGroup(num_cells=2, overrides={"continuous_batching": True}))) == {
        f"inference-engine-m/{cell}/0": (
            f"transformers serve org/m --host 127.0.0.1 --port {8000 + cell} --device cpu --continuous-batching",
            {"CUDA_VISIBLE_DEVICES": ""},
        )
        for cell in (0, 1)
    }
    line, env = rendered(engine("transformers", ServerGroup(num_gpus=1, num_gpus_per_engine=1)))[
        "inference-engine-m/0/0"
    ]
    assert "--device auto" in line
    assert env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_llama_cpp() -> None:
    group = ServerGroup(overrides={"ctx_size": 4096, "parallel": 4, "threads": 2, "alias": "small", "flash-attn": "on"})
    assert rendered(engine("llama_cpp", group, model="/models/q.gguf")) == {
        "inference-engine-q.gguf/0/0": (
            "llama-server --model /models/q.gguf --host 127.0.0.1 --port 8000 --n-gpu-layers 0 --ctx-size 4096"
            " --parallel 4 --threads 2 --alias small --flash-attn on",
            {"CUDA_VISIBLE_DEVICES": ""},
        )
    }
    gpu = rendered(engine("llama_cpp", ServerGroup(num_gpus=1, num_gpus_per_engine=1), model="o/m:Q4_K_M"))
    assert gpu["inference-engine-m-Q4_K_M/0/0"][0].startswith("llama-server --hf-repo o/m:Q4_K_M --host")
    assert "--n-gpu-layers 999" in gpu["inference-engine-m-Q4_K_M/0/0"][0]


def test_another_program_and_environment() -> None:
    module = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    line, env = rendered(engine("vllm", program=module, env={"VLLM_CPU_KVCACHE_SPACE": "1"}))["inference-engine-m/0/0"]
    # Only `serve` takes the model as it is.
    assert line.startswith("python3 -m vllm.entrypoints.openai.api_server --model org/m --host 127.0.0.1 --port 8000")
    assert env == {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
    heads = {
        "vllm": "/opt/v/bin/vllm serve org/m --host",
        "transformers": "/opt/v/bin/vllm serve org/m --host",
        "sglang": "/opt/v/bin/vllm serve --model-path org/m --host",
        "llama_cpp": "/opt/v/bin/vllm serve --hf-repo org/m --host",
    }
    for name, head in heads.items():
        spec = engine(name, program=["/opt/v/bin/vllm", "serve"])
        assert rendered(spec)["inference-engine-m/0/0"][0].startswith(head)
    with pytest.raises(ValueError, match=r"program is a list of words, as in \['llama-server'\]"):
        engine("llama_cpp", program=[])
    with pytest.raises(ValueError, match="env cannot set CUDA_VISIBLE_DEVICES"):
        engine("vllm", env={"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(ValueError, match="override 'program' is not possible"):
        engine("vllm", ServerGroup(overrides={"program": ["x"]}))


def halves() -> tuple[CommandWorkerSpec, ...]:
    groups = [
        ServerGroup(worker_type="prefill", num_gpus=2, num_gpus_per_engine=1),
        ServerGroup(worker_type="decode", num_gpus=1, num_gpus_per_engine=1),
        ServerGroup(worker_type="placeholder", num_gpus=1, num_gpus_per_engine=1),
    ]
    return inference_engine(engine="sglang", model="org/m", server_groups=groups)


def test_prefill_decode_and_their_router() -> None:
    prefill, decode, kept = halves()
    got = rendered(
        kept, prefill, decode, router(kind="sglang", prefill=[prefill.name], decode=[decode.name], policy="cache_aware")
    )
    assert " --disaggregation-mode prefill --disaggregation-bootstrap-port 11000" in got[f"{prefill.name}/0/0"][0]
    assert got[f"{decode.name}/0/0"][0].endswith("--engine-info-bootstrap-port 12002 --disaggregation-mode decode")
    # The placeholder came first: it keeps GPU 0 and starts nothing.
    assert "--base-gpu-id 1" in got[f"{prefill.name}/0/0"][0]
    assert not [label for label in got if label.startswith(kept.name)]
    assert got["inference-router/0/0"][0] == (
        "python3 -m sglang_router.launch_router --host 127.0.0.1 --port 8003 --prometheus-port 9093 --pd-disaggregation"
        " --prefill http://127.0.0.1:8000 11000 --prefill http://127.0.0.1:8001 11001 --decode http://127.0.0.1:8002"
        " --policy cache_aware"
    )


def test_ports() -> None:
    prefill, decode, kept = halves()
    assert [(info.name, info.static_port, info.mode, info.allow_dynamic) for info in prefill.port_infos] == [
        ("primary", 8000, "per_worker", True),
        ("dist_init", 9000, "master", True),
        ("nccl", 10000, "per_worker", True),
        ("disaggregation_bootstrap", 11000, "per_worker", True),
        ("engine_info_bootstrap", 12000, "per_worker", True),
    ]
    assert [info.name for info in decode.port_infos] == ["primary", "dist_init", "nccl", "engine_info_bootstrap"]
    assert kept.port_infos == ()
    # Ports that SGLang takes next to its rendezvous are reserved with it.
    rendezvous = decode.port_info("dist_init")
    assert rendezvous is not None
    assert rendezvous.num_consecutive == 31


@pytest.mark.parametrize(
    ("gpus", "each", "per_node", "shape"),
    [(8, 2, 8, (4, 1, 2)), (32, 16, 8, (2, 2, 8)), (8, 8, 8, (1, 1, 8)), (4, 1, 1, (4, 1, 1)), (0, 0, 8, (1, 1, 0))],
)
def test_shapes(gpus: int, each: int, per_node: int, shape: tuple[int, int, int]) -> None:
    spec = engine("vllm", ServerGroup(num_gpus=gpus, num_gpus_per_engine=each), num_gpus_per_node=per_node).scheduling
    assert (spec.num_cells, spec.num_workers_per_cell, spec.num_gpus_per_worker) == shape


@pytest.mark.parametrize(
    ("name", "group", "words"),
    [
        ("vllm", {"num_gpus": 12, "num_gpus_per_engine": 12}, "12 does not divide into nodes of 8 GPUs"),
        ("transformers", {"num_gpus": 16, "num_gpus_per_engine": 16}, "transformers serves from one machine"),
        ("llama_cpp", {"num_gpus": 16, "num_gpus_per_engine": 16}, "llama_cpp serves from one machine"),
        ("vllm", {"worker_type": "placeholder"}, "a placeholder keeps GPUs"),
        ("vllm", {"overrides": {"port": 1}}, "override 'port' is not possible"),
        ("sglang", {"overrides": {"--host": "0.0.0.0"}}, "override '--host' is not possible"),
        ("sglang", {"overrides": {"dist-init-addr": "a:1"}}, "override 'dist-init-addr' is not possible"),
        ("sglang", {"overrides": {"nccl_init_addr": "a:1"}}, "override 'nccl_init_addr' is not possible"),
        ("vllm", {"overrides": {"hos": "0.0.0.0"}}, "override 'hos' is not possible"),
        ("vllm", {"overrides": {"config": "x.yaml"}}, "override 'config' is not possible"),
        (
            "sglang",
            {"num_gpus": 2, "num_gpus_per_engine": 2, "overrides": {"tensor_parallel_size": 4}},
            "tp_size 4 x pp_size 1 is 4 GPUs",
        ),
        ("vllm", {"overrides": {"max_model_len": "4096"}}, "takes int"),
        ("vllm", {"overrides": {"max_model_len": True}}, "takes int"),
        ("vllm", {"overrides": {"a_b": 1, "a-b": 1}}, "given twice"),
        ("vllm", {"overrides": {"enable_prefix_caching": False}}, "no_enable_prefix_caching: true"),
        ("vllm", {"overrides": {"a": None}}, "has no value"),
        (
            "vllm",
            {"num_gpus": 4, "num_gpus_per_engine": 4, "overrides": {"tensor_parallel_size": 2}},
            "is 2 GPUs, and the engine has num_gpus_per_engine 4",
        ),
    ],
)
def test_engines_refuse(name: Any, group: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(name, ServerGroup(**group))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_gpus": 3, "num_gpus_per_engine": 2}, "3 does not divide into engines"),
        ({"num_gpus": 2}, "give both, or neither"),
        ({"num_gpus": 4, "num_gpus_per_engine": 2, "num_cells": 3}, "4 GPUs make 2 engines"),
        ({"worker_type": "encode"}, "Input should be 'regular'"),
    ],
)
def test_groups_refuse(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerGroup(**values)


def test_vllms_halves_have_a_side_channel_each_and_say_what_they_are() -> None:
    overrides = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    kinds: list[Literal["prefill", "decode"]] = ["prefill", "decode"]
    groups = [ServerGroup(worker_type=kind, num_cells=2, overrides=overrides) for kind in kinds]
    specs = inference_engine(engine="vllm", model="m", server_groups=groups)
    assert [spec.half for spec in specs] == [Half(role=kind, pd="sequential") for kind in kinds]
    got = rendered(*specs)
    ports = {env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for _, env in got.values()}
    assert len(ports) == 4
    assert {env["VLLM_NIXL_SIDE_CHANNEL_HOST"] for _, env in got.values()} == {"127.0.0.1"}
    with pytest.raises(ValueError, match="meet by a KV connector, and overrides name none"):
        inference_engine(engine="vllm", model="m", server_groups=[ServerGroup(worker_type=kind) for kind in kinds])


def test_what_an_engine_worker_is_told_of_a_half() -> None:
    prefill, decode, _ = halves()
    assert prefill.half == Half(role="prefill", pd="concurrent", bootstrap="disaggregation_bootstrap")
    assert decode.half == Half(role="decode", pd="concurrent")
    with pytest.raises(ValueError, match="for a concurrent prefill, not a sequential decode"):
        Half(role="decode", pd="sequential", bootstrap="x")
    with pytest.raises(ValueError, match="bootstrap port 'x', which it does not have"):
        command(name="c", run=["x"], half=Half(role="prefill", pd="concurrent", bootstrap="x"))


def test_halves_come_in_pairs_and_from_engines_that_have_them() -> None:
    half = ServerGroup(worker_type="prefill", num_gpus=1, num_gpus_per_engine=1)
    other = ServerGroup(worker_type="decode", num_gpus=1, num_gpus_per_engine=1)
    with pytest.raises(ValueError, match="come in pairs"):
        inference_engine(engine="sglang", model="m", server_groups=[half])
    with pytest.raises(ValueError, match="transformers does no halves of requests"):
        inference_engine(engine="transformers", model="m", server_groups=[half, other])


def test_other_overrides_become_flags() -> None:
    overrides = {"a_list": ["x", 2], "json": {"k": 1}, "no_x": True, "rate": 0.5}
    line = rendered(engine("vllm", ServerGroup(overrides=overrides)))["inference-engine-m/0/0"][0]
    assert line.endswith('--a-list x 2 --json {"k": 1} --no-x --rate 0.5')


def test_pulsing_router() -> None:
    got = rendered(router(name="front", port=8080, model_name="gpt2", worker_name="worker", seeds="h:1"))
    assert got["front/0/0"][0] == (
        "pulsing actor pulsing.serving.Router --addr 127.0.0.1:9000 --name front --seeds h:1 -- --http_host 127.0.0.1"
        " --http_port 8080 --model_name gpt2 --worker_name worker"
    )
    with pytest.raises(ValueError, match="engines means nothing to a router of kind pulsing"):
        router(engines=["x"])
    with pytest.raises(ValueError, match="seeds means nothing to a router of kind sglang"):
        router(kind="sglang", seeds="a:1", engines=["x"])
    with pytest.raises(ValueError, match="kind sglang needs"):
        router(kind="sglang", prefill=["x"])


def test_sglang_router_asks_rank_0_of_each_cell() -> None:
    spec = engine("sglang", ServerGroup(num_gpus=4, num_gpus_per_engine=2), num_gpus_per_node=1)
    line = rendered(spec, router(kind="sglang", engines=[spec.name]))["inference-router/0/0"][0]
    assert line.endswith("--worker-urls http://127.0.0.1:8000 http://127.0.0.1:8002")


def test_session_servers() -> None:
    got = rendered(
        router(name="front"),
        session_server(program=["python3", "-m", "sessions"], router="front", num_servers=2, port=7000, env={"A": "b"}),
    )
    assert got["session-server/1/0"] == (
        "python3 -m sessions --host 127.0.0.1 --port 7001 --router-url http://127.0.0.1:8000"
        " --instance-id session-server-1",
        {"A": "b"},
    )


def test_join_command() -> None:
    assert " ".join(engine_worker_command("h:8000", "worker", "http://127.0.0.1:9001")) == (
        "pulsing actor pulsing.serving.EngineWorker --seeds h:8000 --name worker -- --url http://127.0.0.1:9001"
    )
    spec = engine("vllm")
    front = Pool(spec=router(name="front"))
    chat = Pool(spec=spec, join=Join(seeds="${spec.front.node}", name="w"))
    layout = rendered_statically(Deployment(name="f", pools=(front, chat)))
    assert layout.join_argv(layout.cells[0]) is None
    joining = engine_worker_command("127.0.0.1:9000", "w", "http://127.0.0.1:8001", 60.0)
    # It has a second for leaving, and drains no longer than any worker does.
    assert joining[-2:] == ("--drain_timeout", "50")
    assert layout.join_argv(layout.cells[1]) == joining


def test_too_few_gpus() -> None:
    spec = engine("vllm", ServerGroup(num_gpus=4, num_gpus_per_engine=2))
    with pytest.raises(ValueError, match=r"needs 4 GPUs, and this machine offers 1: \[0\]"):
        rendered(spec, gpus=(0,))
