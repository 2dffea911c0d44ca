"""`pulsing.testing`: its clock, its faults, its seeds, and what it refuses."""

from __future__ import annotations

import asyncio
import inspect
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import pulsing as pul
from pulsing.exceptions import JoinError, RefusedError
from pulsing.testing import Network, simulate

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "testing.md"


class Echo:
    def __init__(self) -> None:
        self.stopped = False

    async def say(self, value: Any) -> Any:
        return value

    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @pul.blocking
    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return threading.current_thread().name

    async def items(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    async def on_stop(self) -> None:
        self.stopped = True


async def _pair(net: Network, **settings: Any) -> tuple[pul.ActorSystem, pul.ActorSystem, Any]:
    a = await net.system("a", **settings)
    b = await net.system("b", seeds=["a"], **settings)
    await b.spawn(Echo(), name="echo", public=True)
    return a, b, await a.resolve("echo", timeout=10)


@simulate(seed=1)
async def test_minutes_pass_in_no_time_and_timers_of_both_sides_agree(net: Network) -> None:
    real = time.monotonic()
    _, _, echo = await _pair(net)
    began = net.now
    assert await echo.sleep.options(timeout=None)(1200.0) == 1200.0
    assert net.now - began == pytest.approx(1200, abs=0.01)
    assert time.monotonic() - real < 60
    async with asyncio.timeout(10) as limit:
        await net.sleep(9.9)
    assert not limit.expired()


@simulate(seed=1)
async def test_the_clock_waits_for_threads(net: Network) -> None:
    _, _, echo = await _pair(net)
    began = net.now
    assert await echo.block(0.1) == "pulsing-blocking"
    assert await asyncio.to_thread(lambda: time.sleep(0.05) or 7) == 7
    assert net.now - began < 0.05
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    with net.hold_clock():
        threading.Timer(0.05, lambda: loop.call_soon_threadsafe(done.set)).start()
        await done.wait()
    assert net.now - began < 0.05


@simulate(seed=1)
async def test_a_link_takes_its_delay_and_other_pairs_keep_theirs(net: Network) -> None:
    net.faults(delay=0.1)
    a, _, echo = await _pair(net)
    c = await net.system("c", seeds=["a"])
    await c.spawn(Echo(), name="near", public=True)
    near = await a.resolve("near", timeout=10)
    net.faults(delay=0.003, between=("a", "c"))
    for proxy, there_and_back in ((echo, 0.2), (near, 0.006)):
        await proxy.say("the link is open")
        began = net.now
        await proxy.say(1)
        assert net.now - began == pytest.approx(there_and_back, abs=0.003)


@simulate(seed=1)
async def test_a_lost_segment_is_a_stall(net: Network) -> None:
    _, _, echo = await _pair(net)
    await echo.say("the link is open")
    net.faults(loss=0.15)

    async def lost(took: float) -> bool:
        began = net.now
        await echo.say(0)
        return round(net.now - began, 3) == took

    # At once, sent again after 0.2 s, and after 0.4 s more.
    for took in (0.0, 0.2, 0.6):
        await net.until(lambda took=took: lost(took), within=60)


@simulate(seed=1)
async def test_a_partition_holds_what_is_under_way_and_a_heal_delivers_it(net: Network) -> None:
    _, _, echo = await _pair(net)
    await echo.say("the link is open")
    net.partition("a", "b")
    call = asyncio.ensure_future(echo.say("late"))
    await net.sleep(1.0)
    assert not call.done()
    net.heal()
    healed = net.now
    assert await call == "late"
    assert net.now - healed == pytest.approx(0.4, abs=0.01), "sent again after 0.2, 0.6 and 1.4 s"


@simulate(seed=1)
async def test_one_way_and_refused_partitions(net: Network) -> None:
    a, b, _ = await _pair(net)
    net.partition({"b"}, {"a"}, one_way=True)
    await net.until(lambda: net.members(a) == {a.addr}, within=30, what="a hears nothing")
    net.heal()
    await net.until(lambda: len(net.members(a)) == len(net.members(b)) == 2, within=30)
    await b.shutdown()
    for refuse, limit, words in (
        (True, 1.0, "nobody listens there"),
        (False, 1.0, rf"{a.addr}: no answer yet"),
        (False, 5.0, rf"{a.addr}: no connection within 3s"),
    ):
        net.partition({"a"}, {"b"}, refuse=refuse)
        with pytest.raises(JoinError, match=words):
            await net.system("b", seeds=["a"], join_timeout=limit)


@simulate(seed=1)
async def test_a_kill_says_nothing_and_a_shutdown_says_goodbye(net: Network) -> None:
    a, _, _ = await _pair(net)
    c = await net.system("c", seeds=["a"])
    await net.until(lambda: len(net.members(a)) == 3)
    await c.shutdown()
    states = {m["addr"]: m["state"] for m in a.core.members()}
    assert states[c.addr] == "left"
    victim = net["b"]
    await net.kill("b")
    await net.until(lambda: victim.addr not in net.members(a), within=2)
    assert {m["addr"]: m["state"] for m in a.core.members()}[victim.addr] == "down"
    with pytest.raises(JoinError, match="nobody listens there"):
        await net.system("d", seeds=["b"], join_timeout=1.0)


def test_a_scenario_may_end_in_the_middle_of_a_fault() -> None:
    actors = [Echo(), Echo()]

    async def scenario(net: Network) -> float:
        for name, actor in zip("ab", actors, strict=True):
            system = await net.system(name, seeds=["a"] if name == "b" else [])
            await system.spawn(actor, name=name)
        net.faults(loss=0.5)
        net.partition({"a"}, {"b"})
        net.pause("b")
        return net.now

    assert Network.run(scenario, seed=1) < 10
    assert all(actor.stopped for actor in actors)


@simulate(seed=1)
async def test_tls_and_its_refusals_work_in_memory(net: Network) -> None:
    _, _, echo = await _pair(net, passphrase="correct horse")
    assert await echo.say(b"x" * 300_000) == b"x" * 300_000
    with pytest.raises(RefusedError):
        await net.system("c", seeds=["a"], passphrase="wrong")
    with pytest.raises(RefusedError):
        await net.system("d", seeds=["a"])


@simulate(seed=1)
async def test_a_system_can_be_the_process_s_own(net: Network) -> None:
    a, _, _ = await _pair(net)
    with net.main(a):
        assert pul.get_system() is a
        ref = await pul.spawn(Echo(), name="mine")
        assert await (await pul.resolve("mine")).say(2) == 2
        assert ref.node_id == a.node_id
    assert not pul.is_initialized()


def test_what_makes_no_sense_is_refused_in_words() -> None:
    async def scenario(net: Network) -> None:
        a = await net.system("a")
        for wrong, words in (
            (lambda: net.faults(loss=1.5), "loss=1.5: expected a probability"),
            (lambda: net.faults(delay=(0.2, 0.1)), "the shortest before the longest"),
            (lambda: net.faults(delay=-1.0), "delay=-1"),
            (lambda: net.partition({"a"}, {"x"}), 'no host "x"; it has: a'),
            (lambda: net.pause("x"), 'no host "x"'),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                wrong()
        with pytest.raises(ValueError, match='no host "x"'):
            await net.kill("x")
        with pytest.raises(ValueError, match="end its system before"):
            await net.system("a")
        with pytest.raises(ValueError, match="letters, digits"):
            await net.system("a b")
        with pytest.raises(TypeError, match="addr is the network's to decide"):
            await net.system("b", addr="127.0.0.1:0")
        with pytest.raises(RuntimeError, match=r"net\.system\(name\)"):
            await pul.actor_system()
        with pytest.raises(RuntimeError, match="an event loop of its own"):
            Network.run(scenario)
        with pytest.raises(AssertionError, match="not within 1 s: the moon"):
            await net.until(lambda: False, within=1, what="the moon")
        assert await net.until(lambda: a.addr) == a.addr

    Network.run(scenario, seed=1)
    with pytest.raises(ValueError, match="seed=-1"):
        Network.run(scenario, seed=-1)
    with pytest.raises(TypeError, match="seed or seeds"):
        simulate(seed=1, seeds=2)
    with pytest.raises(TypeError, match="first parameter is the network"):
        simulate()(lambda: None)
    with pytest.raises(TypeError, match="first parameter is the network"):
        simulate(scenario.__class__)


@simulate
async def test_the_decorator_goes_without_parentheses_too(net: Network) -> None:
    assert (await net.system("a")).addr in net.members(await net.system("b", seeds=["a"]))


def test_a_scenario_that_waits_for_what_never_comes_ends() -> None:
    async def scenario(net: Network) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="did not end within 3600 s of the network's time"):
        Network.run(scenario, seed=1)


def test_a_failure_prints_its_seed_and_the_seed_meets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    @simulate(seeds=50)
    async def unlucky(net: Network) -> None:
        net.faults(delay=(0.001, 0.03), loss=0.1)
        _, _, echo = await _pair(net)
        for n in range(5):
            began = net.now
            await echo.say(n)
            assert net.now - began < 0.6, f"{net.now - began:.6f} s at {net.now:.6f}"

    met = []
    with pytest.raises(AssertionError) as failure:
        unlucky()
    met.append(str(failure.value))
    (note,) = failure.value.__notes__
    seed = re.search(r"run it again with PULSING_TEST_SEED=(\d+)$", note)
    assert seed is not None
    monkeypatch.setenv("PULSING_TEST_SEED", seed.group(1))
    for _ in range(3):
        with pytest.raises(AssertionError) as failure:
            unlucky()
        met.append(str(failure.value))
    assert len(set(met)) == 1, "to the microsecond"
    monkeypatch.setenv("PULSING_TEST_SEED", "soon")
    with pytest.raises(ValueError, match="PULSING_TEST_SEED='soon'"):
        unlucky()


@simulate(seed=1)
async def test_a_scenario_takes_fixtures(net: Network, tmp_path: pathlib.Path) -> None:
    assert tmp_path.name.startswith("test_a_scenario")
    assert net.seed == int(os.environ.get("PULSING_TEST_SEED", "1"), 0)


def test_only_the_network_is_taken_from_a_test_s_parameters() -> None:
    assert list(inspect.signature(test_a_scenario_takes_fixtures).parameters) == ["tmp_path"]


def test_the_kit_is_not_imported_by_pulsing() -> None:
    code = "import pulsing, sys; sys.exit('pulsing.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_guide_s_examples_run(tmp_path: pathlib.Path) -> None:
    parts = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert parts
    (tmp_path / "test_guide.py").write_text("\n".join(parts))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_guide.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
