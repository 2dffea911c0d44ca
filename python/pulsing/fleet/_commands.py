"""Command lines of the engines: the one place that knows them.

Each builder takes typed keywords and gives an argument list. Flags were checked against vLLM 0.20+, SGLang 0.5.23,
transformers 5.24, llama.cpp's server and sglang-router 0.3.2.
"""

from collections.abc import Sequence
from typing import Literal

DisaggregationMode = Literal["null", "prefill", "decode"]

PROGRAMS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python3", "-m", "sglang.launch_server"),
    "transformers": ("transformers", "serve"),
    "llama_cpp": ("llama-server",),
}
"""How each engine is called where nobody says otherwise."""

_PROVIDERS = {
    "vllm": "pip install vllm",
    "transformers": "pip install 'transformers[serving]'",
    "llama-server": "it comes with llama.cpp",
    "pulsing": "pip install pulsing",
}


def how_to_get(program: str) -> str:
    """What to do about a program that is not on PATH."""
    provider = _PROVIDERS.get(program)
    if provider is None:
        return f"no program {program} on PATH: install what provides it, or give its full path"
    own_place = "" if program == "pulsing" else ", or say where it is with `program` in its section"
    return f"no program {program} on PATH: {provider}{own_place}"


def _given(*flags: tuple[str, object]) -> list[str]:
    """Flags with their values; those whose value is None are left to the engine."""
    return [word for flag, value in flags if value is not None for word in (flag, str(value))]


def _unless_one(*flags: tuple[str, int]) -> list[str]:
    """Flags of sizes; those of 1 are every engine's default."""
    return _given(*((flag, size if size != 1 else None) for flag, size in flags))


def vllm_command(
    *,
    model: str,
    host: str,
    port: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    served_model_name: str | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    program: Sequence[str] = PROGRAMS["vllm"],
    extra: Sequence[str] = (),
) -> list[str]:
    """`vllm serve`, or vLLM's API server as a module.

    Args:
        model: hub id or directory.
        host: address to bind.
        port: HTTP port.
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: groups of layers.
        data_parallel_size: copies of the model within the engine.
        nnodes: workers of the cell; with more than one the rendezvous is named, and only rank 0 serves HTTP.
        node_rank: this worker's rank.
        master_addr: host of the rendezvous.
        master_port: port of the rendezvous.
        served_model_name: name clients use; vLLM's default is `model`.
        max_model_len: longest sequence in tokens.
        gpu_memory_utilization: share of GPU memory.
        program: the command's first words. The model follows as it is after `serve`, else as `--model`, which is how
            `python3 -m vllm.entrypoints.openai.api_server` takes it.
        extra: further arguments, as they are.
    """
    argv = [*program, *([model] if program[-1] == "serve" else ["--model", model]), "--host", host, "--port", str(port)]
    argv += ["--tensor-parallel-size", str(tensor_parallel_size)]
    argv += _unless_one(
        ("--pipeline-parallel-size", pipeline_parallel_size), ("--data-parallel-size", data_parallel_size)
    )
    if nnodes > 1:
        if master_addr is None or master_port is None:
            raise ValueError("an engine on several nodes needs master_addr and master_port")
        argv += ["--nnodes", str(nnodes), "--node-rank", str(node_rank)]
        argv += ["--master-addr", master_addr, "--master-port", str(master_port)]
        if node_rank > 0:
            argv += ["--headless"]
    argv += _given(
        ("--served-model-name", served_model_name),
        ("--max-model-len", max_model_len),
        ("--gpu-memory-utilization", gpu_memory_utilization),
    )
    return [*argv, *extra]


def sglang_command(
    *,
    model: str,
    host: str,
    port: int,
    tp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    nnodes: int = 1,
    node_rank: int = 0,
    dist_init_addr: str | None = None,
    nccl_port: int | None = None,
    base_gpu_id: int | None = None,
    engine_info_bootstrap_port: int | None = None,
    disaggregation_mode: DisaggregationMode = "null",
    disaggregation_bootstrap_port: int | None = None,
    served_model_name: str | None = None,
    context_length: int | None = None,
    mem_fraction_static: float | None = None,
    device: str | None = None,
    program: Sequence[str] = PROGRAMS["sglang"],
    extra: Sequence[str] = (),
) -> list[str]:
    """`python3 -m sglang.launch_server`.

    Args:
        model: hub id or directory.
        host: address to bind.
        port: HTTP port.
        tp_size: GPUs that share each layer.
        pp_size: groups of layers.
        dp_size: copies that split the requests.
        ep_size: expert parallelism.
        nnodes: workers of the cell.
        node_rank: this worker's rank.
        dist_init_addr: host:port of the rendezvous.
        nccl_port: port of the NCCL rendezvous.
        base_gpu_id: first GPU; the engine takes the following ones. None: no GPU.
        engine_info_bootstrap_port: port where the engine describes itself.
        disaggregation_mode: `prefill`, `decode`, or `null` for both.
        disaggregation_bootstrap_port: where decode workers find a prefill worker.
        served_model_name: name clients use; SGLang's default is `model`.
        context_length: longest sequence in tokens.
        mem_fraction_static: share of GPU memory.
        device: `cuda`, `cpu`, ...
        program: the command's first words.
        extra: further arguments, as they are.
    """
    argv = [*program, "--model-path", model, "--host", host, "--port", str(port)]
    argv += ["--tp-size", str(tp_size)]
    argv += _unless_one(("--pp-size", pp_size), ("--dp-size", dp_size), ("--ep-size", ep_size))
    argv += ["--nnodes", str(nnodes), "--node-rank", str(node_rank)]
    argv += _given(
        ("--dist-init-addr", dist_init_addr),
        ("--nccl-port", nccl_port),
        ("--base-gpu-id", base_gpu_id),
        ("--engine-info-bootstrap-port", engine_info_bootstrap_port),
        ("--disaggregation-mode", None if disaggregation_mode == "null" else disaggregation_mode),
        ("--disaggregation-bootstrap-port", disaggregation_bootstrap_port),
        ("--served-model-name", served_model_name),
        ("--context-length", context_length),
        ("--mem-fraction-static", mem_fraction_static),
        ("--device", device),
    )
    return [*argv, *extra]


def transformers_command(
    *,
    model: str,
    host: str,
    port: int,
    device: str = "auto",
    dtype: str | None = None,
    continuous_batching: bool | None = None,
    attn_implementation: str | None = None,
    program: Sequence[str] = PROGRAMS["transformers"],
    extra: Sequence[str] = (),
) -> list[str]:
    """`transformers serve` (`pip install 'transformers[serving]'`).

    Args:
        model: hub id or directory; loaded before the server answers, and used for every request.
        host: address to bind.
        port: HTTP port.
        device: `auto`, `cpu`, `cuda:0`, ...
        dtype: `auto`, `bfloat16`, ...
        continuous_batching: requests share steps.
        attn_implementation: kernel of the attention.
        program: the command's first words.
        extra: further arguments, as they are.
    """
    argv = [*program, model, "--host", host, "--port", str(port), "--device", device]
    argv += _given(("--dtype", dtype), ("--attn-implementation", attn_implementation))
    if continuous_batching is not None:
        argv += ["--continuous-batching" if continuous_batching else "--no-continuous-batching"]
    return [*argv, *extra]


def llama_cpp_command(
    *,
    model: str,
    host: str,
    port: int,
    n_gpu_layers: int = 0,
    ctx_size: int | None = None,
    parallel: int | None = None,
    threads: int | None = None,
    alias: str | None = None,
    program: Sequence[str] = PROGRAMS["llama_cpp"],
    extra: Sequence[str] = (),
) -> list[str]:
    """llama.cpp's `llama-server`.

    Args:
        model: a .gguf file, or a hub id `user/repo[:quant]` that the server fetches itself.
        host: address to bind.
        port: HTTP port.
        n_gpu_layers: layers kept on the GPU.
        ctx_size: context in tokens, of all slots together.
        parallel: requests served at once.
        threads: CPU threads.
        alias: name clients use.
        program: the command's first words.
        extra: further arguments, as they are.
    """
    argv = [*program, "--model" if model.endswith(".gguf") else "--hf-repo", model]
    argv += ["--host", host, "--port", str(port), "--n-gpu-layers", str(n_gpu_layers)]
    argv += _given(
        ("--ctx-size", ctx_size),
        ("--parallel", parallel),
        ("--threads", threads),
        ("--alias", alias),
    )
    return [*argv, *extra]


def pulsing_router_command(
    *,
    addr: str,
    http_host: str,
    http_port: int,
    name: str = "router",
    seeds: str | None = None,
    model_name: str | None = None,
    worker_name: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """`pulsing actor pulsing.serving.Router`.

    Args:
        addr: host:port of its node.
        http_host: address its HTTP API binds.
        http_port: port of its HTTP API.
        name: name the Router is registered under.
        seeds: nodes to join; None starts a cluster.
        model_name: public alias of what it serves.
        worker_name: name of the workers it serves.
        extra: further constructor arguments.
    """
    argv = ["pulsing", "actor", "pulsing.serving.Router", "--addr", addr, "--name", name]
    argv += _given(("--seeds", seeds))
    argv += ["--", "--http_host", http_host, "--http_port", str(http_port)]
    argv += _given(("--model_name", model_name), ("--worker_name", worker_name))
    return [*argv, *extra]


def sglang_router_command(
    *,
    host: str,
    port: int,
    prometheus_port: int,
    worker_urls: Sequence[str] = (),
    prefill: Sequence[tuple[str, int]] = (),
    decode_urls: Sequence[str] = (),
    policy: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """`python3 -m sglang_router.launch_router`, which alone can pair prefill with decode workers.

    Args:
        host: address to bind.
        port: HTTP port.
        prometheus_port: port of its metrics.
        worker_urls: engines that do both halves.
        prefill: (url, bootstrap port) of prefill engines.
        decode_urls: decode engines.
        policy: routing policy.
        extra: further arguments, as they are.
    """
    argv = ["python3", "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
    argv += ["--prometheus-port", str(prometheus_port)]
    if prefill or decode_urls:
        if not prefill or not decode_urls or worker_urls:
            raise ValueError("prefill and decode engines come in pairs, and not mixed with regular ones")
        argv += ["--pd-disaggregation"]
        for url, bootstrap in prefill:
            argv += ["--prefill", url, str(bootstrap)]
        for url in decode_urls:
            argv += ["--decode", url]
    elif worker_urls:
        argv += ["--worker-urls", *worker_urls]
    argv += _given(("--policy", policy))
    return [*argv, *extra]


def session_server_command(
    *, program: Sequence[str], host: str, port: int, router_url: str, instance_id: str, extra: Sequence[str] = ()
) -> list[str]:
    """A session server: a program of the user's that keeps conversations in front of a Router.

    Args:
        program: the command's first words.
        host: address to bind.
        port: HTTP port.
        router_url: where the Router answers.
        instance_id: tells the pool's members apart.
        extra: further arguments, as they are.
    """
    return [
        *program,
        *("--host", host, "--port", str(port)),
        *("--router-url", router_url, "--instance-id", instance_id),
        *extra,
    ]
