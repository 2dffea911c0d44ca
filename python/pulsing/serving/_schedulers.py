"""Schedulers: which worker takes a request, decided in Python.

A Router places requests in Rust and needs none of these. Give one to `start_router(scheduler=...)`, or return one from
`Router.scheduler`, to decide in Python instead: it is asked in batches, has 50 ms, and may answer None to leave a
request to the Router's own policy. They also stand alone, for code that talks to workers itself.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pulsing import _core
from pulsing.core import ActorId, ActorRef, NodeId
from pulsing.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pulsing.core import ActorSystem

__all__ = [
    "RUST_POLICIES_AVAILABLE",
    "LeastConnectionScheduler",
    "RandomScheduler",
    "RoundRobinScheduler",
    "RustCacheAwareScheduler",
    "RustConsistentHashScheduler",
    "RustPowerOfTwoScheduler",
    "RustRandomScheduler",
    "RustRoundRobinScheduler",
    "Scheduler",
    "StreamLoadScheduler",
    "WorkerInfo",
    "get_scheduler",
]

RUST_POLICIES_AVAILABLE: Final = True
"""The policies are part of the extension, which is always there."""

# What names a conversation, most telling first; the same list as the Router's.
_AFFINITY_HEADERS = ("x-session-id", "x-conversation-id", "x-user-id")


@dataclass
class WorkerInfo:
    """What is known of one worker.

    Args:
        url: Its address.
        model_id: The model it serves.
        healthy: It takes requests.
        load: Requests on it, as far as known.
        processed: Requests it was given.
    """

    url: str
    model_id: str = "default"
    healthy: bool = True
    load: int = 0
    processed: int = 0

    @property
    def is_healthy(self) -> bool:
        """It takes requests."""
        return self.healthy

    def increment_load(self) -> None:
        """A request went there."""
        self.load += 1
        self.processed += 1

    def decrement_load(self) -> None:
        """A request there is over."""
        self.load = max(0, self.load - 1)


class Scheduler(ABC):
    """Chooses workers. Override `select_worker`; `start` and `stop` where there is something to do.

    Args:
        actor_system: The system whose cluster the workers are in.
        worker_name: Name they serve under.
    """

    def __init__(self, actor_system: ActorSystem, worker_name: str = "worker") -> None:
        self._system = actor_system
        self._worker_name = worker_name

    async def start(self) -> None:  # noqa: B027 - most schedulers have nothing to start
        """Runs before the first request."""

    async def stop(self) -> None:  # noqa: B027 - nor to stop
        """Runs after the last one."""

    async def get_available_workers(self) -> list[dict[str, Any]]:
        """The ready workers: name, node_id, actor_id, addr, class, metadata."""
        return [worker for worker in self._all() if worker["metadata"].get("state", "ready") == "ready"]

    async def get_worker_count(self) -> int:
        """Workers in whatever state."""
        return len(self._all())

    async def get_healthy_worker_count(self) -> int:
        """Workers that are ready."""
        return len(await self.get_available_workers())

    @abstractmethod
    async def select_worker(
        self, request_text: str | None = None, headers: Mapping[str, str] | None = None
    ) -> ActorRef | None:
        """The worker for a request, or None when there is none or the Router shall decide.

        Args:
            request_text: The text of the request, at most 16 KB of it.
            headers: Its HTTP headers, names in lower case, without credentials.
        """

    def _all(self) -> list[dict[str, Any]]:
        found = self._system.core.instances(self._worker_name)
        return [worker for worker in found if worker["metadata"].get("kind") == "worker"]

    def _ref(self, node_id: str, actor_id: str) -> ActorRef:
        return ActorRef(self._system, NodeId(node_id), ActorId(actor_id), self._worker_name)


class RoundRobinScheduler(Scheduler):
    """Each worker in turn."""

    def __init__(self, actor_system: ActorSystem, worker_name: str = "worker") -> None:
        super().__init__(actor_system, worker_name)
        self._index = 0

    async def select_worker(
        self, request_text: str | None = None, headers: Mapping[str, str] | None = None
    ) -> ActorRef | None:
        workers = sorted(await self.get_available_workers(), key=lambda worker: str(worker["actor_id"]))
        if not workers:
            return None
        worker = workers[self._index % len(workers)]
        self._index += 1
        return self._ref(worker["node_id"], worker["actor_id"])


class RandomScheduler(Scheduler):
    """Any worker."""

    async def select_worker(
        self, request_text: str | None = None, headers: Mapping[str, str] | None = None
    ) -> ActorRef | None:
        workers = await self.get_available_workers()
        if not workers:
            return None
        worker = random.choice(workers)
        return self._ref(worker["node_id"], worker["actor_id"])


class LeastConnectionScheduler(Scheduler):
    """The worker with the fewest open requests that this scheduler gave it. Say `release` when a request is over."""

    def __init__(self, actor_system: ActorSystem, worker_name: str = "worker") -> None:
        super().__init__(actor_system, worker_name)
        self._open: dict[str, int] = {}

    async def select_worker(
        self, request_text: str | None = None, headers: Mapping[str, str] | None = None
    ) -> ActorRef | None:
        workers = await self.get_available_workers()
        if not workers:
            return None
        self._open = {one["actor_id"]: self._open.get(one["actor_id"], 0) for one in workers}
        worker = min(workers, key=lambda one: (self._open[one["actor_id"]], random.random()))
        self._open[worker["actor_id"]] += 1
        return self._ref(worker["node_id"], worker["actor_id"])

    def release(self, worker: ActorRef) -> None:
        """A request that went to `worker` is over."""
        key = str(worker.actor_id)
        if self._open.get(key, 0) > 0:
            self._open[key] -= 1


class _PolicyScheduler(Scheduler):
    """One of the Router's own policies, over the same pool of workers and the load that they push."""

    policy: str

    def __init__(self, actor_system: ActorSystem, worker_name: str = "worker") -> None:
        super().__init__(actor_system, worker_name)
        self._picker = _core.WorkerPicker(actor_system.core, worker_name, self.policy)

    async def stop(self) -> None:
        """Stops watching the workers."""
        self._picker.close()

    async def select_worker(
        self, request_text: str | None = None, headers: Mapping[str, str] | None = None
    ) -> ActorRef | None:
        given = {name.lower(): value for name, value in (headers or {}).items()}
        key = next((given[name] for name in _AFFINITY_HEADERS if given.get(name)), None)
        found = self._picker.pick(key, request_text)
        return None if found is None else self._ref(*found)

    def loads(self) -> dict[str, int]:
        """Requests on each worker by actor id, as the workers report them."""
        return {actor: load for _, actor, _, load, _ in self._picker.workers()}

    def reset(self) -> None:
        """Forgets whose turn it is."""
        self._picker.reset()


class RustRandomScheduler(_PolicyScheduler):
    """Any worker that is not full."""

    policy = "random"


class RustRoundRobinScheduler(_PolicyScheduler):
    """Each worker that is not full in turn."""

    policy = "round_robin"


class RustPowerOfTwoScheduler(_PolicyScheduler):
    """The less loaded of two workers taken by chance."""

    policy = "power_of_two"


class RustConsistentHashScheduler(_PolicyScheduler):
    """The same worker for the same session (``x-session-id``, ``x-user-id``, ...); without one, by load."""

    policy = "consistent_hash"


class StreamLoadScheduler(_PolicyScheduler):
    """The worker with the least pushed load relative to its capacity."""

    policy = "stream_load"


class RustCacheAwareScheduler(_PolicyScheduler):
    """The worker that was given the longest prefix of this text before; where that one has much to do, by load."""

    policy = "cache_aware"


_BY_NAME: dict[str, type[Scheduler]] = {
    "random": RustRandomScheduler,
    "round_robin": RustRoundRobinScheduler,
    "power_of_two": RustPowerOfTwoScheduler,
    "consistent_hash": RustConsistentHashScheduler,
    "cache_aware": RustCacheAwareScheduler,
    "stream_load": StreamLoadScheduler,
    "py_random": RandomScheduler,
    "py_round_robin": RoundRobinScheduler,
    "least_connection": LeastConnectionScheduler,
}


def get_scheduler(policy_name: str, actor_system: ActorSystem, worker_name: str = "worker", **kwargs: Any) -> Scheduler:
    """The scheduler with this name.

    Args:
        policy_name: random, round_robin, power_of_two, consistent_hash, cache_aware, stream_load, py_random,
            py_round_robin or least_connection.
        actor_system: The system whose cluster the workers are in.
        worker_name: Name they serve under.
        **kwargs: Further arguments of the scheduler's class.

    Raises:
        ConfigError: The name is unknown. (It is a ValueError.)
    """
    found = _BY_NAME.get(policy_name)
    if found is None:
        raise ConfigError(f"policy_name={policy_name!r} is unknown; choose one of {', '.join(_BY_NAME)}")
    return found(actor_system, worker_name, **kwargs)
