"""The backend for a Ray cluster: a placement group for each cell, an actor for each worker."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from pulsing.fleet._deployment import Deployment
from pulsing.fleet._local import owned_ports
from pulsing.fleet._model import HostAndPort, PortInfo
from pulsing.fleet._placement import Cell, Command, Layout, Worker, address, place
from pulsing.fleet._ports import PortTakenError
from pulsing.fleet._processes import CellProcesses, Ending, Order
from pulsing.fleet._ray_worker import RayWorker

# For Ray to find room; more than a cluster needs that has it.
_PLACE_WITHIN = 60.0
_ANSWER_WITHIN = 30.0
# Engines do not live in the actor: it only keeps pipes and ports.
_CPUS_PER_WORKER = 0.1


class RayBackend:
    """Runs a fleet on the Ray cluster that RAY_ADDRESS names, or that runs on this machine.

    Pulsing must be installed on its nodes. Logs are written on the node where a worker runs.
    """

    name = "ray"

    def __init__(self, deployment: Deployment) -> None:
        """
        Raises:
            ValueError: Ray is not installed.
        """
        try:
            import ray
        except ImportError as error:
            raise ValueError("backend ray needs Ray: pip install 'pulsing[ray]'") from error
        self._ray: Any = ray
        self._deployment = deployment
        self._groups: dict[str, Any] = {}
        self._reserved: list[Any] = []
        self._actors: dict[str, Any] = {}

    async def prepare(self) -> Layout:
        """See `Backend`."""
        try:
            return await asyncio.to_thread(self._prepare)
        except self._ray.exceptions.RayTaskError as error:
            raise ValueError(str(error.cause)) from error
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise ValueError(f"Ray: {error}") from error

    async def refresh(self, cell: Cell) -> bool:
        """See `Backend`."""
        return await asyncio.to_thread(self._refresh, cell)

    async def processes(self, cell: Cell, mark: str) -> CellProcesses:
        """See `Backend`."""
        return RayCell(self._ray, [self._actors[worker.label] for worker in cell.workers], mark)

    async def let_bind(self, cell: Cell) -> None:
        """See `Backend`."""
        for info, worker in owned_ports(cell):
            actor = self._actors[worker.label]
            await actor.release_sockets.remote(worker.addrs[info.name].port, info.num_consecutive)

    def environment(self, command: Command) -> dict[str, str]:
        """See `Backend`: only what the spec says, the rest is the node's own."""
        return {**self._deployment.node_settings(), **command.env}

    def join_environment(self) -> dict[str, str]:
        """See `Backend`."""
        own = {key: value for key, value in os.environ.items() if key.startswith("PULSING_") and key != "PULSING_ADDR"}
        return {**own, **self._deployment.node_settings()}

    async def close(self) -> None:
        """See `Backend`."""
        await asyncio.to_thread(self._close)

    def _prepare(self) -> Layout:
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, logging_level="warning")
        layout = place(self._deployment, None)
        shapes = {pool.spec.name: pool.spec.scheduling for pool in self._deployment.pools}
        started = {cell.pool.spec.name for cell in layout.cells}
        for pool, shape in shapes.items():
            if pool not in started:
                # A placeholder: its GPUs are kept and nothing is started.
                self._reserved += [
                    self._reserve(pool, shape.whole_gpus_per_worker(), shape.num_workers_per_cell)
                    for _ in range(shape.num_cells)
                ]
        for cell in layout.cells:
            gpus = cell.pool.spec.scheduling.whole_gpus_per_worker()
            self._groups[cell.name] = self._reserve(cell.name, gpus, len(cell.workers))
        for cell in layout.cells:
            for worker in cell.workers:
                self._create(cell, worker)
        hosts: dict[str, str] = {}
        for cell in layout.cells:
            for worker in cell.workers:
                hosts[worker.label] = self._locate(worker)
        for cell in layout.cells:
            address(cell, lambda worker, info: self._allocate(worker, info, hosts[worker.label]))
        return layout

    def _reserve(self, what: str, gpus: int, workers: int) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle: dict[str, float] = {"CPU": _CPUS_PER_WORKER}
        if gpus:
            bundle["GPU"] = gpus
        group = placement_group([bundle] * workers, strategy="PACK")
        if not group.wait(_PLACE_WITHIN):
            remove_placement_group(group)
            has = self._ray.cluster_resources()
            raise ValueError(
                f"{what}: Ray found no room for {workers} x {bundle} within {_PLACE_WITHIN:g} s; the whole cluster has"
                f" {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs"
            )
        return group

    def _create(self, cell: Cell, worker: Worker) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[cell.name],
            placement_group_bundle_index=worker.index,
            placement_group_capture_child_tasks=True,
        )
        remote = self._ray.remote(RayWorker).options(
            num_cpus=_CPUS_PER_WORKER,
            num_gpus=cell.pool.spec.scheduling.whole_gpus_per_worker(),
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        self._actors[worker.label] = remote.remote()

    def _locate(self, worker: Worker) -> str:
        host, worker.gpu_ids = self._get(self._actors[worker.label].where.remote(), _PLACE_WITHIN)
        return str(host)

    def _allocate(self, worker: Worker, info: PortInfo, host: str) -> HostAndPort:
        actor = self._actors[worker.label]
        if info.allow_dynamic:
            port = self._get(actor.dynamic.remote(info.num_consecutive))
        else:
            port = self._get(actor.fixed.remote(info.fixed_port(worker.cell_index), info.num_consecutive))
        return HostAndPort(host=host, port=port)

    def _refresh(self, cell: Cell) -> bool:
        moved = False
        for worker in cell.workers:
            mine = [info for info, owner in owned_ports(cell) if owner is worker]
            try:
                host = self._locate(worker)
                lost = False
            except self._ray.exceptions.RayActorError:
                self._create(cell, worker)
                host = self._locate(worker)
                lost = True
            actor = self._actors[worker.label]
            for info in mine:
                held = worker.addrs[info.name].port
                if not lost:
                    if self._get(actor.rehold.remote(held, info.num_consecutive)):
                        continue
                    self._get(actor.release.remote(held, info.num_consecutive))
                fresh = self._allocate(worker, info, host)
                for other in cell.workers if info.mode == "master" else (worker,):
                    other.addrs[info.name] = fresh
                moved = moved or not lost
        return moved

    def _get(self, ref: Any, timeout: float = _ANSWER_WITHIN) -> Any:
        try:
            return self._ray.get(ref, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError as error:
            raise RuntimeError(f"Ray: an actor did not answer within {timeout:g} s") from error
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PortTakenError):
                raise error.cause from error
            raise

    def _close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if not self._ray.is_initialized():
            return
        for actor in self._actors.values():
            self._ray.kill(actor)
        for group in (*self._groups.values(), *self._reserved):
            remove_placement_group(group)
        self._actors, self._groups, self._reserved = {}, {}, []


class RayCell:
    """One start of a cell: `CellProcesses` over its workers' actors."""

    def __init__(self, ray: Any, actors: Sequence[Any], mark: str) -> None:
        self._ray = ray
        self._actors = list(actors)
        self._mark = mark
        self._end: asyncio.Task[Ending] | None = None
        self._limits = (0.0, 5.0)

    async def start(self, orders: Sequence[Order]) -> dict[str, int]:
        """See `CellProcesses`."""
        started = await asyncio.gather(
            *(_call(actor.start.remote(order, self._mark)) for actor, order in zip(self._actors, orders, strict=True)),
            return_exceptions=True,
        )
        problem = next((one for one in started if isinstance(one, BaseException)), None)
        if problem is not None:
            await self._stop_all(0.0, 5.0)
            raise RuntimeError(self._words(problem)) from problem
        self._end = asyncio.create_task(self._until_gone(), name="fleet-ray-cell")
        return {order.id: pid for order, pid in zip(orders, started, strict=True) if isinstance(pid, int)}

    async def start_join(self, order: Order) -> None:
        """See `CellProcesses`."""
        try:
            await self._actors[0].start_join.remote(order)
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(self._words(error)) from error

    async def join_ended(self) -> int:
        """See `CellProcesses`."""
        try:
            return int(await self._actors[0].join_ended.remote())
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(self._words(error)) from error

    async def gone(self) -> Ending:
        """See `CellProcesses`."""
        if self._end is None:
            return Ending("it was not started")
        return await asyncio.shield(self._end)

    async def stop(self, drain: float, term: float) -> None:
        """See `CellProcesses`."""
        # Worker 0 leaves the cluster and lets its requests end; the others must serve with it until then.
        first, rest = self._actors[:1], self._actors[1:]
        if not rest:
            await self._stop_all(drain, term)
        else:
            self._limits = (0.0, term)
            await asyncio.gather(_quiet(first[0].stop.remote(drain, term)))
            await self._stop_all(0.0, term)
        await self.gone()

    async def _until_gone(self) -> Ending:
        ends = [asyncio.ensure_future(_call(actor.gone.remote())) for actor in self._actors]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        first = next(end for end in ends if end.done())
        error = first.exception()
        reason = self._words(error) if error is not None else first.result()
        await self._stop_all(*self._limits)
        await asyncio.wait(ends)
        return Ending(reason)

    async def _stop_all(self, drain: float, term: float) -> None:
        await asyncio.gather(*(_quiet(actor.stop.remote(drain, term)) for actor in self._actors))

    def _words(self, error: BaseException) -> str:
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return str(error.cause)
        return f"Ray: {str(error).splitlines()[0]}"


async def _call(ref: Any) -> Any:
    return await ref


async def _quiet(ref: Any) -> None:
    """A dead actor has nothing left to stop: its guardian ended with its pipe."""
    await asyncio.gather(_call(ref), return_exceptions=True)
