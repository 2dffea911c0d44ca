"""What runs in a Ray actor for each worker: its ports and its guardian, on the node where Ray placed it."""

import asyncio
import os
import pathlib
import shutil
from dataclasses import replace
from typing import Any

from pulsing.fleet import _leftovers
from pulsing.fleet._local import search_path
from pulsing.fleet._ports import PortHolder
from pulsing.fleet._processes import GuardedCell, Order


class RayWorker:
    """One worker of a cell. Its guardian sees the actor's process end, so nothing outlives the actor.

    All methods are coroutines: Ray runs them on one loop, where `gone` may wait while others answer.
    """

    def __init__(self) -> None:
        self._holder = PortHolder("0.0.0.0")
        self._guarded: GuardedCell | None = None

    async def where(self) -> tuple[str, tuple[int, ...]]:
        """(address of the node, physical ids of the GPUs that Ray gave)."""
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if not all(one.isdigit() for one in ids):
            raise ValueError(f"Ray names this node's GPUs {ids}; only numbers can be handed out")
        util: Any = ray.util
        return str(util.get_node_ip_address()), tuple(map(int, ids))

    async def dynamic(self, count: int) -> int:
        """See `PortHolder.dynamic`."""
        return self._holder.dynamic(count)

    async def fixed(self, port: int, count: int) -> int:
        """See `PortHolder.fixed`."""
        return self._holder.fixed(port, count)

    async def rehold(self, port: int, count: int) -> bool:
        """See `PortHolder.rehold`."""
        return self._holder.rehold(port, count)

    async def release(self, port: int, count: int) -> None:
        """See `PortHolder.release`."""
        self._holder.release(port, count)

    async def release_sockets(self, port: int, count: int) -> None:
        """See `PortHolder.release_sockets`."""
        self._holder.release_sockets(port, count)

    async def start(self, order: Order, mark: str) -> int:
        """Starts the worker's command; gives its pid."""
        # If the actor before this one was killed, its guardian may still be ending the last generation.
        cell, _, generation = mark.rpartition(":")
        if int(generation) > 1:
            await asyncio.to_thread(_leftovers.kill, f"{cell}:{int(generation) - 1}")
        guarded = GuardedCell(mark)
        pids = await guarded.start([self._complete(order)])
        self._guarded = guarded
        return pids[order.id]

    async def start_join(self, order: Order) -> None:
        """Starts the join process beside the worker."""
        if self._guarded is None:
            raise RuntimeError("the cell is gone")
        await self._guarded.start_join(self._complete(order))

    async def join_ended(self) -> int:
        """See `CellProcesses.join_ended`."""
        if self._guarded is None:
            # Nothing was started: there is no end to wait for.
            await asyncio.Event().wait()
            return 0
        return await self._guarded.join_ended()

    async def gone(self) -> str:
        """Waits until nothing is left; gives the reason."""
        if self._guarded is None:
            return "it was not started"
        return (await self._guarded.gone()).reason

    async def stop(self, drain: float, term: float) -> None:
        """Stops, and waits until nothing is left."""
        if self._guarded is not None:
            await self._guarded.stop(drain, term)

    def _complete(self, order: Order) -> Order:
        """The node's own environment below the order's: paths of the launcher's machine mean nothing here."""
        env = {**os.environ, "PATH": search_path(), **order.env}
        if order.env.get("CUDA_VISIBLE_DEVICES") is None:
            # Ray narrowed it for this actor; ids in commands are physical ones.
            env.pop("CUDA_VISIBLE_DEVICES", None)
        program = shutil.which(order.argv[0], path=env["PATH"])
        if program is None:
            raise RuntimeError(f"did not start: no program {order.argv[0]} on this node's PATH")
        pathlib.Path(order.log).parent.mkdir(parents=True, exist_ok=True)
        return replace(order, env=env, argv=(program, *order.argv[1:]))
