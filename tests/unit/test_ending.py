"""Draining, stopping and killing on one node: R4, R8."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from runtime_util import eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import (
    ActorNotFoundError,
    ActorStoppedError,
    NameNotFoundError,
    PulsingSystemError,
    PulsingTimeoutError,
)


class Gate(pul.Actor):
    """Handles one message at a time, when it is let; keeps a log of its life."""

    def __init__(self, log: list[Any] | None = None) -> None:
        self.open = asyncio.Event()
        self.log: list[Any] = log if log is not None else []
        self.slow_end = 0.0

    def on_start(self) -> None:
        self.log.append("start")

    async def receive(self, msg: Any) -> Any:
        self.log.append(msg)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        return msg

    async def on_stop(self) -> None:
        if self.slow_end:
            await asyncio.sleep(self.slow_end)
        self.log.append("stop")


async def busy(system: pul.ActorSystem, gate: Gate, name: str | None = None) -> tuple[pul.ActorRef, list[Any]]:
    """An actor that handles message 0 while 1 and 2 wait."""
    ref = await system.spawn(gate, name=name)
    asks = [asyncio.create_task(ref.ask(n)) for n in range(3)]
    await eventually("the first runs", lambda: gate.log == ["start", 0])
    return ref, asks


def test_r4_drain_finishes_what_waits_and_refuses_the_rest() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            ref, asks = await busy(system, gate, "gate")
            draining = asyncio.create_task(system.drain("gate"))
            await asyncio.sleep(0)
            with pytest.raises(ActorStoppedError):
                await ref.ask("late")
            with pytest.raises(NameNotFoundError):
                await system.resolve("gate")
            assert not draining.done()
            gate.open.set()
            assert await asyncio.gather(*asks) == [0, 1, 2]
            await draining
            assert gate.log == ["start", 0, 1, 2, "stop"]
            with pytest.raises(ActorNotFoundError):
                await ref.ask("later")

    run(main())


def test_r4_stop_fails_what_waits_and_cancels_what_outlives_its_grace() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            ref, asks = await busy(system, gate)
            await system.stop(ref, grace=0.02)
            for outcome in await asyncio.gather(*asks, return_exceptions=True):
                assert isinstance(outcome, ActorStoppedError)
            assert gate.log == ["start", 0, "cancelled", "stop"]

    run(main())


def test_r4_a_harsher_ending_overrides_a_milder_one() -> None:
    async def main() -> None:
        async with local_system() as system:
            for first, then in (("drain", "stop"), ("drain", "kill"), ("stop", "kill"), ("stop", "stop")):
                gate = Gate()
                ref, asks = await busy(system, gate)
                watch = pul.watch(ref)
                mild = asyncio.create_task(system.drain(ref) if first == "drain" else system.stop(ref, 600))
                await asyncio.sleep(0)
                await (system.stop(ref, 0.01) if then == "stop" else system.kill(ref))
                await mild
                assert all(
                    isinstance(e, ActorStoppedError) for e in await asyncio.gather(*asks, return_exceptions=True)
                )
                assert gate.log == ["start", 0, "cancelled", "stop"]
                assert (await watch).reason == ("killed" if then == "kill" else "stopped")

    run(main())


def test_r4_kill_does_not_wait_for_on_stop_for_long(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local_system() as system:
            killed, overtaken = Gate(), Gate()
            killed.slow_end = overtaken.slow_end = 600
            await system.kill(await system.spawn(killed))
            ref = await system.spawn(overtaken)
            stopping = asyncio.create_task(system.stop(ref))
            await asyncio.sleep(0.01)
            await system.kill(ref)
            await stopping
            assert killed.log == overtaken.log == ["start"]

    with caplog.at_level(logging.ERROR, "pulsing"):
        run(main())
    assert caplog.text.count("on_stop of actor") == 2


def test_r4_functions_take_names_ids_references_and_proxies() -> None:
    async def main() -> None:
        await pul.init("127.0.0.1:0")
        system = pul.get_system()
        for end in (pul.drain, pul.stop, pul.kill):
            for spell in (
                lambda ref: "gate",
                lambda ref: ref.actor_id,
                lambda ref: str(ref.actor_id),
                lambda ref: ref,
                lambda ref: ref.as_any(),
            ):
                ref = await system.spawn(Gate(), name="gate")
                await end(spell(ref))
                assert system.local_actor_names() == []
        await pul.shutdown()

    run(main())


def test_a_request_to_end_what_is_no_actor_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local_system() as system:
            ref = await system.spawn(Gate())
            await system.stop(ref)
            nowhere = pul.ActorRef(system, pul.NodeId.generate(), pul.ActorId.generate())
            never = pul.ActorRef(system, system.node_id, pul.ActorId.generate())
            await system.stop(ref)  # it has ended, as it should
            for which in ("nobody", never, ref.actor_id, nowhere):
                await system.stop(which)
            with pytest.raises(TypeError, match="name, id, reference or proxy"):
                await system.stop(7)
            with pytest.raises(ValueError, match="grace=-1"):
                await system.stop(ref, -1)
            assert await (await system.spawn(Echo())).ask("x") == "x"

    with caplog.at_level(logging.WARNING, "pulsing"):
        run(main())
    assert caplog.text.count("there is no such actor") == 4


class Echo(pul.Actor):
    async def receive(self, msg: Any) -> Any:
        return msg


def test_a_system_ends_actors_also_from_another_loop() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            gate.open.set()
            ref = await system.spawn(gate, name="gate")
            await asyncio.to_thread(asyncio.run, system.stop("gate"))
            assert gate.log == ["start", "stop"]
            ref = await system.spawn(gate)
            ended = await asyncio.to_thread(asyncio.run, watch_and_kill(system, ref))
            assert ended.reason == "killed"

    async def watch_and_kill(system: pul.ActorSystem, ref: pul.ActorRef) -> pul.Ended:
        async with pul.watch(ref) as watch:
            await system.kill(ref)
            return await watch

    run(main())


@pul.remote
class Mortal:
    """Ends itself in several ways."""

    log: list[str]

    def __init__(self, system: pul.ActorSystem, log: list[str]) -> None:
        self.system = system
        self.log = log
        self.me: Any = None

    def on_start(self, actor_id: pul.ActorId) -> None:
        self.me = actor_id

    async def end(self, how: str) -> str:
        await getattr(self.system, how)(self.me)
        return "last words"

    async def hang(self) -> None:
        await asyncio.sleep(600)

    def exit(self, code: Any) -> None:
        raise SystemExit(code)

    async def exit_later(self, code: Any) -> None:
        await asyncio.sleep(0)
        raise SystemExit(code)

    @pul.blocking
    def exit_in_thread(self, code: Any) -> None:
        raise SystemExit(code)

    def on_stop(self) -> None:
        self.log.append("stop")


def test_an_actor_may_drain_stop_and_kill_itself() -> None:
    async def main() -> None:
        async with local_system() as system:
            for how in ("drain", "stop", "kill"):
                log: list[str] = []
                one = await Mortal.spawn(system, log, system=system)
                watch = pul.watch(one)
                assert await asyncio.wait_for(one.end(how), 10) == "last words"
                assert (await watch).reason == ("killed" if how == "kill" else "stopped")
                assert log == ["stop"]

    run(main())


@pytest.mark.parametrize("method", ["exit", "exit_later", "exit_in_thread"])
def test_sys_exit_in_a_method_ends_the_actor_only(method: str) -> None:
    async def main() -> None:
        async with local_system() as system:
            for code, reason in ((None, "stopped"), (0, "stopped"), (3, "failed")):
                one = await Mortal.spawn(system, [], system=system)
                watch, hanging = pul.watch(one), asyncio.create_task(one.hang())
                await asyncio.sleep(0)
                with pytest.raises(ActorStoppedError):
                    await getattr(one, method)(code)
                ended = await watch
                assert (ended.reason, ended.error) == (reason, "SystemExit: 3" if code else "")
                with pytest.raises(ActorStoppedError):
                    await hanging

    run(main())


@pytest.mark.parametrize("error", [ValueError("late"), SystemExit("late")], ids=["error", "exit"])
def test_r9_r12_what_a_blocking_method_raises_after_its_deadline_counts_and_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    @pul.remote(restart_policy="on_failure", max_restarts=0)
    class Late:
        @pul.blocking
        def fail(self) -> None:
            assert may_end.wait(30)
            raise error

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: astray.append(context))
        async with local_system() as system:
            late = await Late.spawn(system=system, name="late")
            watch = pul.watch(late)
            with pytest.raises(PulsingTimeoutError):
                await late.options(timeout=0.05).fail()
            may_end.set()
            ended = await watch
            assert (ended.reason, ended.error) == ("failed", f"{type(error).__name__}: late")

    may_end = threading.Event()
    astray: list[dict[str, Any]] = []
    run(main())
    assert "late.fail failed after its caller had gone" in caplog.text
    assert not astray


def test_sys_exit_in_constructors_and_hooks_does_not_end_the_process(caplog: pytest.LogCaptureFixture) -> None:
    class Leaver(pul.Actor):
        def __init__(self, where: str) -> None:
            self.where = where
            self.leave("constructor")

        def leave(self, here: str) -> None:
            if here == self.where:
                raise SystemExit(4)

        async def on_start(self, actor_id: pul.ActorId) -> None:
            await asyncio.sleep(0)
            self.leave("on_start")

        async def on_stop(self) -> None:
            await asyncio.sleep(0)
            self.leave("on_stop")

    async def main() -> None:
        async with local_system() as system:
            for where in ("constructor", "on_start"):
                with pytest.raises(PulsingSystemError, match=rf"{where} of actor leaver called sys.exit\(4\)"):
                    await system.spawn(lambda where=where: Leaver(where), name="leaver")
            await system.stop(await system.spawn(Leaver("on_stop"), name="leaver"))

    run(main())
    assert "on_stop of actor leaver" in caplog.text


def test_no_message_is_handled_after_stop_was_observed() -> None:
    handled: list[int] = []

    @pul.remote
    class Noter:
        def note(self, n: int) -> None:
            handled.append(n)

    async def main() -> None:
        async with local_system() as system:
            for round_ in range(20):
                one = await Noter.spawn(system=system)
                asks = [asyncio.create_task(one.note(n)) for n in range(20)]
                tells = [asyncio.create_task(one.note.tell(n)) for n in range(20)]
                for _ in range(round_):
                    await asyncio.sleep(0)
                await system.stop(one, 0)
                before = len(handled)
                await asyncio.gather(*asks, *tells, return_exceptions=True)
                assert len(handled) == before

    run(main())


def test_a_timer_and_a_slow_handler_do_not_hold_up_a_stop() -> None:
    @pul.remote
    class Ticker:
        def __init__(self) -> None:
            self.ticks = 0
            self.delayed: Any

        def on_start(self) -> None:
            self.delayed(0.01).tick()

        @pul.serial
        async def tick(self) -> None:
            self.ticks += 1
            self.delayed(0.01).tick()
            await asyncio.sleep(0.03)

    async def main() -> None:
        async with local_system() as system:
            instance = Ticker()
            ref = await system.spawn(instance)
            await eventually("ticks pile up", lambda: instance.ticks >= 3)
            await asyncio.wait_for(system.stop(ref), 3)
            ticks = instance.ticks
            await asyncio.sleep(0.05)
            assert instance.ticks == ticks

    run(main())


def test_r8_a_constructor_has_a_deadline_that_names_its_class_and_what_comes_late_is_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Made(pul.Actor):
        def on_stop(self) -> None:
            stopped.append(self)

    @pul.blocking
    class InThread(Made):
        def __init__(self) -> None:
            may_return.wait(30)
            made.append(self)

    async def factory() -> Made:
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append("factory")
        return Made()

    async def main() -> None:
        async with local_system(start_timeout=0.05) as system:
            with pytest.raises(
                PulsingTimeoutError, match=r"0.05 s: the constructor of actor slow .*factory\), .*start_time"
            ):
                await system.spawn(factory, name="slow")
            assert cleaned == ["factory"]
            with pytest.raises(
                PulsingTimeoutError, match=r"0.05 s: the constructor of actor slow .*InThread\), .*start_ti"
            ):
                await system.spawn(InThread, name="slow")
            # A spawn that is given up meanwhile is no other.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await system.spawn(InThread, name="slow")
            assert system.local_actor_names() == []
            assert not made
            may_return.set()
            await eventually("what came late is stopped", lambda: len(stopped) == 2)
            assert set(stopped) == set(made)
            assert system.local_actor_names() == []
            await system.spawn(InThread, name="slow")
        assert len(stopped) == 3

    may_return = threading.Event()
    made: list[Made] = []
    stopped: list[Made] = []
    cleaned: list[str] = []
    run(main())
    assert caplog.text.count("returned after its time: what it made is stopped") == 2


def test_r9_a_constructor_that_takes_too_long_on_the_way_up_is_a_failure_like_any() -> None:
    async def main() -> None:
        async with local_system(start_timeout=0.05) as system:
            instances = 0

            async def factory() -> Any:
                nonlocal instances
                instances += 1
                if instances == 2:
                    await asyncio.sleep(600)
                return Crash()

            ref = await system.spawn(factory, restart_policy="on_failure", min_backoff=0.001, max_backoff=0.002)
            with pytest.raises(RuntimeError, match="crash"):
                await ref.as_any().crash()
            assert await ref.as_any().ping() == "pong"
            assert instances == 3

    class Crash:
        def crash(self) -> None:
            raise RuntimeError("crash")

        def ping(self) -> str:
            return "pong"

    run(main())


def test_r8_on_start_has_a_deadline_that_names_the_actor() -> None:
    class Slow(pul.Actor):
        async def on_start(self, actor_id: pul.ActorId) -> None:
            await asyncio.sleep(600)

    class Late(pul.Actor):
        async def on_start(self, actor_id: pul.ActorId) -> None:
            raise TimeoutError("its own")

    async def main() -> None:
        async with local_system(start_timeout=0.05) as system:
            with pytest.raises(PulsingTimeoutError, match=r"0.05 s: on_start of actor slow"):
                await system.spawn(Slow(), name="slow")
            with pytest.raises(TimeoutError, match="its own"):
                await system.spawn(Late(), name="slow")
            assert system.local_actor_names() == []
        with pytest.raises(ValueError, match="start_timeout=0"):
            await pul.actor_system("127.0.0.1:0", start_timeout=0)
        with pytest.raises(ValueError, match="stop_timeout=-1"):
            await pul.actor_system("127.0.0.1:0", stop_timeout=-1)

    run(main())


def test_on_stop_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local_system(stop_timeout=0.05) as system:
            gate = Gate()
            gate.slow_end = 600
            await system.stop(await system.spawn(gate, name="gate"))
            assert gate.log == ["start"]

    run(main())
    assert "on_stop of actor gate took more than 0.05 s" in caplog.text


def test_an_actor_that_is_stopped_while_it_starts_ends_and_its_spawn_says_so() -> None:
    class Slow(Gate):
        async def on_start(self) -> None:
            await self.open.wait()
            self.log.append("start")

    async def main() -> None:
        async with local_system() as system:
            slow = Slow()
            spawning = asyncio.create_task(system.spawn(slow, name="slow"))
            await asyncio.sleep(0.01)
            stopping = asyncio.create_task(system.stop("slow"))
            await asyncio.sleep(0.01)
            slow.open.set()
            with pytest.raises(ActorStoppedError, match="while it started"):
                await spawning
            await stopping
            assert slow.log == ["start", "stop"]
            assert system.local_actor_names() == []

    run(main())
