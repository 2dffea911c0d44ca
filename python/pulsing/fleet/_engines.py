"""Specs of inference engines."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pulsing.fleet import _commands, _overrides
from pulsing.fleet._model import (
    CELL_LIMIT,
    CommandWorkerSpec,
    Frozen,
    Half,
    LaunchCommandContext,
    PortInfo,
    SchedulingSpec,
    no_env,
)

EngineName = Literal["vllm", "sglang", "transformers", "llama_cpp"]
WorkerType = Literal["regular", "prefill", "decode", "placeholder"]


class ServerGroup(Frozen):
    """Engines of one kind for one model.

    Args:
        worker_type: `regular` serves whole requests; `prefill` and `decode` each a half; `placeholder` keeps GPUs and
            starts nothing.
        num_gpus: GPUs of the group; 0: the engines run on the CPU.
        num_gpus_per_engine: GPUs of one engine.
        num_cells: number of engines, where there are no GPUs to count them by.
        overrides: engine arguments by name.
    """

    worker_type: WorkerType = "regular"
    num_gpus: Annotated[int, Field(ge=0)] = 0
    num_gpus_per_engine: Annotated[int, Field(ge=0)] = 0
    num_cells: Annotated[int, Field(ge=1, le=CELL_LIMIT)] | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.num_gpus == 0) != (self.num_gpus_per_engine == 0):
            raise ValueError(
                f"num_gpus is {self.num_gpus} and num_gpus_per_engine {self.num_gpus_per_engine}: give both, or neither"
                " for engines on the CPU"
            )
        if self.num_gpus:
            if self.num_gpus % self.num_gpus_per_engine:
                raise ValueError(
                    f"num_gpus {self.num_gpus} does not divide into engines of num_gpus_per_engine"
                    f" {self.num_gpus_per_engine}"
                )
            if self.num_cells is not None and self.num_cells != self.num_gpus // self.num_gpus_per_engine:
                raise ValueError(
                    f"num_cells is {self.num_cells}, but {self.num_gpus} GPUs make"
                    f" {self.num_gpus // self.num_gpus_per_engine} engines of {self.num_gpus_per_engine}"
                )
        return self

    def scheduling(self, num_gpus_per_node: int) -> SchedulingSpec:
        """The group's shape.

        Raises:
            ValueError: an engine covers some nodes whole and one in part.
        """
        if not self.num_gpus:
            return SchedulingSpec(num_cells=self.num_cells or 1)
        workers = max(1, self.num_gpus_per_engine // num_gpus_per_node)
        if self.num_gpus_per_engine > num_gpus_per_node and self.num_gpus_per_engine % num_gpus_per_node:
            raise ValueError(
                f"num_gpus_per_engine {self.num_gpus_per_engine} does not divide into nodes of {num_gpus_per_node} GPUs"
            )
        return SchedulingSpec(
            num_cells=self.num_gpus // self.num_gpus_per_engine,
            num_workers_per_cell=workers,
            num_gpus_per_worker=self.num_gpus_per_engine // workers,
        )


@dataclass(frozen=True)
class _Plan:
    """What all workers of one pool have in common."""

    model: str
    group: ServerGroup
    scheduling: SchedulingSpec
    keywords: Mapping[str, Any]
    extra: tuple[str, ...]
    program: tuple[str, ...]

    @property
    def nnodes(self) -> int:
        return self.scheduling.num_workers_per_cell

    def parallel(self, names: Sequence[str], first: str) -> dict[str, Any]:
        """Sizes whose product is the engine's GPUs; `first` is what is left when it is not given.

        Raises:
            ValueError: the product is another number.
        """
        gpus = self.group.num_gpus_per_engine or 1
        sizes = {name: int(self.keywords.get(name, 1)) for name in names}
        if any(size < 1 for size in sizes.values()):
            raise ValueError(f"a parallel size is below 1: {sizes}")
        others = 1
        for name, size in sizes.items():
            others *= 1 if name == first else size
        if first not in self.keywords:
            sizes[first] = max(1, gpus // others)
        product = sizes[first] * others
        if product != gpus and self.group.num_gpus:
            words = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"{words} is {product} GPUs, and the engine has num_gpus_per_engine {gpus}")
        return sizes

    def rest(self, *without: str) -> dict[str, Any]:
        return {key: value for key, value in self.keywords.items() if key not in without}


def _vllm(plan: _Plan, context: LaunchCommandContext) -> list[str]:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sizes = plan.parallel(names, "tensor_parallel_size")
    if plan.nnodes > 1 and sizes["data_parallel_size"] > 1:
        raise ValueError("data_parallel_size within an engine on several nodes is not supported; use more cells")
    primary, master = context.own("primary"), context.own("dist_init")
    return _commands.vllm_command(
        model=plan.model,
        host=primary.host,
        port=primary.port,
        nnodes=plan.nnodes,
        node_rank=context.worker_in_cell_index,
        master_addr=master.host if plan.nnodes > 1 else None,
        master_port=master.port if plan.nnodes > 1 else None,
        **sizes,
        **plan.rest(*names),
        program=plan.program,
        extra=plan.extra,
    )


def _sglang(plan: _Plan, context: LaunchCommandContext) -> list[str]:
    names = ("tp_size", "pp_size")
    sizes = plan.parallel(names, "tp_size")
    gpus = list(context.gpu_ids)
    if gpus and gpus != list(range(gpus[0], gpus[0] + len(gpus))):
        raise ValueError(
            f"SGLang takes consecutive GPUs, and this worker's are {gpus}; name `gpus` of the fleet in order"
        )
    kind = plan.group.worker_type
    on_cpu: dict[str, Any] = {} if gpus or "device" in plan.keywords else {"device": "cpu"}
    primary = context.own("primary")
    bootstrap = context.own("disaggregation_bootstrap").port if kind == "prefill" else None
    return _commands.sglang_command(
        model=plan.model,
        host=primary.host,
        port=primary.port,
        nnodes=plan.nnodes,
        node_rank=context.worker_in_cell_index,
        dist_init_addr=context.own("dist_init").addr,
        nccl_port=context.own("nccl").port,
        base_gpu_id=gpus[0] if gpus else None,
        engine_info_bootstrap_port=context.own("engine_info_bootstrap").port,
        disaggregation_mode=kind if kind in ("prefill", "decode") else "null",
        disaggregation_bootstrap_port=bootstrap,
        **on_cpu,
        **sizes,
        **plan.rest(*names),
        program=plan.program,
        extra=plan.extra,
    )


def _transformers(plan: _Plan, context: LaunchCommandContext) -> list[str]:
    primary = context.own("primary")
    device: dict[str, Any] = {} if "device" in plan.keywords else {"device": "auto" if context.gpu_ids else "cpu"}
    return _commands.transformers_command(
        model=plan.model,
        host=primary.host,
        port=primary.port,
        **device,
        **plan.keywords,
        program=plan.program,
        extra=plan.extra,
    )


def _llama_cpp(plan: _Plan, context: LaunchCommandContext) -> list[str]:
    primary = context.own("primary")
    # More layers than any model has: all of them.
    layers: dict[str, Any] = {} if "n_gpu_layers" in plan.keywords else {"n_gpu_layers": 999 if context.gpu_ids else 0}
    return _commands.llama_cpp_command(
        model=plan.model,
        host=primary.host,
        port=primary.port,
        **layers,
        **plan.keywords,
        program=plan.program,
        extra=plan.extra,
    )


def _visible_gpus(context: LaunchCommandContext) -> Mapping[str, str]:
    # An empty list hides the GPUs of the machine from an engine that was given none.
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, context.gpu_ids))}


def _all_gpus(context: LaunchCommandContext) -> Mapping[str, str]:
    # This engine counts from its base GPU, so it must see them all.
    return {} if context.gpu_ids else _visible_gpus(context)


_ADDRESSES = frozenset({"model", "host", "port", "program", "extra"})
_RANKS = frozenset({"nnodes", "node_rank", "master_addr", "master_port", "headless"})


@dataclass(frozen=True)
class _Engine:
    render: Callable[[_Plan, LaunchCommandContext], list[str]]
    builder: Callable[..., list[str]]
    reserved: Collection[str]
    env: Callable[[LaunchCommandContext], Mapping[str, str]] = _visible_gpus
    aliases: Mapping[str, str] = field(default_factory=dict)
    several_nodes: bool = False
    # How its halves meet; None: it has none.
    halves: Literal["sequential", "concurrent"] | None = None
    # Ports next to the rendezvous that the engine takes unasked.
    rendezvous_block: int = 1


_ENGINES: dict[str, _Engine] = {
    "vllm": _Engine(
        _vllm,
        _commands.vllm_command,
        # A config file could name host and port, and `uds` is a listener of its own.
        _ADDRESSES | _RANKS | {"config", "uds"},
        aliases={"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"},
        several_nodes=True,
        halves="sequential",
    ),
    "sglang": _Engine(
        _sglang,
        _commands.sglang_command,
        _ADDRESSES
        | _RANKS
        | {
            "model_path",
            "config",
            "nccl_init_addr",
            "dist_init_addr",
            "nccl_port",
            "base_gpu_id",
            "gpu_id_step",
            "engine_info_bootstrap_port",
        }
        | {"disaggregation_mode", "disaggregation_bootstrap_port"},
        env=_all_gpus,
        aliases={
            "tensor_parallel_size": "tp_size",
            "pipeline_parallel_size": "pp_size",
            "data_parallel_size": "dp_size",
            "expert_parallel_size": "ep_size",
            **{short: f"{short}_size" for short in ("tp", "pp", "dp", "ep")},
        },
        several_nodes=True,
        halves="concurrent",
        rendezvous_block=30,
    ),
    "transformers": _Engine(_transformers, _commands.transformers_command, _ADDRESSES | {"force_model"}),
    "llama_cpp": _Engine(_llama_cpp, _commands.llama_cpp_command, _ADDRESSES | {"hf_repo", "hf"}),
}


def inference_engine(
    *,
    engine: EngineName,
    model: str,
    server_groups: Sequence[ServerGroup] = (ServerGroup(),),
    num_gpus_per_node: int = 8,
    name: str | None = None,
    program: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[CommandWorkerSpec, ...]:
    """Specs of the engines that serve one model.

    Args:
        engine: which program serves.
        model: hub id, directory or file, as the engine takes it.
        server_groups: one pool each. A `placeholder` becomes a pool that holds its GPUs and starts nothing.
        num_gpus_per_node: GPUs of one machine; an engine with more takes several workers.
        name: part of the pools' names; the model's last path component by default.
        program: the command's first words, where the engine is not on PATH or is called otherwise: the default is
            `PROGRAMS[engine]`.
        env: environment of the engines, on top of the launcher's.

    Raises:
        ValueError: a group does not fit; names it.
    """
    if engine not in _ENGINES:
        raise ValueError(f"no engine {engine!r}; there are: {', '.join(_ENGINES)}")
    if not model:
        raise ValueError("model is empty: give a hub id, a directory or a file")
    if program is not None and (isinstance(program, str) or not program):
        raise ValueError(f"{model}: program is a list of words, as in {list(_commands.PROGRAMS[engine])}")
    if "CUDA_VISIBLE_DEVICES" in (env or {}):
        raise ValueError(f"{model}: env cannot set CUDA_VISIBLE_DEVICES, GPUs are handed out; see `gpus` of the fleet")
    words = _commands.PROGRAMS[engine] if program is None else tuple(program)
    if num_gpus_per_node < 1:
        raise ValueError(f"num_gpus_per_node is {num_gpus_per_node}; it must be at least 1")
    if not server_groups:
        raise ValueError(f"no server group for {model}: at least one is needed")
    label = (
        name if name is not None else re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-.")
    )
    kinds = {group.worker_type for group in server_groups}
    if ("prefill" in kinds) != ("decode" in kinds):
        raise ValueError(f"{model}: prefill and decode groups come in pairs; only one of the two is here")
    specs = []
    for index, group in enumerate(server_groups):
        pool = f"inference-engine-{label}" + (f"-{index}-{group.worker_type}" if len(server_groups) > 1 else "")
        try:
            specs.append(_spec(pool, engine, model, group, num_gpus_per_node, words, dict(env or {})))
        except ValueError as error:
            raise ValueError(f"{engine} {model}, group {index} ({group.worker_type}): {error}") from error
    return tuple(specs)


def _spec(
    pool: str,
    engine: EngineName,
    model: str,
    group: ServerGroup,
    num_gpus_per_node: int,
    program: tuple[str, ...],
    env: Mapping[str, str],
) -> CommandWorkerSpec:
    scheduling = group.scheduling(num_gpus_per_node)
    kind = _ENGINES[engine]
    if group.worker_type == "placeholder":
        if not group.num_gpus:
            raise ValueError("a placeholder keeps GPUs, and this one has none")
        return CommandWorkerSpec(name=pool, scheduling=scheduling, launch_command=_placeholder)
    half = _half(engine, kind, group)
    if scheduling.num_workers_per_cell > 1 and not kind.several_nodes:
        raise ValueError(
            f"{engine} serves from one machine, and num_gpus_per_engine {group.num_gpus_per_engine} needs"
            f" {scheduling.num_workers_per_cell} of {num_gpus_per_node} GPUs"
        )
    keywords, extra = _overrides.split(group.overrides, kind.builder, kind.reserved, kind.aliases)
    plan = _Plan(model, group, scheduling, keywords, extra, program)
    block = kind.rendezvous_block + (int(keywords.get("dp_size", 1)) if kind.rendezvous_block > 1 else 0)
    ports = _ports(group.worker_type if kind.halves == "concurrent" else "regular", block)
    told = no_env
    if half is not None and half.pd == "sequential":
        ports += (_side_channel(int(keywords.get("data_parallel_size", 1))),)
        told = _side_channel_env
    spec = CommandWorkerSpec(
        name=pool,
        port_infos=ports,
        env_var=lambda context: {**env, **kind.env(context), **told(context)},
        scheduling=scheduling,
        launch_command=lambda context: kind.render(plan, context),
        half=half,
    )
    _dry_run(spec)
    return spec


def _half(engine: str, kind: _Engine, group: ServerGroup) -> Half | None:
    """What half of requests a group does.

    Raises:
        ValueError: its engine does none, or lacks what the halves meet by.
    """
    if group.worker_type not in ("prefill", "decode"):
        return None
    if kind.halves is None:
        raise ValueError(f"{engine} does no halves of requests; engines sglang and vllm do")
    if kind.halves == "sequential" and "kv_transfer_config" not in {
        name.lstrip("-").replace("-", "_") for name in group.overrides
    }:
        raise ValueError(
            "vLLM's halves meet by a KV connector, and overrides name none; as an example"
            " kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_producer}, and kv_consumer to decode"
        )
    bootstrap = "disaggregation_bootstrap" if (kind.halves, group.worker_type) == ("concurrent", "prefill") else None
    return Half(role=group.worker_type, pd=kind.halves, bootstrap=bootstrap)


def _side_channel(ranks: int) -> PortInfo:
    # Where the NIXL connector tells of the memory it shares; each data parallel rank takes the next port.
    return PortInfo(name="kv_side_channel", static_port=5600, allow_dynamic=True, num_consecutive=ranks)


def _side_channel_env(context: LaunchCommandContext) -> Mapping[str, str]:
    here = context.own("kv_side_channel")
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": here.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(here.port)}


def _ports(worker_type: WorkerType, rendezvous_block: int) -> tuple[PortInfo, ...]:
    infos = [
        PortInfo(name="primary", static_port=8000, allow_dynamic=True),
        PortInfo(
            name="dist_init", static_port=9000, mode="master", allow_dynamic=True, num_consecutive=rendezvous_block
        ),
        PortInfo(name="nccl", static_port=10000, allow_dynamic=True),
    ]
    if worker_type == "prefill":
        infos.append(PortInfo(name="disaggregation_bootstrap", static_port=11000, allow_dynamic=True))
    infos.append(PortInfo(name="engine_info_bootstrap", static_port=12000, allow_dynamic=True))
    return tuple(infos)


def _dry_run(spec: CommandWorkerSpec) -> None:
    """Sizes that do not fit are told when the spec is made, not when a GPU waits for it."""
    from pulsing.fleet._model import HostAndPort

    addrs = {info.name: HostAndPort(host="127.0.0.1", port=info.static_port) for info in spec.port_infos}
    gpus = tuple(range(spec.scheduling.whole_gpus_per_worker()))
    spec.launch_command(
        LaunchCommandContext(
            cell_index=0, worker_in_cell_index=0, self_addrs=addrs, spec_addrs={spec.name: [addrs]}, gpu_ids=gpus
        )
    )


def _placeholder(context: LaunchCommandContext) -> list[str]:
    raise ValueError(f"a placeholder (cell {context.cell_index}) keeps GPUs and starts nothing")


def is_placeholder(spec: CommandWorkerSpec) -> bool:
    """Whether the pool only keeps GPUs."""
    return spec.launch_command is _placeholder
