"""Fleet files: YAML, or Python for what YAML cannot say."""

import os
import pathlib
import runpy
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pulsing.core._files import read_text
from pulsing.fleet._deployment import Deployment, Join, Pool, Ready, Restart, Stop
from pulsing.fleet._engines import EngineName, ServerGroup, inference_engine, is_placeholder
from pulsing.fleet._join import engine_worker_command
from pulsing.fleet._model import CommandWorkerSpec, Half, LaunchCommandContext, PortInfo, SchedulingSpec
from pulsing.fleet._services import command, router, session_server
from pulsing.fleet._template import fill

# In bytes; ten thousand cells with a command each are less.
_MOST = 8 << 20


class FleetFileError(Exception):
    """The file is no fleet; the text names the file, the field and what is wrong."""


class _Section(BaseModel):
    # Not strict: what YAML wrote as a list becomes a tuple. Types are checked by the models behind.
    model_config = ConfigDict(extra="forbid", frozen=True)


class _JoinSection(_Section):
    seeds: str
    name: str = "worker"
    command: list[str] | None = None

    def build(self) -> Join:
        if self.command is None:
            return Join(seeds=self.seeds, name=self.name, command=engine_worker_command)
        words = tuple(self.command)
        nobody = LaunchCommandContext(cell_index=0, worker_in_cell_index=0, self_addrs={}, spec_addrs={})

        def stand_in(seeds: str, name: str, url: str) -> tuple[str, ...]:
            return tuple(fill(word, nobody, {"seeds": seeds, "name": name, "url": url}) for word in words)

        return Join(seeds=self.seeds, name=self.name, command=stand_in)


class _Treated(_Section):
    ready: dict[str, Any] | None = None
    restart: dict[str, Any] | None = None
    stop: dict[str, Any] | None = None
    join: _JoinSection | Literal[False] | None = None


class _EngineSection(_Treated):
    engine: EngineName
    model: str
    name: str | None = None
    program: list[str] | None = None
    env: dict[str, str] | None = None
    groups: list[dict[str, Any]] = Field(default=[{}])


class _RouterSection(_Treated):
    kind: Literal["pulsing", "sglang"] = "pulsing"
    name: str = "inference-router"
    port: int | None = None
    seeds: str | None = None
    model_name: str | None = None
    worker_name: str | None = None
    engines: list[str] = Field(default_factory=list)
    prefill: list[str] = Field(default_factory=list)
    decode: list[str] = Field(default_factory=list)
    policy: str | None = None


class _SessionSection(_Treated):
    program: list[str]
    router: str
    num_servers: int = 1
    name: str = "session-server"
    port: int | None = None
    env: dict[str, str] = Field(default_factory=dict)


class _CommandSection(_Treated):
    name: str
    run: list[str]
    ports: list[dict[str, Any]] = Field(default_factory=list)
    scheduling: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    half: dict[str, Any] | None = None


class _File(_Section):
    fleet: str
    backend: Literal["local", "ray"] = "local"
    host: str = "127.0.0.1"
    gpus: list[int] | None = None
    num_gpus_per_node: Annotated[int, Field(ge=1)] = 8
    log_dir: str | None = None
    keep_generations: int = 5
    cluster: str | None = None
    passphrase_file: str | None = None
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    join: _JoinSection | None = None
    restart: dict[str, Any] = Field(default_factory=dict)
    stop: dict[str, Any] = Field(default_factory=dict)
    engines: list[_EngineSection] = Field(default_factory=list)
    routers: list[_RouterSection] = Field(default_factory=list)
    session_servers: list[_SessionSection] = Field(default_factory=list)
    commands: list[_CommandSection] = Field(default_factory=list)


def load(path: pathlib.Path) -> Deployment:
    """Reads a fleet.

    Args:
        path: `.yaml` or `.yml`; or `.py`, run as a program, which leaves a `Deployment` in `fleet`.

    Raises:
        FleetFileError: it cannot be read, or is no fleet.
    """
    try:
        if path.suffix == ".py":
            return _python(path)
        if path.suffix not in (".yaml", ".yml"):
            raise FleetFileError(f"{path}: a fleet is a .yaml or a .py file")
        text = read_text(path, _MOST)
    except OSError as error:
        raise FleetFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise FleetFileError(f"{path}: {error}") from error
    try:
        _no_key_twice(yaml.compose(text, yaml.SafeLoader))
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FleetFileError(f"{path}: no YAML: {error}") from error
    except RecursionError:
        raise FleetFileError(f"{path}: no fleet is nested as deeply") from None
    if not isinstance(found, dict):
        raise FleetFileError(f"{path}: a fleet is a mapping, as in:\nfleet: NAME\ncommands: [...]")
    try:
        return _build(_File.model_validate(found), path.absolute().parent)
    except ValidationError as error:
        raise FleetFileError(f"{path}:\n{_plainly(error)}") from error
    except ValueError as error:
        raise FleetFileError(f"{path}: {error}") from error


def _no_key_twice(root: Any) -> None:
    """YAML's reader keeps the last of two `commands:` and loses the other in silence."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        # Aliases lead to the same node again.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for at, key in enumerate(keys):
                if key.value in [earlier.value for earlier in keys[:at]]:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            left += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def _python(path: pathlib.Path) -> Deployment:
    if not os.path.isfile(path):
        raise FleetFileError(f"{path}: no such file")
    try:
        found = runpy.run_path(str(path)).get("fleet")
    except ValidationError as error:
        raise FleetFileError(f"{path}:\n{_plainly(error)}") from error
    except (Exception, SystemExit) as error:
        # A program that ends by itself has left no fleet, and must not end the command as if it had.
        raise FleetFileError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Deployment):
        raise FleetFileError(
            f"{path}: `fleet` is {type(found).__name__}; the file must leave a pulsing.fleet.Deployment there"
        )
    return found


def _build(file: _File, directory: pathlib.Path) -> Deployment:
    def beside(path: str | None) -> str | None:
        """Where a path of the fleet file leads, wherever the launcher is started."""
        return None if path is None else str(directory / path)

    pools: list[Pool] = []
    paired = {pool for one in file.routers for pool in (*one.prefill, *one.decode)}
    for at, engine in enumerate(file.engines):
        with _named(f"engines.{at}"):
            groups = [_strict(ServerGroup, group) for group in engine.groups]
            specs = inference_engine(
                engine=engine.engine,
                model=engine.model,
                server_groups=groups,
                num_gpus_per_node=file.num_gpus_per_node,
                name=engine.name,
                program=engine.program,
                env=engine.env,
            )
            for spec in specs:
                if spec.name in paired and isinstance(engine.join, _JoinSection):
                    raise ValueError(
                        f"{spec.name} is behind a router of kind sglang, which pairs halves itself: let that one join,"
                        " or leave it out and the pairing to the Routers of the cluster"
                    )
                joins = spec.name not in paired and not is_placeholder(spec)
                pools.append(_pool(file, engine, spec, joins=joins))
    for at, one in enumerate(file.routers):
        with _named(f"routers.{at}"):
            spec = router(**one.model_dump(exclude={"ready", "restart", "stop", "join"}))
            default = Ready(path="/health") if one.kind == "sglang" else Ready(path="/health", within=60.0)
            pools.append(_pool(file, one, spec, joins=one.join is not None, ready=default))
    for at, server in enumerate(file.session_servers):
        with _named(f"session_servers.{at}"):
            spec = session_server(**server.model_dump(exclude={"ready", "restart", "stop", "join"}))
            pools.append(_pool(file, server, spec, joins=server.join is not None, ready=Ready(path=None, within=300.0)))
    for at, entry in enumerate(file.commands):
        with _named(f"commands.{at}"):
            spec = command(
                name=entry.name,
                run=entry.run,
                ports=[_strict(PortInfo, port) for port in entry.ports],
                scheduling=_strict(SchedulingSpec, entry.scheduling),
                env=entry.env,
                half=None if entry.half is None else _strict(Half, entry.half),
            )
            ready = Ready() if any(info.name == "primary" for info in spec.port_infos) else Ready(port=None)
            pools.append(_pool(file, entry, spec, joins=entry.join is not None, ready=ready))
    return Deployment(
        name=file.fleet,
        pools=tuple(pools),
        backend=file.backend,
        host=file.host,
        gpus=None if file.gpus is None else tuple(file.gpus),
        log_dir=file.log_dir,
        keep_generations=file.keep_generations,
        cluster=file.cluster,
        passphrase_file=beside(file.passphrase_file),
        cert=beside(file.cert),
        key=beside(file.key),
        ca=beside(file.ca),
    )


def _pool(file: _File, section: _Treated, spec: CommandWorkerSpec, *, joins: bool, ready: Ready | None = None) -> Pool:
    default = Ready(port=None) if is_placeholder(spec) else ready or Ready()
    chosen = section.join if section.join is not None else file.join
    return Pool(
        spec=spec,
        ready=default if section.ready is None else _strict(Ready, {**default.model_dump(), **section.ready}),
        restart=_strict(Restart, {**file.restart, **(section.restart or {})}),
        stop=_strict(Stop, {**file.stop, **(section.stop or {})}),
        join=chosen.build() if joins and isinstance(chosen, _JoinSection) else None,
    )


M = TypeVar("M", bound=BaseModel)


def _strict(model: type[M], values: Mapping[str, Any]) -> M:
    return model.model_validate(dict(values))


class _named:  # noqa: N801 - reads like a statement
    """Says which section an error belongs to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValidationError):
            raise ValueError(f"{self._where}:\n{_plainly(error)}") from error
        if isinstance(error, ValueError):
            raise ValueError(f"{self._where}: {error}") from error


def _plainly(error: ValidationError) -> str:
    """One line for each thing that is wrong: field, value, what is expected."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(map(str, _path(item["loc"])))
        words = item["msg"].removeprefix("Value error, ")
        given = item.get("input")
        value = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"  {where + ': ' if where else ''}{words}{value}")
    return "\n".join(lines)


def _path(loc: Sequence[int | str]) -> list[int | str]:
    # pydantic names the members of a union, which no user wrote.
    return [part for part in loc if not (isinstance(part, str) and (part.startswith(("_", "literal["))))]
