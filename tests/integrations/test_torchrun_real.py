"""Nodes in the ranks of real torchrun jobs (gloo): M6, section 6 of the design."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

from runtime_util import free_port

HERE = pathlib.Path(__file__).parent
LIMIT = 120.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PULSING_", "TORCHELASTIC_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


class Job:
    """Processes started together, and what their ranks wrote."""

    def __init__(self, folder: pathlib.Path, scenario: str) -> None:
        self.out = folder / "out"
        self.out.touch()
        self._script = [str(HERE / "rank_script.py"), scenario, str(self.out)]

    def torchrun(self, *agents: list[str], **env: str) -> list[dict[str, Any]]:
        """Runs a torchrun agent for each list of arguments."""
        return self._finish(
            [[*TORCHRUN, *agent, *self._script] for agent in agents], [environment(**env)] * len(agents)
        )

    def ranks(self, world: int, **env: str) -> list[dict[str, Any]]:
        """Runs the ranks themselves, as a launcher without an agent does."""
        own = [environment(**env, RANK=str(rank), WORLD_SIZE=str(world)) for rank in range(world)]
        return self._finish([[sys.executable, *self._script]] * world, own)

    def _finish(self, commands: list[list[str]], envs: list[dict[str, str]]) -> list[dict[str, Any]]:
        started = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command, env in zip(commands, envs, strict=True)
        ]
        said: list[str] = []
        try:
            said.extend(process.communicate(timeout=LIMIT)[0] for process in started)
        except subprocess.TimeoutExpired as late:
            for process in started[len(said) :]:
                process.kill()
                said.append(process.communicate()[0])
            raise AssertionError(f"not over within {LIMIT} s:\n" + "\n---\n".join(said)) from late
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
        rows = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert not [row["pid"] for row in rows if pathlib.Path(f"/proc/{row['pid']}").exists()]
        return sorted(rows, key=lambda row: row["rank"])


def test_all_ranks_join_before_and_after_the_process_group(tmp_path: pathlib.Path) -> None:
    rows = Job(tmp_path, "before_and_after").torchrun(["--standalone", "--nproc-per-node=3"])
    for when in ("before", "after"):
        found = [row for row in rows if row["when"] == when]
        assert [row["heard"] for row in found] == [[0, 1, 2]] * 3
        assert [row["members"] for row in found] == [3] * 3
        assert len({row["cluster"] for row in found}) == 1
        # All on one host, of one user: no secret has to travel.
        assert not any(row["secret"] for row in found)
    assert len({row["cluster"] for row in rows}) == 2


def test_a_restart_of_the_workers_is_a_cluster_of_its_own(tmp_path: pathlib.Path) -> None:
    job = Job(tmp_path, "one_dies")
    rows = job.torchrun(["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"])
    lives = [[row for row in rows if row["restart"] == life] for life in ("0", "1")]
    assert [[row["heard"] for row in life] for life in lives] == [[[0, 1]] * 2] * 2
    first, second = ({row["cluster"] for row in life} for life in lives)
    assert len(first) == len(second) == 1
    assert first != second


def test_agents_of_several_hosts_get_a_secret_of_the_job(tmp_path: pathlib.Path) -> None:
    port = free_port()
    agent = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static", f"--master-port={port}"]
    agents = [[*agent, "--master-addr=127.0.0.1", f"--node-rank={node}"] for node in range(2)]
    rows = Job(tmp_path, "bootstrapped").torchrun(*agents)
    assert [(row["ready"], row["secret"], row["members"]) for row in rows] == [(True, True, 2)] * 2
    assert len({row["cluster"] for row in rows}) == 1


def test_without_an_agent_rank_0_serves_the_store(tmp_path: pathlib.Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rows = Job(tmp_path, "before_and_after").ranks(2, **env)
    assert [row["heard"] for row in rows] == [[0, 1]] * 4
    # Whether all are on one host is not known: the secret is made, and handed on.
    assert all(row["secret"] for row in rows)


def test_ranks_that_met_without_a_store_meet_through_their_group(tmp_path: pathlib.Path) -> None:
    rows = Job(tmp_path, "through_the_group").ranks(2)
    assert [row["heard"] for row in rows] == [[0, 1]] * 2
    assert all(row["secret"] for row in rows)


def test_what_stops_rank_0_is_told_to_all_at_once(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addr = f"127.0.0.1:{taken.getsockname()[1]}"
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2", "TAKEN": addr}
        first, second = Job(tmp_path, "rank_0_fails").ranks(2, **env)
    assert first["error"] == "BindError"
    assert second["error"] == "JoinError"
    assert "rank 0 could not begin the cluster: BindError" in second["text"]
    assert addr in second["text"]


def test_a_rank_that_does_not_call_is_missed_in_words(tmp_path: pathlib.Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    (row,) = Job(tmp_path, "one_does_not_call").ranks(2, **env)
    assert row["error"] == "JoinError"
    assert "1 of 2 processes have joined within 2 s" in row["text"]
    assert row["running"] is False


def test_the_example() -> None:
    example = HERE.parents[1] / "examples" / "torchrun_job.py"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(example)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 greets rank 0\nrank 1 greets rank 0\n"
