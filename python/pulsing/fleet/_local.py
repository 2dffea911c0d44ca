"""The backend for one machine: processes below a guardian for each cell."""

import os
import pathlib
import shutil
import sys
from collections.abc import Mapping

from pulsing.fleet._commands import how_to_get
from pulsing.fleet._deployment import Deployment
from pulsing.fleet._model import HostAndPort, PortInfo
from pulsing.fleet._placement import Cell, Command, Layout, Worker, address, local_gpus, place
from pulsing.fleet._ports import PortHolder
from pulsing.fleet._processes import CellProcesses, GuardedCell

# Of an engine that lost a part nothing is worth waiting for long.
_CRASH_TERM = 5.0


class LocalBackend:
    """Runs a fleet on this machine. Linux; elsewhere processes that leave their group may outlive the launcher."""

    name = "local"

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._holder = PortHolder(deployment.host)

    async def prepare(self) -> Layout:
        """See `Backend`."""
        layout = place(self._deployment, local_gpus(self._deployment))
        for cell in layout.cells:
            address(cell, self._allocate)
        missing = sorted(
            {command.argv[0] for cell in layout.cells for command in layout.commands(cell)} - _found(layout)
        )
        if missing:
            raise ValueError("\n".join(how_to_get(program) for program in missing))
        return layout

    async def refresh(self, cell: Cell) -> bool:
        """See `Backend`."""
        moved = False
        for info, worker in owned_ports(cell):
            held = worker.addrs[info.name]
            if self._holder.rehold(held.port, info.num_consecutive):
                continue
            self._holder.release(held.port, info.num_consecutive)
            fresh = self._allocate(worker, info)
            for other in cell.workers if info.mode == "master" else (worker,):
                other.addrs[info.name] = fresh
            moved = True
        return moved

    async def processes(self, cell: Cell, mark: str) -> CellProcesses:
        """See `Backend`."""
        return GuardedCell(mark, min(_CRASH_TERM, cell.pool.stop.term))

    async def let_bind(self, cell: Cell) -> None:
        """See `Backend`."""
        for info, worker in owned_ports(cell):
            self._holder.release_sockets(worker.addrs[info.name].port, info.num_consecutive)

    def environment(self, command: Command) -> dict[str, str]:
        """See `Backend`."""
        return worker_environment(command, self._deployment.node_settings())

    def join_environment(self) -> dict[str, str]:
        """See `Backend`."""
        env = {**os.environ, "PATH": search_path(), **self._deployment.node_settings()}
        # One address for several EngineWorkers; theirs are any free ones.
        env.pop("PULSING_ADDR", None)
        return env

    async def close(self) -> None:
        """See `Backend`."""
        self._holder.close()

    def _allocate(self, worker: Worker, info: PortInfo) -> HostAndPort:
        if info.allow_dynamic:
            port = self._holder.dynamic(info.num_consecutive)
        else:
            port = self._holder.fixed(info.fixed_port(worker.cell_index), info.num_consecutive)
        return HostAndPort(host=self._deployment.host, port=port)


def worker_environment(command: Command, settings: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment, and on top of it the fleet's settings and what the spec says.

    A worker with GPUs does not inherit CUDA_VISIBLE_DEVICES: ids are physical ones, and with a mask the engine would
    count from another start.
    """
    env = dict(os.environ)
    if command.worker.gpu_ids:
        env.pop("CUDA_VISIBLE_DEVICES", None)
    env["PATH"] = search_path()
    env.update(settings)
    env.update(command.env)
    return env


def search_path() -> str:
    """PATH with this interpreter's programs first, so that `python3`, `pulsing` and engines beside it are found."""
    own = str(pathlib.Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    return path if path.split(os.pathsep, 1)[0] == own else f"{own}{os.pathsep}{path}"


def _found(layout: Layout) -> set[str]:
    programs = set()
    for cell in layout.cells:
        for command in layout.commands(cell):
            path = command.env.get("PATH", search_path())
            if shutil.which(command.argv[0], path=path):
                programs.add(command.argv[0])
    return programs


def owned_ports(cell: Cell) -> list[tuple[PortInfo, Worker]]:
    """Each port of a cell once, with the worker it belongs to."""
    owned = []
    for info in cell.pool.spec.port_infos:
        owned += [(info, worker) for worker in (cell.workers[:1] if info.mode == "master" else cell.workers)]
    return owned
