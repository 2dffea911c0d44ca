"""A fleet: specs, and what the launcher does around their processes."""

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from pulsing.fleet._join import engine_worker_command
from pulsing.fleet._model import CommandWorkerSpec, Frozen, Half, LaunchCommandContext, checked_name

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Restart(Frozen):
    """What follows when a cell ends without having been told to.

    Args:
        when: `crash` restarts the cell, `never` leaves it failed.
        budget: restarts within `window` before the cell is given up; its logs are kept.
        window: seconds.
        backoff: seconds before the first restart; each further one waits `factor` times longer, at most `cap`.
        factor: growth of the wait.
        cap: longest wait in seconds.
        jitter: share of the wait that is random, so that cells which died together do not come back together.
        stable_after: seconds of readiness after which the count starts anew.
    """

    when: Literal["crash", "never"] = "crash"
    budget: Annotated[int, Field(ge=0)] = 5
    window: Seconds = 1800.0
    backoff: Seconds = 2.0
    factor: Annotated[float, Field(ge=1)] = 2.0
    cap: Seconds = 300.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.2
    stable_after: Seconds = 600.0


class Stop(Frozen):
    """How a cell is stopped.

    Args:
        drain: seconds the join process has to leave and let its requests end; SIGTERM tells it to.
        term: seconds between SIGTERM and SIGKILL for the cell's workers.
    """

    drain: Seconds = 60.0
    term: Seconds = 20.0


class Ready(Frozen):
    """When a cell counts as ready: worker 0 answers.

    Args:
        port: name of the port that is asked; None: ready as soon as the processes run.
        path: HTTP path that must answer 200; None: a TCP connection suffices.
        within: seconds from the start; then the cell counts as failed.
        every: seconds between two tries.
        timeout: seconds for one answer.
    """

    port: str | None = "primary"
    path: str | None = "/health"
    within: Seconds = 1800.0
    every: Annotated[float, Field(ge=0.01)] = 0.25
    timeout: Annotated[float, Field(gt=0)] = 5.0


JoinCommand = Callable[[str, str, str], tuple[str, ...]]


class Join(Frozen):
    """How a ready cell becomes an EngineWorker of a Pulsing cluster.

    Args:
        seeds: host:port of nodes of the cluster, separated by commas; `${spec.POOL.PORT}` takes them from this fleet.
        name: name the Router looks for.
        command: gives the argument list from (seeds, name, url).
    """

    seeds: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)] = "worker"
    command: Callable[[str, str, str], tuple[str, ...]] = engine_worker_command

    @property
    def observed(self) -> bool:
        """Whether the cluster shows that a cell has joined: the EngineWorker publishes its state there."""
        return self.command is engine_worker_command

    def seeds_for(self, context: LaunchCommandContext) -> str:
        """The seeds of a cell whose worker 0 has this context.

        Raises:
            ValueError: a template names what is not there, or what it gives can be no seeds.
        """
        from pulsing._core import seed_places
        from pulsing.fleet._template import fill

        seeds = fill(self.seeds, context)
        for seed in filter(None, map(str.strip, seeds.split(","))):
            # A file may be there later, and on other machines.
            seed_places(seed, read=False)
        return seeds

    def argv(self, context: LaunchCommandContext, port: str, drain: float, half: Half | None = None) -> tuple[str, ...]:
        """The command for a cell whose worker 0 has this context.

        Args:
            context: what may be known about the worker.
            port: name of the port that the engine answers on.
            drain: seconds the command has to leave the cluster.
            half: what half of requests the engine does; a command of the user's says that itself.

        Raises:
            ValueError: a template names what is not there.
        """
        seeds, url = self.seeds_for(context), context.own(port).url
        if self.observed:
            return engine_worker_command(seeds, self.name, url, drain, () if half is None else half.flags(context))
        return tuple(self.command(seeds, self.name, url))


class Pool(Frozen):
    """A spec and how the launcher treats its cells."""

    spec: CommandWorkerSpec
    ready: Ready = Ready()
    restart: Restart = Restart()
    stop: Stop = Stop()
    join: Join | None = None

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        names = [info.name for info in self.spec.port_infos]
        if self.ready.port is not None and self.ready.port not in names:
            raise ValueError(
                f"spec {self.spec.name}: readiness asks port {self.ready.port!r}, its ports are:"
                f" {', '.join(names) or 'none'} (ready.port: null for a command that listens nowhere)"
            )
        if self.join is not None and self.ready.port is None:
            raise ValueError(f"spec {self.spec.name}: what joins a cluster needs a port that answers; set ready.port")
        return self


class Deployment(Frozen):
    """A fleet.

    Args:
        name: names the fleet's state and log directories.
        pools: what to run.
        backend: `local` or `ray`.
        host: address the engines of the local backend bind and are known by; on Ray it is each node's own.
        gpus: physical ids of the GPUs that the local backend may hand out; None: those of CUDA_VISIBLE_DEVICES, else
            all.
        log_dir: the cells' logs go to a directory below it, named like the fleet; None: `logs` in the fleet's state
            directory.
        keep_generations: how many starts of a cell keep their logs.
        cluster: name of the Pulsing cluster that the fleet's Routers and EngineWorkers form; None: as PULSING_CLUSTER
            says, else `default`.
        passphrase_file: file with that cluster's secret, on every machine of the fleet under this path; None: as
            PULSING_PASSPHRASE_FILE says, else no secret.
        cert: file of the certificate that the fleet's nodes have in place of a secret, on every machine of the fleet
            under this path; None: as PULSING_CERT says.
        key: file of its key, likewise.
        ca: file of the authorities whose nodes are let in, likewise.
    """

    name: str
    pools: tuple[Pool, ...]
    backend: Literal["local", "ray"] = "local"
    host: str = "127.0.0.1"
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    log_dir: str | None = None
    keep_generations: Annotated[int, Field(ge=1)] = 5
    cluster: Annotated[str, Field(min_length=1)] | None = None
    passphrase_file: Annotated[str, Field(min_length=1)] | None = None
    cert: Annotated[str, Field(min_length=1)] | None = None
    key: Annotated[str, Field(min_length=1)] | None = None
    ca: Annotated[str, Field(min_length=1)] | None = None

    _name = field_validator("name")(checked_name)

    @field_validator("pools", "gpus", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.pools:
            raise ValueError(f"fleet {self.name} runs nothing: no engine, router or command is given")
        twice = [name for name, count in Counter(pool.spec.name for pool in self.pools).items() if count > 1]
        if twice:
            raise ValueError(f"fleet {self.name}: two specs are named {twice[0]!r}")
        if self.gpus is not None and len(set(self.gpus)) != len(self.gpus):
            raise ValueError(f"fleet {self.name}: gpus names one twice: {list(self.gpus)}")
        if self.gpus is not None and self.backend == "ray":
            raise ValueError(f"fleet {self.name}: Ray hands out the GPUs; leave gpus out")
        return self

    def node_settings(self) -> dict[str, str]:
        """What every process of the fleet has in its environment, so that its Pulsing nodes trust each other."""
        settings = {
            "PULSING_CLUSTER": self.cluster,
            "PULSING_PASSPHRASE_FILE": self.passphrase_file,
            "PULSING_CERT": self.cert,
            "PULSING_KEY": self.key,
            "PULSING_CA": self.ca,
        }
        return {key: value for key, value in settings.items() if value is not None}

    def pool(self, name: str) -> Pool:
        """The pool whose spec has that name."""
        return next(pool for pool in self.pools if pool.spec.name == name)
