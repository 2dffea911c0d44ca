"""Restarts: R9, with the scenarios of the complaints that R9 answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest
from runtime_util import eventually, local_system, run

import pulsing as pul
from pulsing.core._supervision import RestartBudget, RestartPolicy
from pulsing.exceptions import ActorStoppedError, PulsingBusinessError, PulsingTimeoutError

QUICK: dict[str, Any] = {"min_backoff": 0.001, "max_backoff": 0.004}


def test_r9_the_backoff_doubles_with_jitter_up_to_its_limit_and_begins_anew_after_its_window() -> None:
    policy = RestartPolicy("on_failure", max_restarts=4, min_backoff=1.0, max_backoff=3.0, window=100.0)
    seen: list[set[float]] = [set() for _ in range(4)]
    for _ in range(50):
        budget = RestartBudget(policy)
        for delays, longest in zip(seen, (1.0, 2.0, 3.0, 3.0), strict=True):
            delay = budget.next_delay(0.0)
            assert delay is not None
            assert longest / 2 <= delay <= longest
            delays.add(delay)
        assert budget.next_delay(99.0) is None
        again = budget.next_delay(101.0)
        assert again is not None
        assert again <= 1.0
    assert all(len(delays) > 10 for delays in seen)


class Sturdy(pul.Actor):
    """Fails as it is told; the log is shared by its instances."""

    def __init__(self, log: list[Any], fail_at: tuple[int, ...] = ()) -> None:
        self.number = sum(1 for entry in log if entry[0] == "made") + 1
        self.log = log
        log.append(("made", self.number))
        if self.number in fail_at:
            raise RuntimeError(f"constructor {self.number}")

    async def on_start(self, actor_id: pul.ActorId) -> None:
        self.log.append(("start", self.number))

    async def on_stop(self) -> None:
        self.log.append(("stop", self.number))

    async def receive(self, msg: Any) -> Any:
        if isinstance(msg, BaseException):
            raise msg
        if msg == "hang":
            await asyncio.sleep(600)
        if isinstance(msg, asyncio.Event):
            await msg.wait()
        return self.number, msg


def test_r9_a_restart_keeps_name_id_and_the_messages_that_wait_in_their_order() -> None:
    async def main() -> None:
        async with local_system() as system:
            log: list[Any] = []
            ref = await system.spawn(lambda: Sturdy(log), name="sturdy", restart_policy="on_failure", **QUICK)
            failing = asyncio.create_task(ref.ask(RuntimeError("crash")))
            asks = [asyncio.create_task(ref.ask(n)) for n in range(5)]
            with pytest.raises(RuntimeError, match="crash"):
                await failing
            assert await asyncio.gather(*asks) == [(2, n) for n in range(5)]
            assert (await system.resolve("sturdy")).ref == ref
            assert log == [("made", 1), ("start", 1), ("stop", 1), ("made", 2), ("start", 2)]

    run(main())


def test_r9_a_spent_budget_ends_the_actor_and_watchers_hear_that_it_failed() -> None:
    async def main() -> None:
        async with local_system() as system:
            log: list[Any] = []
            ref = await system.spawn(
                lambda: Sturdy(log), name="sturdy", restart_policy="on_failure", max_restarts=2, **QUICK
            )
            watch = pul.watch(ref)
            for n in range(3):
                with pytest.raises(RuntimeError, match=f"crash {n}"):
                    await ref.ask(RuntimeError(f"crash {n}"))
            late = asyncio.create_task(ref.ask("late"))
            ended = await asyncio.wait_for(watch, 5)
            assert (ended.reason, ended.error) == ("failed", "RuntimeError: crash 2")
            with pytest.raises(pul.PulsingError):
                await late
            assert system.local_actor_names() == []
            starts = [entry for entry in log if entry[0] == "start"]
            stops = [entry for entry in log if entry[0] == "stop"]
            assert [n for _, n in starts] == [n for _, n in stops] == [1, 2, 3]

    run(main())


def test_r9_business_errors_and_cancellation_spend_no_budget() -> None:
    async def main() -> None:
        async with local_system() as system:
            log: list[Any] = []
            ref = await system.spawn(lambda: Sturdy(log), restart_policy="on_failure", max_restarts=0, **QUICK)
            with pytest.raises(PulsingBusinessError):
                await ref.ask(PulsingBusinessError(400, "no"))
            with pytest.raises(PulsingTimeoutError):
                await ref.ask("hang", timeout=0.01)
            hanging = asyncio.create_task(ref.ask("hang"))
            await asyncio.sleep(0.01)
            hanging.cancel()
            assert await ref.ask("x") == (1, "x")

    run(main())


def test_r9_a_constructor_that_fails_again_counts_and_on_stop_runs_once_an_instance() -> None:
    async def main() -> None:
        async with local_system() as system:
            log: list[Any] = []
            ref = await system.spawn(lambda: Sturdy(log, fail_at=(2, 3)), restart_policy="on_failure", **QUICK)
            with pytest.raises(RuntimeError, match="crash"):
                await ref.ask(RuntimeError("crash"))
            assert await ref.ask("x") == (4, "x")
            assert log == [
                ("made", 1),
                ("start", 1),
                ("stop", 1),
                ("made", 2),
                ("made", 3),
                ("made", 4),
                ("start", 4),
            ]
            watch = pul.watch(ref)
            with pytest.raises(RuntimeError, match="crash"):
                await ref.ask(RuntimeError("crash"))
            assert (await asyncio.wait_for(watch, 5)).reason == "failed"
            assert log[-1] == ("stop", 4)

    run(main())


def test_r9_always_restarts_also_who_exits_and_others_do_not() -> None:
    async def main() -> None:
        async with local_system() as system:
            log: list[Any] = []
            ref = await system.spawn(lambda: Sturdy(log), restart_policy="always", **QUICK)
            for code in (None, 0, 3):
                with pytest.raises(ActorStoppedError):
                    await ref.ask(SystemExit(code))
            assert await ref.ask("x") == (4, "x")
            ref = await system.spawn(lambda: Sturdy(log), restart_policy="on_failure", **QUICK)
            watch = pul.watch(ref)
            with pytest.raises(ActorStoppedError):
                await ref.ask(SystemExit(0))
            assert (await asyncio.wait_for(watch, 5)).reason == "stopped"

    run(main())


def test_r9_a_restart_that_asks_its_caller_neither_hangs_nor_outlives_its_deadline() -> None:
    @pul.remote
    class Caller:
        """Serial: it cannot answer while it waits."""

        @pul.serial
        async def call(self, other: Any) -> str:
            try:
                await other.crash()
            except RuntimeError:
                return "told at once"
            return "no failure"

        @pul.serial
        async def answer(self) -> str:
            return "here"

        @pul.serial
        async def silence(self) -> None:
            await asyncio.sleep(600)

    class Asker(pul.Actor):
        attempts = itertools.count(1)

        def __init__(self, caller: Any, heard: list[str]) -> None:
            self.caller = caller
            self.heard = heard
            self.attempt = next(self.attempts)

        async def on_start(self, actor_id: pul.ActorId) -> None:
            if self.attempt == 2:
                await self.caller.options(timeout=None).silence()
            if self.attempt == 3:
                self.heard.append(await self.caller.answer())

        async def crash(self) -> None:
            raise RuntimeError("crash")

        async def ping(self) -> int:
            return self.attempt

    async def main() -> None:
        async with local_system(start_timeout=0.1) as system:
            heard: list[str] = []
            caller = await Caller.spawn(system=system)
            ref = await system.spawn(lambda: Asker(caller, heard), restart_policy="on_failure", **QUICK)
            other = ref.as_any()
            assert await asyncio.wait_for(caller.call(other), 5) == "told at once"
            # The second instance waited for ever and was given up; the third one got its answer.
            assert await asyncio.wait_for(other.ping(), 5) == 3
            assert heard == ["here"]

    run(main())


def test_r9_a_failing_tell_is_logged_with_the_line_that_sent_it(caplog: pytest.LogCaptureFixture) -> None:
    @pul.remote
    class Relay:
        async def relay(self, other: Any) -> None:
            await other.crash.tell()

        def crash(self) -> None:
            raise RuntimeError("nobody waits")

    async def main() -> None:
        async with local_system() as system:
            one, two = [await Relay.spawn(system=system, name=name) for name in ("one", "two")]
            await two.crash.tell()  # this line
            await two.tell("crash", *())
            await one.relay(two)
            await eventually("all are logged", lambda: caplog.text.count("RuntimeError: nobody waits") == 3)

    with caplog.at_level(logging.ERROR, "pulsing"):
        run(main())
    lines = [record.getMessage() for record in caplog.records]
    with open(__file__, encoding="utf-8") as source:
        here = next(n for n, line in enumerate(source, 1) if line.rstrip().endswith("# this line"))
    assert f"two.crash, told at {__file__}:{here}, failed" in lines
    assert all("told at " + __file__ in line for line in lines)


def test_r9_a_failure_while_it_drains_restarts_it_and_a_stop_while_it_restarts_ends_it() -> None:
    async def main() -> None:
        async with local_system() as system:
            log: list[Any] = []
            ref = await system.spawn(lambda: Sturdy(log), restart_policy="on_failure", **QUICK)
            failing = asyncio.create_task(ref.ask(RuntimeError("crash")))
            gate = asyncio.Event()
            waiting = asyncio.create_task(ref.ask(gate))
            await asyncio.sleep(0)
            draining = asyncio.create_task(system.drain(ref))
            await eventually("it starts again", lambda: log[-1] == ("start", 2))
            with pytest.raises(ActorStoppedError):
                await ref.ask("late")
            gate.set()
            await asyncio.wait_for(draining, 5)
            with pytest.raises(RuntimeError, match="crash"):
                await failing
            assert await waiting == (2, gate)
            for how in (system.stop, system.kill):
                ref = await system.spawn(
                    lambda: Sturdy(log), restart_policy="on_failure", min_backoff=600, max_backoff=600
                )
                watch = pul.watch(ref)
                with pytest.raises(RuntimeError, match="crash"):
                    await ref.ask(RuntimeError("crash"))
                waiting = asyncio.create_task(ref.ask("x", timeout=None))
                await eventually("it waits for its restart", lambda: log[-1][0] == "stop")
                stops = sum(1 for entry in log if entry[0] == "stop")
                await asyncio.wait_for(how(ref), 5)
                with pytest.raises(ActorStoppedError):
                    await waiting
                assert (await watch).reason in {"stopped", "killed"}
                assert sum(1 for entry in log if entry[0] == "stop") == stops

    run(main())


def test_r9_watches_of_an_actor_survive_its_restart() -> None:
    class Guardian(pul.Actor):
        def __init__(self, seen: list[Any]) -> None:
            self.seen = seen

        async def guard(self, one: Any) -> None:
            self.watch(one)

        async def crash(self) -> None:
            raise RuntimeError("crash")

        async def ping(self) -> None: ...

        def on_terminated(self, ended: pul.Ended) -> None:
            self.seen.append(ended.reason)

    async def main() -> None:
        async with local_system() as system:
            seen: list[Any] = []
            one = await system.spawn(lambda: Sturdy([]))
            guardian = (await system.spawn(lambda: Guardian(seen), restart_policy="on_failure", **QUICK)).as_any()
            await guardian.guard(one)
            with pytest.raises(RuntimeError, match="crash"):
                await guardian.crash()
            await system.kill(one)
            await guardian.ping()
            await eventually("the next instance hears of it", lambda: seen == ["killed"])

    run(main())
