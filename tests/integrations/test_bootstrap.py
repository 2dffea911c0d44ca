"""`pul.bootstrap` and what the bootstraps share, where there is neither Ray nor torchrun."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest
from runtime_util import LIMIT, eventually, free_port, local_system, run

import pulsing as pul
from pulsing.exceptions import ConfigError, JoinError, PulsingRuntimeError
from pulsing.integrations._job import Deadline, Options, Terms
from pulsing.integrations.ray import _bridge


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    pul.bootstrap.stop()


def test_alone_it_is_a_cluster_of_its_own_and_stops() -> None:
    ready = threading.Event()
    assert pul.bootstrap(wait_timeout=LIMIT, on_ready=ready.set) is True
    assert ready.is_set()
    assert pul.is_initialized()
    with pytest.raises(PulsingRuntimeError, match=r"bootstrap\(\) was called before"):
        pul.bootstrap()
    pul.bootstrap.stop()
    assert not pul.is_initialized()
    assert pul.bootstrap(wait_timeout=LIMIT) is True


def test_seeds_go_before_what_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")

    async def scenario() -> None:
        async with local_system() as other:
            assert pul.bootstrap(seeds=[other.addr], expected=2) is None
            system = await pul.bootstrap.ready(LIMIT)
            assert system is pul.get_system()
            assert len(await other.members()) == 2
            await pul.shutdown()

    run(scenario())


def test_what_it_cannot_do_in_time_goes_on_and_can_be_stopped() -> None:
    seed = f"127.0.0.1:{free_port()}"
    assert pul.bootstrap(seeds=[seed], join_timeout=None, wait_timeout=0.2) is False
    pul.bootstrap.stop()
    assert not pul.is_initialized()


def test_a_failed_start_is_raised_to_who_waits_and_logged_for_others(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(JoinError, match="1 of 2 processes have joined"):
        pul.bootstrap(expected=2, join_timeout=0.2, wait_timeout=LIMIT)
    assert not pul.is_initialized()
    assert "pul.bootstrap() failed: 1 of 2 processes" in caplog.text

    async def scenario() -> None:
        pul.bootstrap(expected=2, join_timeout=0.2)
        with pytest.raises(JoinError, match="1 of 2"):
            await pul.bootstrap.ready(LIMIT)
        assert not pul.is_initialized()

    run(scenario())


def test_on_a_loop_it_does_not_block() -> None:
    async def scenario() -> None:
        with pytest.raises(PulsingRuntimeError, match=r"await pul.bootstrap.ready\(timeout\)"):
            pul.bootstrap(wait_timeout=1)

    run(scenario())


def test_where_ray_or_torch_is_missing_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(PulsingRuntimeError, match=r"pip install 'pulsing\[ray\]'"):
        run(pul.init_inside_ray())
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(PulsingRuntimeError, match="pip install torch"):
        run(pul.init_inside_torchrun())


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_outside_a_torchrun_job_it_says_what_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv(missing)
    with pytest.raises(PulsingRuntimeError, match=f"no rank of a torchrun job: {missing} not set"):
        run(pul.init_inside_torchrun())


def options(**said: object) -> Options:
    known = {"addr": None, "expected": None, "passphrase": None, "passphrase_file": None, "config": None}
    given = {name: said.pop(name, value) for name, value in known.items()}
    return Options(**given, settings=said)


def test_the_first_process_decides_on_the_secret_and_another_kind_is_refused() -> None:
    made, theirs = options().terms("job"), options(passphrase="x").terms("job")
    assert made.security == "made"
    assert len(made.passphrase or "") == 64
    assert made.passphrase not in repr(made)
    assert Terms.read(made.text()) == made
    assert theirs.passphrase is None, "a passphrase that all have is not handed on"
    assert options(insecure=True).terms("job").security == "insecure"
    assert options().terms("job", one_host=True).security == "host"
    # A certificate may name the cluster.
    assert options(cert="c", key="k", ca="a", cluster="mine").terms("job") == Terms("mine", "certified")
    for terms, mine in (
        (made, {"passphrase": "x"}),
        (theirs, {}),
        (theirs, {"insecure": True}),
        (made, {"insecure": True}),
    ):
        with pytest.raises(ConfigError, match="give all of them the same passphrase"):
            run(options(**mine).start(terms, "127.0.0.1:0", (), 1.0))
    with pytest.raises(ConfigError, match="given a certificate, the one that began the job's cluster no secret"):
        run(options(cert="c", key="k", ca="a").start(made, "127.0.0.1:0", (), 1.0))
    assert not pul.is_initialized()


def test_a_passphrase_of_the_environment_is_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSING_PASSPHRASE", "of all")
    assert options().terms("job").security == "given"
    assert options(insecure=True).terms("job").security == "insecure"


@pytest.mark.parametrize("expected", [0, -1, 1.5, True])
def test_an_impossible_number_of_nodes_is_refused(expected: object) -> None:
    with pytest.raises(ConfigError, match="expected="):
        options(expected=expected)


def test_halves_of_a_job_that_began_apart_are_brought_together() -> None:
    async def scenario() -> None:
        common = {"cluster": "job", "passphrase": "of the job"}
        async with local_system(**common) as one, local_system(**common) as other:
            await asyncio.wrap_future(_bridge(one, (other.addr,)))

            async def together() -> bool:
                seen = [
                    {row["addr"] for row in await each.members() if row["state"] == "alive"} for each in (one, other)
                ]
                return all(alive >= {one.addr, other.addr} for alive in seen)

            await eventually("both to know each other", together)

    run(scenario())


def test_a_deadline_leaves_each_step_its_share() -> None:
    assert Deadline(None).left(5.0) == 5.0
    assert not Deadline(None).passed
    assert Deadline(0.0).passed
    assert Deadline(0.0).left(5.0) == pytest.approx(0.1)
