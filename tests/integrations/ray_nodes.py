"""Ray actors and tasks that are Pulsing nodes. Also a driver: python ray_nodes.py ADDRESS runs a whole job."""

import json
import os
import sys
from typing import Any

import ray

import pulsing as pul


@pul.remote
class Echo:
    def __init__(self, of: str) -> None:
        self.of = of

    def who(self) -> tuple[str, int]:
        return self.of, os.getpid()


def seen(system: pul.ActorSystem) -> dict[str, Any]:
    """What tests ask of a node."""
    return {
        "addr": system.addr,
        "cluster": system.config.cluster,
        "secret": system.config.passphrase is not None,
        "pid": os.getpid(),
    }


def alive(members: list[dict[str, Any]]) -> list[str]:
    return sorted(member["addr"] for member in members if member["state"] == "alive")


@ray.remote(num_cpus=0)
class Async:
    """A node on the event loop of an async Ray actor."""

    async def join(self, name: str, **options: Any) -> dict[str, Any]:
        system = await pul.init_inside_ray(**options)
        if name not in system.local_actor_names():
            await Echo.spawn(name, name=name)
        return seen(system)

    async def ask(self, name: str) -> tuple[str, int]:
        answer: tuple[str, int] = await (await pul.resolve(name, cls=Echo, timeout=30)).who()
        return answer

    async def members(self) -> list[str]:
        return alive(await pul.get_system().members())


@ray.remote(num_cpus=0, max_concurrency=2)
class Threaded:
    """A node on a loop of its own, used by the threads of a Ray actor."""

    def join(self, name: str, **options: Any) -> dict[str, Any]:
        system = pul.sync.init_inside_ray(**options).system
        pul.sync.spawn(Echo, name, name=name)
        return seen(system)

    def ask(self, name: str) -> tuple[str, int]:
        answer: tuple[str, int] = pul.sync.resolve(name, cls=Echo, timeout=30).who()
        return answer


@ray.remote(num_cpus=0)
def task(name: str, **options: Any) -> tuple[str, int]:
    """A plain task: its process joins, calls and leaves."""
    with pul.sync.init_inside_ray(**options):
        answer: tuple[str, int] = pul.sync.resolve(name, cls=Echo, timeout=30).who()
    return answer


@ray.remote(num_cpus=0)
def bootstrapped(name: str, **options: Any) -> tuple[Any, tuple[str, int]]:
    """A task that does not say where it runs."""
    ready = pul.bootstrap(wait_timeout=60, **options)
    try:
        return ready, pul.sync.resolve(name, cls=Echo, timeout=30).who()
    finally:
        pul.bootstrap.stop()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    nodes = [Async.remote() for _ in range(2)]
    refs = [node.join.remote(f"node/{n}", expected=3) for n, node in enumerate(nodes)]
    own = pul.sync.init_inside_ray(expected=3)
    joined = [seen(own.system), *ray.get(refs)]
    heard = [pul.sync.resolve(f"node/{n}", timeout=30).who() for n in range(2)]
    json.dump({"joined": joined, "heard": heard, "job": ray.get_runtime_context().get_job_id()}, sys.stdout)
    # Nobody shuts down, and Ray ends the processes of the job.
