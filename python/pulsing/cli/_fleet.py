"""`pulsing fleet`: engines, routers and other commands, launched from one file."""

import asyncio
import contextlib
import json
import os
import pathlib
import shlex
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulsing.cli._errors import CliError, FailureError, MisuseError, nearest
from pulsing.cli._logging import to_stderr
from pulsing.cli._settings import option
from pulsing.cli._table import table
from pulsing.core._shown import shown

if TYPE_CHECKING:
    from pulsing.fleet import Deployment
    from pulsing.fleet._status import CellStatus, FleetDir

app = typer.Typer(
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Launch engines, routers and other commands from one file (YAML, or Python).",
)

File = Annotated[str | None, typer.Argument(metavar="FILE", help="A .yaml or .py fleet file.")]
StateDir = Annotated[
    str | None,
    typer.Option(
        "--state_dir",
        metavar="DIR",
        help="Where fleets keep state and logs. Default: $PULSING_FLEET_DIR, else ~/.local/state/pulsing/fleet.",
    ),
]
Json = Annotated[bool, typer.Option("--json_output", "--json", help="Print JSON and nothing else.")]
# Beyond a cell's own limits: for the launcher to notice and to write its last snapshot.
_DOWN_SLACK = 15.0


@app.callback(invoke_without_command=True)
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise MisuseError(f"a command is missing\n{ctx.get_usage()}\nTry 'pulsing fleet --help'.")


@app.command(
    help="Print what would run; starts nothing. Ports that `up` chooses are shown counted from their static one."
)
def render(file: File = None, json_output: Json = False) -> None:
    from pulsing.fleet._placement import rendered_statically

    deployment = _deployment(file)
    cells: list[dict[str, Any]] = []
    with _misuse(file):
        layout = rendered_statically(deployment)
        for cell in layout.cells:
            workers = [
                {"gpus": list(one.worker.gpu_ids), "env": one.env, "argv": list(one.argv)}
                for one in layout.commands(cell)
            ]
            join = layout.join_argv(cell)
            cells.append({"cell": cell.name, "workers": workers, "join": None if join is None else list(join)})
    if json_output:
        typer.echo(json.dumps({"fleet": deployment.name, "backend": deployment.backend, "cells": cells}))
        return
    for entry in cells:
        for index, worker in enumerate(entry["workers"]):
            gpus = ",".join(map(str, worker["gpus"]))
            typer.echo(f"# {entry['cell']}/{index}" + (f"  GPUs {gpus}" if gpus else ""))
            env = [f"{key}={shlex.quote(value)}" for key, value in worker["env"].items()]
            typer.echo(" ".join([*env, shlex.join(worker["argv"])]))
        if entry["join"] is not None:
            typer.echo(f"# {entry['cell']} joins, once it is ready")
            typer.echo(shlex.join(entry["join"]))


@app.command(
    help="Start the fleet and keep it running until SIGTERM or Ctrl-C (a second one cuts the draining short). "
    "Ends with 1 when every cell has been given up."
)
def up(
    file: File = None,
    state_dir: StateDir = None,
    passphrase_file: Annotated[
        str | None, option("passphrase_file", "The cluster's secret, for the fleet's Routers and EngineWorkers.")
    ] = None,
    cert: Annotated[str | None, option("cert", "PEM file of their certificate, in place of a secret.")] = None,
    key: Annotated[str | None, option("key")] = None,
    ca: Annotated[str | None, option("ca")] = None,
    cluster: Annotated[str | None, option("cluster", "The cluster that they form, or join.")] = None,
) -> None:
    from pulsing.fleet import FleetRunningError, Launcher, PortTakenError

    files = {"passphrase_file": passphrase_file, "cert": cert, "key": key, "ca": ca}
    given = {**{name: _absolute(file) for name, file in files.items()}, "cluster": cluster}
    deployment = _deployment(file).model_copy(update={key: value for key, value in given.items() if value is not None})

    said: dict[str, str] = {}

    def say(cell: "CellStatus") -> None:
        parts = [cell.name, f"g{cell.generation}", cell.state]
        if cell.joined is not None and cell.state == "ready":
            parts.append("joined" if cell.joined else "not joined")
        text = " ".join(parts) + (f": {cell.reason}" if cell.reason else "")
        if said.get(cell.name) != text:
            said[cell.name] = text
            to_stderr("\n".join([text, *(f"  | {line}" for line in cell.last_words)]))

    async def run() -> int:
        launcher = Launcher(deployment, state_root=_root_of(state_dir), file=_absolute(file), on_change=say)
        loop = asyncio.get_running_loop()
        stopping: list[asyncio.Task[None]] = []

        def on_signal() -> None:
            limits: dict[str, float] = {"drain": 0.0, "term": 0.5} if stopping else {}
            stopping.append(loop.create_task(launcher.stop(**limits)))

        await launcher.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            if launcher.killed_leftovers:
                to_stderr(f"killed {len(launcher.killed_leftovers)} processes that an earlier run left behind")
            to_stderr(f"fleet {deployment.name}: {len(launcher.cells)} cells; logs below {launcher.log_dir}")
            await launcher.wait()
            await asyncio.gather(*stopping)
        finally:
            await launcher.stop(drain=0.0)
            await launcher.close()
        failed = [cell for cell in launcher.cells if cell.state == "failed"]
        if failed and not stopping:
            words = [f"  {cell.name}: {cell.reason}; logs: {', '.join(cell.logs.values())}" for cell in failed]
            told = ["\n    | ".join([text, *cell.last_words]) for text, cell in zip(words, failed, strict=True)]
            raise FailureError("\n".join(["every cell has ended:", *told]))
        return 0

    try:
        asyncio.run(run())
    except (FleetRunningError, PortTakenError, ValueError) as error:
        raise FailureError(str(error)) from error
    except OSError as error:
        raise FailureError(f"fleet {deployment.name}: {error}") from error


@app.command(help="Show the fleet's cells. Ends with 1 when it does not run, or a cell has been given up.")
def ps(file: File = None, state_dir: StateDir = None, json_output: Json = False) -> None:
    deployment = _deployment(file)
    place = _dir(deployment, state_dir)
    snapshot = place.read()
    if snapshot is None:
        raise FailureError(f"fleet {deployment.name} has never run here ({place.path})")
    running = place.running()
    if json_output:
        typer.echo(json.dumps({**snapshot, "running": running}))
    else:
        _table(snapshot, running)
    if not running:
        raise FailureError(
            f"fleet {deployment.name} does not run; this is what its launcher, pid {snapshot['pid']}, saw last"
        )
    failed = [cell for cell in snapshot["cells"] if cell["state"] == "failed"]
    if failed:
        words = ["\n    | ".join([f"  {cell['name']}: {cell['reason']}", *cell["last_words"]]) for cell in failed]
        raise FailureError("\n".join([f"given up: {', '.join(cell['name'] for cell in failed)}", *words]))


@app.command(help="Print the logs of the fleet's cells, of all or of one: POOL, POOL/CELL or POOL/CELL/WORKER.")
def logs(
    file: File = None,
    cell: Annotated[str | None, typer.Argument(metavar="CELL", help="Whose logs; all by default.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last lines of each log.")] = None,
    all_generations: Annotated[
        bool, typer.Option("--all_generations", help="Also those of earlier starts that are kept.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    deployment = _deployment(file)
    place = _dir(deployment, state_dir)
    snapshot = place.read()
    if snapshot is None:
        raise FailureError(f"fleet {deployment.name} has never run here ({place.path})")
    chosen: list[tuple[str, pathlib.Path]] = []
    for entry in snapshot["cells"]:
        for who, path in entry["logs"].items():
            label = f"{entry['name']}/{who}"
            if cell is None or label == cell or label.startswith(cell + "/"):
                chosen += [(label, one) for one in _generations(pathlib.Path(path), all_generations)]
    if not chosen and cell is not None:
        names = [entry["name"] for entry in snapshot["cells"]]
        known = ", ".join(names)
        raise MisuseError(f"no cell {shown(cell)} with a log{nearest(cell, names)}\nCells: {known}.")
    for label, path in chosen:
        try:
            lines = path.read_bytes().decode(errors="replace").splitlines()
        except OSError as error:
            raise FailureError(f"log of {label}: {path}: {error.strerror}") from error
        generation = path.name.rpartition(".")[0].rpartition(".")[2]
        for line in lines if tail is None else lines[max(0, len(lines) - tail) :]:
            typer.echo(f"{label} {generation} | {line}")


@app.command(help="Stop the fleet: cells leave their cluster, get SIGTERM, then SIGKILL. Waits until nothing is left.")
def down(
    file: File = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0, help="How long to wait. Default: what the file allows its cells."
        ),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    from pulsing.fleet import _leftovers

    deployment = _deployment(file)
    place = _dir(deployment, state_dir)
    snapshot = place.read()
    if snapshot is None or not place.running():
        killed = _leftovers.kill(f"{snapshot['run']}:", _leftovers.logs_of(snapshot)) if snapshot is not None else []
        to_stderr(
            f"fleet {deployment.name} does not run"
            + (f"; killed {len(killed)} processes it left behind" if killed else "")
        )
        return
    limit = max(pool.stop.drain + pool.stop.term for pool in deployment.pools) * 2 + _DOWN_SLACK
    deadline = time.monotonic() + (limit if timeout is None else timeout)
    with contextlib.suppress(ProcessLookupError):
        # The lock is held, so this pid is the launcher's.
        os.kill(int(snapshot["pid"]), signal.SIGTERM)
    while place.running():
        if time.monotonic() > deadline:
            raise FailureError(
                f"fleet {deployment.name} still runs, launched by pid {snapshot['pid']}; see pulsing fleet ps"
            )
        time.sleep(0.05)
    left = _leftovers.find(f"{snapshot['run']}:", _leftovers.logs_of(snapshot))
    if left:
        raise FailureError(f"fleet {deployment.name}: processes are left: {', '.join(map(str, left))}")
    to_stderr(f"fleet {deployment.name} is down")


def _absolute(file: str | None) -> str | None:
    return None if file is None else str(pathlib.Path(file).absolute())


def _root_of(state_dir: str | None) -> pathlib.Path | None:
    return None if state_dir is None else pathlib.Path(state_dir)


def _dir(deployment: "Deployment", state_dir: str | None) -> "FleetDir":
    from pulsing.fleet._status import FleetDir

    return FleetDir(deployment.name, _root_of(state_dir))


def _deployment(file: str | None) -> "Deployment":
    if file is None:
        raise MisuseError("FILE is missing, as in: pulsing fleet up fleet.yaml")
    from pulsing.fleet import FleetFileError, load

    try:
        return load(pathlib.Path(file))
    except FleetFileError as error:
        raise MisuseError(str(error)) from error


@contextlib.contextmanager
def _misuse(file: str | None) -> Iterator[None]:
    try:
        yield
    except CliError:
        raise
    except ValueError as error:
        raise MisuseError(f"{file}: {error}") from error


def _table(snapshot: dict[str, Any], running: bool) -> None:
    rows = [("CELL", "STATE", "JOINED", "GEN", "RESTARTS", "SINCE", "PIDS", "ADDRESS", "REASON")]
    for cell in snapshot["cells"]:
        joined = {None: "-", True: "yes", False: "no"}[cell["joined"]]
        first = cell["addrs"].get("0", {})
        rows.append(
            (
                cell["name"],
                cell["state"] if running else f"{cell['state']}?",
                joined,
                str(cell["generation"]),
                str(cell["restarts"]),
                f"{max(0, time.time() - cell['since']):.0f}s",
                ",".join(map(str, cell["pids"].values())) or "-",
                first.get("primary") or next(iter(first.values()), "-"),
                cell["reason"],
            )
        )
    for line in table(rows):
        typer.echo(line)


def _generations(path: pathlib.Path, all_of_them: bool) -> list[pathlib.Path]:
    if not all_of_them:
        return [path]
    stem = path.name.rpartition(".g")[0]
    found = [one for one in path.parent.glob(f"{stem}.g*.log") if one.name[len(stem) + 2 : -4].isdigit()]
    return sorted(found, key=lambda one: int(one.name[len(stem) + 2 : -4]))
