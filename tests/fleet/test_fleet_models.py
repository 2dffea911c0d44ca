"""The rules of the models: frozen, strict, and refusing what cannot be meant."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from pulsing.fleet import (
    CommandWorkerSpec,
    Deployment,
    HostAndPort,
    Join,
    LaunchCommandContext,
    Pool,
    PortInfo,
    Ready,
    Restart,
    SchedulingSpec,
    command,
)


def context(**changes: Any) -> LaunchCommandContext:
    addrs = {"primary": HostAndPort(host="127.0.0.1", port=8000)}
    values: dict[str, Any] = {
        "cell_index": 0,
        "worker_in_cell_index": 0,
        "self_addrs": addrs,
        "spec_addrs": {"x": [addrs]},
        "gpu_ids": (0,),
    }
    return LaunchCommandContext(**{**values, **changes})


def spec(**changes: Any) -> CommandWorkerSpec:
    values: dict[str, Any] = {
        "name": "x",
        "port_infos": (PortInfo(name="primary", static_port=8000),),
        "launch_command": lambda context: ["true"],
    }
    return CommandWorkerSpec(**{**values, **changes})


MODELS: list[Any] = [
    PortInfo(name="primary", static_port=8000),
    SchedulingSpec(num_cells=2),
    context(),
    spec(),
    HostAndPort(host="h", port=1),
    Pool(spec=spec()),
    Ready(),
    Restart(),
    Join(seeds="127.0.0.1:8000"),
    Deployment(name="f", pools=(Pool(spec=spec()),)),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_frozen_and_closed(model: Any) -> None:
    field = next(iter(type(model).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model, field, getattr(model, field))
    values = {name: getattr(model, name) for name in type(model).model_fields}
    assert type(model)(**values) == model
    with pytest.raises(ValidationError, match="unknown_field"):
        type(model)(**values, unknown_field=1)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (PortInfo, {"name": "a", "static_port": "8000"}),
        (PortInfo, {"name": "a", "static_port": 8000.0}),
        (PortInfo, {"name": "a", "static_port": True}),
        (PortInfo, {"name": 1, "static_port": 8000}),
        (PortInfo, {"name": "a", "static_port": 8000, "allow_dynamic": 1}),
        (PortInfo, {"name": "a", "static_port": 8000, "mode": "leader"}),
        (SchedulingSpec, {"num_cells": "2"}),
        (SchedulingSpec, {"num_gpus_per_worker": "1"}),
    ],
)
def test_strict(model: Any, values: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"static_port": 0}, "greater than or equal to 1"),
        ({"static_port": 65536}, "less than or equal to 65535"),
        ({"num_consecutive": 0}, "greater than or equal to 1"),
        ({"static_port": 65000, "num_consecutive": 600}, "beyond 65535"),
        ({"allow_dynamic": True, "offset_by_cell": True}, "offset_by_cell needs a fixed port"),
        ({"name": "a b"}, "is no name"),
        ({"name": "../a"}, "is no name"),
        ({"name": ""}, "is no name"),
    ],
)
def test_port_info_refuses(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PortInfo(**{"name": "primary", "static_port": 8000, **values})


def test_fixed_port() -> None:
    assert PortInfo(name="a", static_port=8000).fixed_port(3) == 8000
    assert PortInfo(name="a", static_port=8000, offset_by_cell=True).fixed_port(3) == 8003
    with pytest.raises(ValueError, match="beyond 65535"):
        PortInfo(name="a", static_port=65535, offset_by_cell=True).fixed_port(1)


def test_scheduling() -> None:
    shape = SchedulingSpec(num_cells=2, num_workers_per_cell=3, num_gpus_per_worker=4)
    assert (shape.num_workers, shape.whole_gpus_per_worker()) == (6, 4)
    with pytest.raises(ValueError, match=r"0\.2: GPUs are handed out whole"):
        SchedulingSpec(num_gpus_per_worker=0.2).whole_gpus_per_worker()
    for values in (
        {"num_cells": 0},
        {"num_cells": 1_000_000_000},
        {"num_workers_per_cell": 0},
        {"num_gpus_per_worker": -1},
    ):
        with pytest.raises(ValidationError):
            SchedulingSpec(**values)


def test_addresses() -> None:
    assert HostAndPort(host="10.0.0.1", port=80).url == "http://10.0.0.1:80"
    assert HostAndPort(host="::1", port=80).addr == "[::1]:80"


def test_context_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="no port 'nccl' here; there are: primary"):
        context().own("nccl")
    with pytest.raises(ValueError, match="no spec 'y' in this fleet; there are: x"):
        context().all_of("y", "primary")
    with pytest.raises(ValueError, match="'x' has no port 'nccl'"):
        context().all_of("x", "nccl")


def test_spec_refuses() -> None:
    port = PortInfo(name="primary", static_port=8000)
    with pytest.raises(ValidationError, match="port 'primary' is declared twice"):
        spec(port_infos=(port, port))
    with pytest.raises(ValidationError, match="is no name"):
        spec(name="a/b")
    with pytest.raises(ValidationError):
        spec(launch_command=["true"])


@pytest.mark.parametrize("argv", ["vllm serve", [], ["a", 1], [""], ["a", "b\0"]])
def test_a_command_is_a_list_of_texts(argv: Any) -> None:
    with pytest.raises(ValueError, match="spec x, cell 0, worker 0: launch_command gave"):
        spec(launch_command=lambda context: argv).command(context())


@pytest.mark.parametrize("env", [{"A": 1}, {"": "x"}, {"A=B": "x"}, {"A": "x\0"}])
def test_an_environment_is_texts_by_name(env: Any) -> None:
    with pytest.raises(ValueError, match="env_var gave"):
        spec(env_var=lambda context: env).environment(context())


def test_a_builder_that_refuses_is_named() -> None:
    def refuse(context: LaunchCommandContext) -> list[str]:
        raise ValueError("not on a Sunday")

    with pytest.raises(ValueError, match="spec x, cell 1, worker 2: no command: not on a Sunday"):
        spec(launch_command=refuse).command(context(cell_index=1, worker_in_cell_index=2))


def test_templates() -> None:
    addrs = {"http.api": HostAndPort(host="::1", port=81), "b": HostAndPort(host="::1", port=82)}
    here = context(cell_index=3, self_addrs=addrs, spec_addrs={"p.q": [addrs, addrs]}, gpu_ids=(4, 5))
    words = [
        "$$",
        "${cell}/${worker}",
        "${gpus}",
        "${host}",
        "${port.b}",
        "${addr.b}",
        "${url.http.api}",
        "${spec.p.q.b}",
    ]
    got = command(name="x", run=words, env={"A": "${port.b}"})
    assert got.command(here) == ("$", "3/0", "4,5", "::1", "82", "[::1]:82", "http://[::1]:81", "[::1]:82,[::1]:82")
    assert got.environment(here) == {"A": "82"}
    for slot in ("${nothing}", "${port.c}", "${spec.p.q.c}", "${spec.z.b}", "${}"):
        with pytest.raises(ValueError, match="no command"):
            command(name="x", run=["a", slot]).command(here)


def test_deployment_refuses() -> None:
    pool = Pool(spec=spec())
    with pytest.raises(ValidationError, match="two specs are named 'x'"):
        Deployment(name="f", pools=(pool, pool))
    with pytest.raises(ValidationError, match="runs nothing"):
        Deployment(name="f", pools=())
    with pytest.raises(ValidationError, match="gpus names one twice"):
        Deployment(name="f", pools=(pool,), gpus=(0, 0))
    with pytest.raises(ValidationError, match="Ray hands out the GPUs"):
        Deployment(name="f", pools=(pool,), gpus=(0,), backend="ray")
    with pytest.raises(ValidationError, match="readiness asks port 'http', its ports are: primary"):
        Pool(spec=spec(), ready=Ready(port="http"))
    with pytest.raises(ValidationError, match="needs a port that answers"):
        Pool(spec=spec(), ready=Ready(port=None), join=Join(seeds="a:1"))


def test_m6_seeds_of_a_fleet_are_what_nodes_take() -> None:
    seeds = "${spec.x.primary}, k8s://pulsing.serving:8000,file:///not/here/yet"
    assert Join(seeds=seeds).seeds_for(context()) == seeds.replace("${spec.x.primary}", "127.0.0.1:8000")
    for bad, words in [("srv://x:1", "no kind of seed"), ("${spec.x.primary}0:x", "more than one colon")]:
        with pytest.raises(ValueError, match=words):
            Join(seeds=bad).seeds_for(context())
