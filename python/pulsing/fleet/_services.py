"""Specs of what stands in front of engines."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pulsing.fleet import _commands
from pulsing.fleet._model import CommandWorkerSpec, Half, LaunchCommandContext, PortInfo, SchedulingSpec
from pulsing.fleet._template import fill


def router(
    *,
    kind: Literal["pulsing", "sglang"] = "pulsing",
    name: str = "inference-router",
    port: int | None = None,
    seeds: str | None = None,
    model_name: str | None = None,
    worker_name: str | None = None,
    engines: Sequence[str] = (),
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    policy: str | None = None,
) -> CommandWorkerSpec:
    """A Router: one process without GPUs. It may start before anything stands behind it.

    Args:
        kind: `pulsing` finds its workers by name in the cluster; `sglang` is told the addresses of engine pools.
        name: the pool's name.
        port: fixed HTTP port; None lets the backend choose.
        seeds: (pulsing) nodes to join; None starts a cluster, whose node is port `node` of this spec.
        model_name: (pulsing) public alias of what it serves.
        worker_name: (pulsing) name of the workers it serves.
        engines: (sglang) pools of regular engines.
        prefill: (sglang) pools of prefill engines.
        decode: (sglang) pools of decode engines.
        policy: (sglang) routing policy.

    Raises:
        ValueError: an argument that belongs to the other kind.
    """
    fixed = PortInfo(name="primary", static_port=port or 8000, allow_dynamic=port is None)
    mine: dict[str, object] = {"seeds": seeds, "model_name": model_name, "worker_name": worker_name}
    theirs: dict[str, object] = {"engines": engines, "prefill": prefill, "decode": decode, "policy": policy}
    for key, value in (theirs if kind == "pulsing" else mine).items():
        if value:
            raise ValueError(f"router {name}: {key} means nothing to a router of kind {kind}")
    if kind == "pulsing":

        def pulsing_command(context: LaunchCommandContext) -> list[str]:
            primary = context.own("primary")
            return _commands.pulsing_router_command(
                addr=context.own("node").addr,
                http_host=primary.host,
                http_port=primary.port,
                name=name,
                seeds=None if seeds is None else fill(seeds, context),
                model_name=model_name,
                worker_name=worker_name,
            )

        ports = (fixed, PortInfo(name="node", static_port=9000, allow_dynamic=True))
        return CommandWorkerSpec(name=name, port_infos=ports, launch_command=pulsing_command)
    if kind != "sglang":
        raise ValueError(f"router {name}: no kind {kind!r}; there are pulsing and sglang")
    if not (engines or (prefill and decode)):
        raise ValueError(
            f"router {name}: kind sglang needs `engines`, or `prefill` and `decode`: names of engine pools"
        )

    def sglang_command(context: LaunchCommandContext) -> list[str]:
        primary = context.own("primary")
        return _commands.sglang_router_command(
            host=primary.host,
            port=primary.port,
            prometheus_port=context.own("prometheus").port,
            worker_urls=_urls(context, engines),
            prefill=[pair for pool in prefill for pair in _prefill(context, pool)],
            decode_urls=_urls(context, decode),
            policy=policy,
        )

    ports = (fixed, PortInfo(name="prometheus", static_port=9000, allow_dynamic=True))
    return CommandWorkerSpec(name=name, port_infos=ports, launch_command=sglang_command)


def session_server(
    *,
    program: Sequence[str],
    router: str,
    num_servers: int = 1,
    name: str = "session-server",
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandWorkerSpec:
    """Session servers: a program of yours that keeps conversations, told where the Router is.

    It is called with `--host --port --router-url --instance-id`.

    Args:
        program: the command's first words.
        router: pool of the Router.
        num_servers: how many.
        name: the pool's name.
        port: fixed port of the first one, the others follow; None lets the backend choose.
        env: environment.

    Raises:
        ValueError: no program.
    """
    if isinstance(program, str) or not program:
        raise ValueError(f"{name}: program is a list of words, as in ['python3', '-m', 'my_sessions']")
    words = tuple(program)

    def command(context: LaunchCommandContext) -> list[str]:
        primary = context.own("primary")
        return _commands.session_server_command(
            program=words,
            host=primary.host,
            port=primary.port,
            router_url=context.all_of(router, "primary")[0].url,
            instance_id=f"{name}-{context.cell_index}",
        )

    variables = dict(env or {})
    return CommandWorkerSpec(
        name=name,
        port_infos=(
            PortInfo(
                name="primary", static_port=port or 8000, allow_dynamic=port is None, offset_by_cell=port is not None
            ),
        ),
        env_var=lambda context: variables,
        scheduling=SchedulingSpec(num_cells=num_servers),
        launch_command=command,
    )


def command(
    *,
    name: str,
    run: Sequence[str],
    ports: Sequence[PortInfo] = (),
    scheduling: SchedulingSpec | None = None,
    env: Mapping[str, str] | None = None,
    half: Half | None = None,
) -> CommandWorkerSpec:
    """Any command, written with `${...}` slots.

    Args:
        name: the pool's name.
        run: argument list; slots are those of `pulsing.fleet._template.KNOWN`.
        ports: ports of each worker.
        scheduling: the pool's shape; one worker by default.
        env: environment; values may hold slots.
        half: what half of requests it does, if it is an engine that does half.
    """
    words, variables = tuple(run), dict(env or {})
    return CommandWorkerSpec(
        name=name,
        port_infos=tuple(ports),
        scheduling=scheduling or SchedulingSpec(),
        env_var=lambda context: {key: fill(value, context) for key, value in variables.items()},
        launch_command=lambda context: [fill(word, context) for word in words],
        half=half,
    )


def _serving(context: LaunchCommandContext, pool: str) -> list[int]:
    """Positions of the workers that take requests: rank 0 of each cell, the first to show the cell's rendezvous."""
    workers = context.spec_addrs[pool]
    firsts: list[int] = []
    seen: set[str] = set()
    for at, addrs in enumerate(workers):
        cell = addrs["dist_init"].addr if "dist_init" in addrs else addrs["primary"].addr
        if cell not in seen:
            seen.add(cell)
            firsts.append(at)
    return firsts


def _urls(context: LaunchCommandContext, pools: Sequence[str]) -> list[str]:
    urls = []
    for pool in pools:
        addrs = context.all_of(pool, "primary")
        urls += [addrs[at].url for at in _serving(context, pool)]
    return urls


def _prefill(context: LaunchCommandContext, pool: str) -> list[tuple[str, int]]:
    urls, bootstraps = context.all_of(pool, "primary"), context.all_of(pool, "disaggregation_bootstrap")
    return [(urls[at].url, bootstraps[at].port) for at in _serving(context, pool)]
