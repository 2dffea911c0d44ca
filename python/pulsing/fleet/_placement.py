"""From a fleet to what runs where: place all, know all addresses, then render all commands."""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pulsing.fleet._deployment import Deployment, Pool
from pulsing.fleet._engines import is_placeholder
from pulsing.fleet._model import HostAndPort, LaunchCommandContext, NamedHostAndPorts, PortInfo


@dataclass
class Worker:
    """One process of a cell, placed."""

    pool: Pool
    cell_index: int
    index: int
    gpu_ids: tuple[int, ...] = ()
    addrs: NamedHostAndPorts = field(default_factory=dict)

    @property
    def label(self) -> str:
        """`pool/cell/worker`."""
        return f"{self.pool.spec.name}/{self.cell_index}/{self.index}"


@dataclass(frozen=True)
class Command:
    """A worker's command, rendered."""

    worker: Worker
    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class Cell:
    """What starts, stops and fails as one."""

    pool: Pool
    index: int
    workers: tuple[Worker, ...]

    @property
    def name(self) -> str:
        """`pool/cell`."""
        return f"{self.pool.spec.name}/{self.index}"


# (worker, port) -> where it is; called for each port a worker has of its own.
Allocate = Callable[[Worker, PortInfo], HostAndPort]


@dataclass(frozen=True)
class Layout:
    """A whole fleet, placed. Addresses are those of the moment: a restart may change them."""

    cells: tuple[Cell, ...]

    def context(self, worker: Worker) -> LaunchCommandContext:
        """What the worker's command may know."""
        spec_addrs: dict[str, list[NamedHostAndPorts]] = {}
        for cell in self.cells:
            spec_addrs.setdefault(cell.pool.spec.name, []).extend(dict(one.addrs) for one in cell.workers)
        return LaunchCommandContext(
            cell_index=worker.cell_index,
            worker_in_cell_index=worker.index,
            self_addrs=dict(worker.addrs),
            spec_addrs=spec_addrs,
            gpu_ids=worker.gpu_ids,
        )

    def commands(self, cell: Cell) -> tuple[Command, ...]:
        """The commands of a cell's workers.

        Raises:
            ValueError: one cannot be rendered.
        """
        rendered = []
        for worker in cell.workers:
            context = self.context(worker)
            rendered.append(Command(worker, worker.pool.spec.command(context), worker.pool.spec.environment(context)))
        return tuple(rendered)

    def join_argv(self, cell: Cell) -> tuple[str, ...] | None:
        """The command by which the cell joins a cluster; None: it does not."""
        ready = cell.pool.ready.port
        if cell.pool.join is None or ready is None:
            return None
        return cell.pool.join.argv(self.context(cell.workers[0]), ready, cell.pool.stop.drain, cell.pool.spec.half)

    def join_target(self, cell: Cell) -> tuple[str, str, str] | None:
        """(seeds, name, url) under which the cluster shows the cell once it has joined; None: it shows nothing."""
        join, port = cell.pool.join, cell.pool.ready.port
        if join is None or port is None or not join.observed:
            return None
        context = self.context(cell.workers[0])
        return join.seeds_for(context), join.name, context.own(port).url


def place(deployment: Deployment, gpus: Sequence[int] | None) -> Layout:
    """Gives each worker its GPUs. A placeholder keeps GPUs and has no cells.

    Args:
        deployment: the fleet.
        gpus: physical ids to hand out; None leaves GPUs to the backend.

    Raises:
        ValueError: there are not enough.
    """
    free = list(gpus) if gpus is not None else []
    needed = sum(
        pool.spec.scheduling.whole_gpus_per_worker() * pool.spec.scheduling.num_workers for pool in deployment.pools
    )
    if gpus is not None and needed > len(free):
        raise ValueError(f"fleet {deployment.name} needs {needed} GPUs, and this machine offers {len(free)}: {free}")
    cells = []
    for pool in deployment.pools:
        shape = pool.spec.scheduling
        each = shape.whole_gpus_per_worker() if gpus is not None else 0
        for cell_index in range(shape.num_cells):
            workers = []
            for index in range(shape.num_workers_per_cell):
                mine, free = tuple(free[:each]), free[each:]
                workers.append(Worker(pool, cell_index, index, mine))
            if not is_placeholder(pool.spec):
                cells.append(Cell(pool, cell_index, tuple(workers)))
    return Layout(tuple(cells))


def address(cell: Cell, allocate: Allocate) -> None:
    """Gives the cell's workers their addresses; ports of mode `master` are worker 0's and shown to all."""
    for info in cell.pool.spec.port_infos:
        if info.mode == "master":
            shared = allocate(cell.workers[0], info)
            for worker in cell.workers:
                worker.addrs[info.name] = shared
        else:
            for worker in cell.workers:
                worker.addrs[info.name] = allocate(worker, info)


def static_addresses(host: str) -> Allocate:
    """Addresses without asking a machine: the first worker that may move gets the static port, each next one the
    following, so that no two are the same."""
    used: Counter[int] = Counter()

    def allocate(worker: Worker, info: PortInfo) -> HostAndPort:
        port = info.fixed_port(worker.cell_index)
        if info.allow_dynamic:
            shifted = port + used[info.static_port]
            used[info.static_port] += info.num_consecutive
            port = min(shifted, 65535)
        return HostAndPort(host=host, port=port)

    return allocate


def local_gpus(deployment: Deployment) -> list[int]:
    """Physical ids of the GPUs the local backend may hand out.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES does not name them by number.
    """
    if deployment.gpus is not None:
        return list(deployment.gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        found = (re.fullmatch(r"/dev/nvidia(\d+)", path) for path in glob.glob("/dev/nvidia*"))
        return sorted(int(match.group(1)) for match in found if match)
    words = [word.strip() for word in visible.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}: GPUs are handed out by number; set `gpus` of the fleet instead"
        )
    return [int(word) for word in words]


def rendered_statically(deployment: Deployment) -> Layout:
    """The fleet with addresses that no machine was asked for, and GPU ids counted from 0 where none are named."""
    needed = sum(
        pool.spec.scheduling.whole_gpus_per_worker() * pool.spec.scheduling.num_workers for pool in deployment.pools
    )
    layout = place(deployment, deployment.gpus if deployment.gpus is not None else range(needed))
    allocate = static_addresses(deployment.host)
    for cell in layout.cells:
        address(cell, allocate)
    return layout
