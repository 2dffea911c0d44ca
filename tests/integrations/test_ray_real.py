"""Nodes in the processes of a real Ray job: M6, section 6 of the design."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray_nodes import Async, Echo, Threaded, bootstrapped, task

import pulsing as pul
from pulsing.exceptions import ConfigError, PulsingRuntimeError
from pulsing.integrations._meeting import LEASE

HERE = pathlib.Path(__file__).parent
LIMIT = 90.0


def eventually(what: str, condition: Callable[[], Any], limit: float = LIMIT) -> Any:
    deadline = time.monotonic() + limit
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(0.1)


def test_where_ray_is_not_initialized_it_says_so() -> None:
    assert not ray.is_initialized()
    with pytest.raises(PulsingRuntimeError, match=r"call ray.init\(\) before"):
        pul.sync.init_inside_ray()
    assert not ray.is_initialized()


def test_the_example() -> None:
    example = HERE.parents[1] / "examples" / "ray_job.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(0, 0), (0, 1), (0, 4)]\n[(1, 0), (1, 1), (1, 4)]\n"


class Job:
    """A job of its own on the same Ray, which runs beside the tests and ends by itself."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_nodes.py"), address], stdout=subprocess.PIPE, text=True
        )

    def said(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    context = ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        namespace="pulsing-tests",
        # Workers import the nodes from here.
        runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}},
    )
    beside = Job(context.address_info["gcs_address"])
    try:
        yield beside
    finally:
        beside.process.kill()
        beside.process.communicate()
        pul.sync.shutdown()
        ray.shutdown()


def rendezvous(cluster: str) -> list[str]:
    """Namespaces in which there is one."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["namespace"] for one in found if one["name"] == f"pulsing-rendezvous-{cluster}"]


def test_every_kind_of_process_joins_one_cluster(job: Job) -> None:
    of = {"cluster": "kinds"}
    nodes = {"async": Async.remote(), "threaded": Threaded.remote(), "other": Async.remote()}
    refs = [node.join.remote(name, expected=4, **of) for name, node in nodes.items()]
    with pul.sync.init_inside_ray(expected=4, **of) as own:
        joined = ray.get(refs, timeout=LIMIT)
        assert {one["cluster"] for one in joined} == {own.system.config.cluster}
        assert own.system.config.cluster.startswith("kinds/ray-")
        # Workers may be on other hosts, whose per-user secret would be another one.
        assert all(one["secret"] for one in joined)
        pids = {name: one["pid"] for name, one in zip(nodes, joined, strict=True)}
        assert len({os.getpid(), *pids.values()}) == 4
        for node in nodes.values():
            heard = ray.get([node.ask.remote(name) for name in nodes], timeout=LIMIT)
            assert [tuple(one) for one in heard] == list(pids.items())
        assert ray.get(task.remote("async", **of), timeout=LIMIT) == ("async", pids["async"])
        assert ray.get(bootstrapped.remote("threaded", **of), timeout=LIMIT) == (True, ("threaded", pids["threaded"]))
        assert pul.sync.resolve("other", cls=Echo, timeout=LIMIT).who() == ("other", pids["other"])
        assert pul.sync.init_inside_ray(**of).addr == own.addr
        with pytest.raises(PulsingRuntimeError, match="in another cluster"):
            pul.sync.init_inside_ray(cluster="elsewhere")
        assert rendezvous("kinds") == ["pulsing-tests"]
    assert rendezvous("elsewhere") == []
    for node in nodes.values():
        ray.kill(node)


def test_the_first_node_dies_and_the_others_still_find_each_other(job: Job) -> None:
    of = {"cluster": "deaths"}
    first, second, third, fourth = (Async.remote() for _ in range(4))
    begun = ray.get(first.join.remote("first", **of), timeout=LIMIT)
    ray.get(second.join.remote("second", expected=2, **of), timeout=LIMIT)
    ray.kill(first)
    late = ray.get(third.join.remote("third", **of), timeout=LIMIT)
    assert late["cluster"] == begun["cluster"]
    assert ray.get(third.ask.remote("second"), timeout=LIMIT)[0] == "second"
    eventually("the dead node to be gone", lambda: begun["addr"] not in ray.get(second.members.remote(), timeout=LIMIT))

    # All of them die: the next one begins again, on the same terms, and is not alone for long.
    ray.kill(second)
    ray.kill(third)
    refs = [fourth.join.remote("fourth", expected=2, **of), (fifth := Async.remote()).join.remote("fifth", **of)]
    assert [one["cluster"] for one in ray.get(refs, timeout=LIMIT)] == [begun["cluster"]] * 2
    assert ray.get(fifth.ask.remote("fourth"), timeout=LIMIT)[0] == "fourth"
    for node in (fourth, fifth):
        ray.kill(node)


def test_the_rendezvous_is_lost_and_comes_back_on_the_same_terms(job: Job) -> None:
    of = {"cluster": "lost"}
    nodes = [Async.remote() for _ in range(3)]
    begun = ray.get(nodes[0].join.remote("0", **of), timeout=LIMIT)
    # It fails, and Ray starts it again: it has forgotten who lives, and takes nobody for the first.
    ray.kill(ray.get_actor("pulsing-rendezvous-lost"), no_restart=False)
    soon = ray.get(nodes[2].join.remote("2", **of), timeout=LIMIT)
    assert soon["cluster"] == begun["cluster"]
    assert begun["addr"] in ray.get(nodes[2].members.remote(), timeout=LIMIT)
    # It is gone for good.
    pul.cleanup_ray(cluster="lost")
    pul.cleanup_ray(cluster="never there")
    eventually("the rendezvous to be gone", lambda: not rendezvous("lost"))
    eventually("the rendezvous to be back", lambda: rendezvous("lost"))
    late = ray.get(nodes[1].join.remote("1", expected=3, **of), timeout=LIMIT)
    assert late["cluster"] == begun["cluster"]
    assert ray.get(nodes[1].ask.remote("0"), timeout=LIMIT)[0] == "0"
    for node in nodes:
        ray.kill(node)


def test_processes_that_were_given_other_secrets_are_told(job: Job) -> None:
    node, other = Async.remote(), Async.remote()
    joined = ray.get(node.join.remote("given", cluster="given", passphrase="of all who know"), timeout=LIMIT)
    with pytest.raises(ConfigError, match="given no secret, the one that began the job's cluster a passphrase"):
        ray.get(other.join.remote("not", cluster="given"), timeout=LIMIT)
    again = ray.get(other.join.remote("too", cluster="given", passphrase="of all who know"), timeout=LIMIT)
    assert again["cluster"] == joined["cluster"]
    for each in (node, other):
        ray.kill(each)


def test_a_job_that_ends_leaves_nothing_behind(job: Job) -> None:
    """The last test: the job has been running, and has ended, beside the others."""
    said = job.said()
    assert len({one["cluster"] for one in said["joined"]}) == 1
    assert [one[0] for one in said["heard"]] == ["node/0", "node/1"]
    # Jobs whose namespace has no name are clusters apart from each other.
    pids = [one["pid"] for one in said["joined"]]
    eventually("its processes to be gone", lambda: not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()])
    namespace = f"pulsing-job-{said['job']}"
    eventually("its rendezvous to end", lambda: namespace not in rendezvous("default"), LEASE + LIMIT)
