"""What a worker spec is made of: frozen values that reject what they do not know."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Port: TypeAlias = Annotated[int, Field(ge=1, le=65535)]


class Frozen(BaseModel):
    """Base of all models here: immutable, no silent conversions, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def checked_name(name: str) -> str:
    """Names become parts of file names, environment values and addresses."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name: letters, digits, '.', '_' and '-', at most 100, the first a letter or digit"
        )
    return name


class HostAndPort(Frozen):
    """Where one port of a worker is reached."""

    host: str
    port: Port

    @property
    def addr(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://{self.addr}"


NamedHostAndPorts: TypeAlias = dict[str, HostAndPort]


class PortInfo(Frozen):
    """One port, or one block of ports, that each worker (or each cell) needs.

    Args:
        name: key in the maps of addresses.
        static_port: the port where the network is the worker's own, or where `allow_dynamic` is off.
        mode: `per_worker` gives each worker its own; `master` gives one to worker 0 of a cell, and shows it to the
            cell's other workers.
        allow_dynamic: a backend whose workers share a host may choose another port.
        num_consecutive: length of the block; the maps show its first port.
        offset_by_cell: `static_port + cell_index`; makes no sense together with `allow_dynamic`.
    """

    name: str
    static_port: Port
    mode: Literal["per_worker", "master"] = "per_worker"
    allow_dynamic: bool = False
    num_consecutive: Annotated[int, Field(ge=1, le=1000)] = 1
    offset_by_cell: bool = False

    _name = field_validator("name")(checked_name)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.offset_by_cell and self.allow_dynamic:
            raise ValueError(
                f"port {self.name}: offset_by_cell needs a fixed port, and allow_dynamic lets it move;"
                " keep one of the two"
            )
        if self.static_port + self.num_consecutive - 1 > 65535:
            raise ValueError(
                f"port {self.name}: {self.num_consecutive} consecutive ports from {self.static_port} end beyond 65535"
            )
        return self

    def fixed_port(self, cell_index: int) -> int:
        """The port that this worker has where ports do not move.

        Raises:
            ValueError: the cell's offset leads beyond the last port.
        """
        port = self.static_port + (cell_index if self.offset_by_cell else 0)
        if port + self.num_consecutive - 1 > 65535:
            raise ValueError(f"port {self.name} of cell {cell_index} would be {port}, beyond 65535")
        return port


# Far beyond any fleet, and small enough that a slip of the finger is an error instead of a machine full of processes.
CELL_LIMIT = 10_000


class SchedulingSpec(Frozen):
    """The shape of a pool.

    Args:
        num_cells: replicas; a cell is what starts, stops and fails as one.
        num_workers_per_cell: processes that form one cell; on a cluster each runs on a node of its own.
        num_gpus_per_worker: GPUs of each worker.
    """

    num_cells: Annotated[int, Field(ge=1, le=CELL_LIMIT)] = 1
    num_workers_per_cell: Annotated[int, Field(ge=1, le=CELL_LIMIT)] = 1
    num_gpus_per_worker: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0

    @property
    def num_workers(self) -> int:
        """Workers of all cells."""
        return self.num_cells * self.num_workers_per_cell

    def whole_gpus_per_worker(self) -> int:
        """`num_gpus_per_worker` for a backend that hands out whole GPUs.

        Raises:
            ValueError: it is a fraction.
        """
        if self.num_gpus_per_worker != int(self.num_gpus_per_worker):
            raise ValueError(f"num_gpus_per_worker is {self.num_gpus_per_worker}: GPUs are handed out whole")
        return int(self.num_gpus_per_worker)


class LaunchCommandContext(Frozen):
    """What a command may know about its worker when everything has its place and its addresses.

    Args:
        cell_index: which cell of the pool, from 0.
        worker_in_cell_index: which worker of the cell, from 0: the node rank of an engine on several nodes.
        self_addrs: this worker's ports by name; `master` ports are those of worker 0 of its cell.
        spec_addrs: for each pool the ports of all its workers, cell by cell.
        gpu_ids: physical ids of this worker's GPUs.
    """

    cell_index: Annotated[int, Field(ge=0)]
    worker_in_cell_index: Annotated[int, Field(ge=0)]
    self_addrs: NamedHostAndPorts
    spec_addrs: dict[str, list[NamedHostAndPorts]]
    gpu_ids: tuple[int, ...] = ()

    def own(self, port: str) -> HostAndPort:
        """This worker's address for a port.

        Raises:
            ValueError: it has no such port; names those it has.
        """
        if port not in self.self_addrs:
            raise ValueError(f"no port {port!r} here; there are: {', '.join(self.self_addrs) or 'none'}")
        return self.self_addrs[port]

    def all_of(self, spec: str, port: str) -> list[HostAndPort]:
        """The addresses of a port of all workers of a pool that have it.

        Raises:
            ValueError: there is no such pool, or none of its workers has the port.
        """
        if spec not in self.spec_addrs:
            raise ValueError(f"no spec {spec!r} in this fleet; there are: {', '.join(self.spec_addrs) or 'none'}")
        found = [addrs[port] for addrs in self.spec_addrs[spec] if port in addrs]
        if not found:
            raise ValueError(f"spec {spec!r} has no port {port!r}")
        return found


LaunchCommand: TypeAlias = Callable[[LaunchCommandContext], Sequence[str]]
EnvVar: TypeAlias = Callable[[LaunchCommandContext], Mapping[str, str]]


def no_env(context: LaunchCommandContext) -> Mapping[str, str]:
    """The default of `CommandWorkerSpec.env_var`: the launcher's own environment and nothing more."""
    del context
    return {}


class Half(Frozen):
    """Which half of requests the engines of a pool do; a Router brings a prefill and a decode of one `pd` together.

    Args:
        role: `prefill` reads prompts, `decode` generates from what was read.
        pd: how the two meet: `sequential` (vLLM's kv_transfer_params) or `concurrent` (SGLang's bootstrap server).
        bootstrap: of a concurrent prefill, the name of its bootstrap server's port.
    """

    role: Literal["prefill", "decode"]
    pd: Literal["sequential", "concurrent"]
    bootstrap: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.bootstrap is not None and (self.role, self.pd) != ("prefill", "concurrent"):
            raise ValueError(f"bootstrap {self.bootstrap!r} is for a concurrent prefill, not a {self.pd} {self.role}")
        return self

    def flags(self, context: LaunchCommandContext) -> tuple[str, ...]:
        """What an EngineWorker is told of it.

        Args:
            context: what may be known about the worker that it stands for.
        """
        port = () if self.bootstrap is None else ("--bootstrap_port", str(context.own(self.bootstrap).port))
        return ("--role", self.role, "--pd", self.pd, *port)


class CommandWorkerSpec(Frozen):
    """A pool of workers that run a command: all that is known about launching them.

    Args:
        name: the pool's name, unique in its fleet.
        port_infos: ports each worker needs.
        env_var: gives a worker's environment, on top of the launcher's.
        scheduling: the pool's shape.
        launch_command: gives a worker's argument list; nothing passes through a shell.
        half: what half of requests its engines do; None: all of them.
    """

    name: str
    port_infos: tuple[PortInfo, ...] = ()
    env_var: EnvVar = no_env
    scheduling: SchedulingSpec = SchedulingSpec()
    launch_command: LaunchCommand
    half: Half | None = None

    _name = field_validator("name")(checked_name)

    @field_validator("port_infos", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        twice = [name for name, count in Counter(info.name for info in self.port_infos).items() if count > 1]
        if twice:
            raise ValueError(f"spec {self.name}: port {twice[0]!r} is declared twice")
        bootstrap = None if self.half is None else self.half.bootstrap
        if bootstrap is not None and self.port_info(bootstrap) is None:
            raise ValueError(f"spec {self.name}: half names the bootstrap port {bootstrap!r}, which it does not have")
        return self

    def port_info(self, name: str) -> PortInfo | None:
        """The port of that name, if there is one."""
        return next((info for info in self.port_infos if info.name == name), None)

    def command(self, context: LaunchCommandContext) -> tuple[str, ...]:
        """The worker's argument list.

        Raises:
            ValueError: the builder refused, or what it gave is no argument list; names the worker.
        """
        where = f"spec {self.name}, cell {context.cell_index}, worker {context.worker_in_cell_index}"
        try:
            argv = self.launch_command(context)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: no command: {error}") from error
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError(f"{where}: launch_command gave {argv!r}; it must give a list of texts, the program first")
        if any("\0" in word for word in argv) or not argv[0]:
            raise ValueError(f"{where}: launch_command gave {argv!r}: no program, or a NUL in a word")
        return tuple(argv)

    def environment(self, context: LaunchCommandContext) -> dict[str, str]:
        """What the worker's environment has beside the launcher's.

        Raises:
            ValueError: `env_var` gave something else than texts by name.
        """
        where = f"spec {self.name}, cell {context.cell_index}, worker {context.worker_in_cell_index}"
        try:
            env = dict(self.env_var(context))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: no environment: {error}") from error
        for key, value in env.items():
            if not isinstance(key, str) or not isinstance(value, str) or not key or "=" in key or "\0" in key + value:
                raise ValueError(f"{where}: env_var gave {key!r}: {value!r}; it must give texts by name")
        return env
