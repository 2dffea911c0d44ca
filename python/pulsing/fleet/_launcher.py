"""Runs a fleet: all cells of a deployment, until told to stop."""

import asyncio
import contextlib
import logging
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

from pulsing.fleet import _leftovers
from pulsing.fleet._cell import Backend, CellRun
from pulsing.fleet._deployment import Deployment
from pulsing.fleet._join import Onlooker
from pulsing.fleet._local import LocalBackend
from pulsing.fleet._status import CellStatus, FleetDir, as_json, new_run_id

_log = logging.getLogger("pulsing.fleet")


class FleetRunningError(Exception):
    """Another launcher runs a fleet of that name."""


def backend_for(deployment: Deployment) -> Backend:
    """The deployment's backend.

    Raises:
        ValueError: it is not installed; says what to install.
    """
    if deployment.backend == "ray":
        from pulsing.fleet._ray import RayBackend

        return RayBackend(deployment)
    return LocalBackend(deployment)


def _rotate(log_dir: pathlib.Path) -> None:
    """The run before keeps its logs, one run long: they may say why it is no more."""
    if log_dir.is_dir():
        previous = log_dir.with_name(log_dir.name + ".previous")
        with contextlib.suppress(OSError):
            shutil.rmtree(previous, ignore_errors=True)
            log_dir.rename(previous)


def _writable(log_dir: pathlib.Path) -> None:
    """Makes the directory, and a file in it: no restart of a cell would help where that does not work."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(log_dir)) from error


class Launcher:
    """One run of a fleet.

    ::

        launcher = Launcher(deployment)
        await launcher.start()
        await launcher.wait_ready()
        ...
        await launcher.stop()
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        state_root: pathlib.Path | None = None,
        file: str | None = None,
        on_change: Callable[[CellStatus], None] | None = None,
    ) -> None:
        """
        Args:
            deployment: what to run.
            state_root: where fleets keep their state; `$PULSING_FLEET_DIR`, else the user's state directory.
            file: where the deployment was read from, for `pulsing fleet ps`.
            on_change: told of each change of a cell.
        """
        self.deployment = deployment
        self.dir = FleetDir(deployment.name, state_root)
        self.run_id = new_run_id(deployment.name)
        self._file = file
        self._on_change = on_change
        self._backend: Backend | None = None
        self._runs: list[CellRun] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started = time.time()
        self._changed = asyncio.Condition()
        self._wakers: set[asyncio.Task[None]] = set()
        self._stop_called = False
        self.killed_leftovers: list[int] = []

    @property
    def log_dir(self) -> pathlib.Path:
        """Where the logs of this run go."""
        chosen = self.deployment.log_dir
        return (pathlib.Path(chosen, self.deployment.name) if chosen else self.dir.path / "logs").absolute()

    @property
    def cells(self) -> list[CellStatus]:
        """All cells, in the deployment's order."""
        return [run.status for run in self._runs]

    async def start(self) -> None:
        """Places the fleet, learns every address, renders every command, and then starts all cells.

        Raises:
            FleetRunningError: it runs already.
            ValueError: the deployment cannot run here.
            PortTakenError: a fixed port is not free.
            OSError: the state directory, or that of the logs, cannot be written.
        """
        try:
            before = self.dir.acquire()
        except BlockingIOError:
            pid = (self.dir.read() or {}).get("pid", "?")
            raise FleetRunningError(f"fleet {self.deployment.name} runs already, launched by pid {pid}") from None
        try:
            if before is not None and isinstance(before.get("run"), str):
                # An earlier launcher and its guardians may both have been killed.
                self.killed_leftovers = await asyncio.to_thread(
                    _leftovers.kill, f"{before['run']}:", _leftovers.logs_of(before)
                )
            backend = self._backend = backend_for(self.deployment)
            onlooker = Onlooker(backend.join_environment())
            layout = await backend.prepare()
            if not layout.cells:
                raise ValueError(f"fleet {self.deployment.name} starts nothing: all its pools are placeholders")
            for cell in layout.cells:
                layout.commands(cell)
                layout.join_argv(cell)
            _rotate(self.log_dir)
            _writable(self.log_dir)
        except BaseException:
            if self._backend is not None:
                await self._backend.close()
            self.dir.release()
            raise
        self._runs = [
            CellRun(
                cell, layout, backend, self.run_id, self.log_dir, self.deployment.keep_generations, onlooker, self._note
            )
            for cell in layout.cells
        ]
        self._write()
        for run in self._runs:
            self._tasks[run.cell.name] = asyncio.create_task(run.run(), name=f"fleet-{run.cell.name}")

    async def wait(self) -> None:
        """Until every cell has stopped or failed.

        Raises:
            Exception: what ended a cell's task, if it was no engine's doing.
        """
        await asyncio.gather(*self._tasks.values())

    async def wait_ready(self) -> None:
        """Until every cell is ready.

        Raises:
            RuntimeError: one has failed for good; says why.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    all(cell.state == "ready" for cell in self.cells)
                    or any(cell.state == "failed" for cell in self.cells)
                )
            )
        for cell in self.cells:
            if cell.state == "failed":
                raise RuntimeError("\n  ".join([f"cell {cell.name}: {cell.reason}", *cell.last_words]))

    async def stop(self, *, drain: float | None = None, term: float | None = None) -> None:
        """Stops all cells: first those that joined a cluster, so that a Router here can finish their requests.

        Args:
            drain: upper bound in seconds for leaving the cluster.
            term: upper bound in seconds between SIGTERM and SIGKILL.
        """
        if self._stop_called:
            await asyncio.gather(*(run.stop(drain, term) for run in self._runs))
            return
        self._stop_called = True
        first = [run for run in self._runs if run.cell.pool.join is not None]
        rest = [run for run in self._runs if run.cell.pool.join is None]
        for group in (first, rest):
            await asyncio.gather(*(run.stop(drain, term) for run in group))
            await asyncio.gather(*(self._tasks[run.cell.name] for run in group), return_exceptions=True)

    async def close(self) -> None:
        """After `stop` or `wait`: gives back ports and the fleet's name."""
        if self._backend is not None:
            await self._backend.close()
        self._write()
        self.dir.release()

    def _note(self, status: CellStatus) -> None:
        self._write()
        if self._on_change is not None:
            self._on_change(status)
        waker = asyncio.get_running_loop().create_task(self._wake())
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _write(self) -> None:
        snapshot = {
            "fleet": self.deployment.name,
            "run": self.run_id,
            "pid": os.getpid(),
            "file": self._file,
            "backend": self.deployment.backend,
            "started": self._started,
            "cells": [as_json(run.status) for run in self._runs],
        }
        try:
            self.dir.write(snapshot)
        except OSError as error:
            # A full disk takes the view of the fleet away, not the fleet.
            _log.warning("fleet %s: its state cannot be written: %s", self.deployment.name, error)
