"""Mailboxes, spawning, stopping and supervision: R3, R4, R8, R9, R10, R13."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runtime_util import cluster, eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import (
    ActorNotFoundError,
    ActorStoppedError,
    MailboxFull,
    NameNotFoundError,
    NameTakenError,
    PulsingBusinessError,
    PulsingRuntimeError,
    SystemShutDownError,
)


class Gate(pul.Actor):
    """Handles one message at a time, when it is let."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.seen: list[Any] = []

    async def receive(self, msg: Any) -> Any:
        self.seen.append(msg)
        await self.open.wait()
        return msg


def test_a_full_mailbox_makes_callers_wait_or_raises_with_no_wait() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            ref = await system.spawn(gate, mailbox=16)
            asks = [asyncio.create_task(ref.ask(n)) for n in range(17)]  # one runs, sixteen wait
            await eventually("the first runs", lambda: len(gate.seen) == 1)
            with pytest.raises(MailboxFull, match="16 messages wait"):
                await ref.ask("no", no_wait=True)
            with pytest.raises(MailboxFull):
                await ref.tell("no", no_wait=True)
            late = asyncio.create_task(ref.ask(17))
            told = asyncio.create_task(ref.tell(18))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not told.done()
            gate.open.set()
            await told
            assert await asyncio.gather(*asks, late) == list(range(18))
            await eventually("the tell is handled", lambda: gate.seen == list(range(19)))

    run(main())


def test_r3_the_bound_is_the_mailbox_s_whoever_fills_it() -> None:
    class Caller:
        async def send(self, ref: pul.ActorRef) -> Any:
            return await ref.ask("one", no_wait=True)

    async def main() -> None:
        async with cluster(2) as (here, there):
            gate = Gate()
            ref = await here.spawn(gate, name="gate", mailbox=16)
            far = (await there.resolve("gate", timeout=5)).ref
            callers = [(await system.spawn(Caller())).as_any() for system in (here, there) for _ in range(20)]
            refs = [ref] * 20 + [far] * 20
            asks = [asyncio.create_task(one.send(to)) for one, to in zip(callers, refs, strict=True)]
            # Each has one message out: no bound of its own would refuse any.
            await eventually("the rest is refused", lambda: sum(ask.done() for ask in asks) == 23)
            assert all(isinstance(ask.exception(), MailboxFull) for ask in asks if ask.done())
            gate.open.set()
            ended = await asyncio.gather(*asks, return_exceptions=True)
            assert ended.count("one") == 17

    run(main())


def test_a_cancelled_caller_frees_its_place() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            ref = await system.spawn(gate, mailbox=16)
            asks = [asyncio.create_task(ref.ask(n)) for n in range(17)]
            await eventually("the first runs", lambda: len(gate.seen) == 1)
            asks[5].cancel()
            await asyncio.gather(asks[5], return_exceptions=True)
            last = asyncio.create_task(ref.ask(99, no_wait=True))
            gate.open.set()
            assert await last == 99
            assert 5 not in gate.seen

    run(main())


def test_stop_passes_waiting_messages_and_frees_the_name() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            ref = await system.spawn(gate, name="gate")
            asks = [asyncio.create_task(ref.ask(n)) for n in range(3)]
            await eventually("the first runs", lambda: gate.seen == [0])
            stopping = asyncio.create_task(system.stop("gate"))
            with pytest.raises(ActorStoppedError):
                await asks[1]
            with pytest.raises(ActorStoppedError):
                await ref.ask("late")
            gate.open.set()
            assert await asks[0] == 0  # a running handler may finish
            await stopping
            with pytest.raises(ActorNotFoundError):
                await ref.ask("later")
            with pytest.raises(NameNotFoundError):
                await system.resolve("gate")
            await system.spawn(Gate(), name="gate")
            await system.stop("nobody")

    run(main())


def test_kill_cancels_running_handlers() -> None:
    async def main() -> None:
        async with local_system() as system:
            gate = Gate()
            ref = await system.spawn(gate)
            ask = asyncio.create_task(ref.ask(1))
            await eventually("it runs", lambda: gate.seen == [1])
            await system.kill(ref)
            with pytest.raises(ActorStoppedError):
                await ask

    run(main())


def test_an_actor_may_stop_itself() -> None:
    @pul.remote
    class Mortal:
        def __init__(self, system: pul.ActorSystem) -> None:
            self.system = system

        async def end(self) -> str:
            await self.system.stop("mortal")
            return "last words"

        async def leave(self) -> None:
            raise SystemExit

    async def main() -> None:
        async with local_system() as system:
            one = await Mortal.spawn(system, system=system, name="mortal")
            assert await one.end() == "last words"
            assert system.local_actor_names() == []
            two = await Mortal.spawn(system, system=system, name="mortal")
            with pytest.raises(ActorStoppedError):
                await two.leave()
            await eventually("it is gone", lambda: system.local_actor_names() == [])

    run(main())


def test_spawn_raises_what_constructor_and_on_start_raise_and_frees_the_name() -> None:
    class Bad(pul.Actor):
        def __init__(self, where: str) -> None:
            self.where = where
            if where == "constructor":
                raise ValueError(where)

        async def on_start(self, actor_id: pul.ActorId) -> None:
            if self.where == "on_start":
                raise ValueError(self.where)

    async def main() -> None:
        async with local_system() as system:
            for where in ("constructor", "on_start"):
                with pytest.raises(ValueError, match=where):
                    await system.spawn(lambda where=where: Bad(where), name="bad")
                with pytest.raises(NameNotFoundError):
                    await system.resolve("bad")
            ref = await system.spawn(Bad("nowhere"), name="bad")
            with pytest.raises(NameTakenError, match="bad"):
                await system.spawn(Bad("nowhere"), name="bad")
            with pytest.raises(NameTakenError):
                await system.spawn(Bad("nowhere"), name="actors/bad")
            assert (await system.resolve("actors/bad")).ref == ref

    run(main())


def test_hooks_run_in_order_and_with_or_without_the_id() -> None:
    log: list[Any] = []

    class Async(pul.Actor):
        async def on_start(self, actor_id: pul.ActorId) -> None:
            log.append(actor_id)

        async def on_stop(self) -> None:
            log.append("stopped")

    @pul.remote
    class Bare:
        def on_start(self) -> None:
            log.append("bare")

        def metadata(self) -> dict[str, str]:
            return {"kind": "bare"}

    async def main() -> None:
        async with local_system() as system:
            ref = await system.spawn(Async())
            assert log == [ref.actor_id]
            await system.stop(ref)
            assert log[1:] == ["stopped"]
            await Bare.spawn(system=system, name="bare")
            assert log[2:] == ["bare"]
            assert (await system.get_named_instances("bare"))[0]["metadata"] == {"kind": "bare"}

    run(main())


@pul.remote(restart_policy="on-failure", min_backoff=0.001, max_backoff=0.01, max_restarts=2)
class Fragile:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def crash(self) -> None:
        raise RuntimeError("crash")

    def refuse(self) -> None:
        raise PulsingBusinessError(404, "no such thing", "details")

    async def wait(self) -> None:
        await asyncio.sleep(60)


def test_a_failure_reaches_the_caller_and_restarts_the_actor() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Fragile.spawn(system=system, name="fragile")
            assert [await one.count(), await one.count()] == [1, 2]
            with pytest.raises(RuntimeError, match="crash"):
                await one.crash()
            assert await one.count() == 1  # waited in the mailbox for the new instance
            assert (await system.resolve("fragile")).actor_id == one.actor_id

    run(main())


def test_business_errors_and_cancellation_are_no_failures() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Fragile.spawn(system=system)
            assert await one.count() == 1
            with pytest.raises(PulsingBusinessError, match=r"\[404\] no such thing") as caught:
                await one.refuse()
            assert (caught.value.code, caught.value.details) == (404, "details")
            task = asyncio.create_task(one.wait())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await one.count() == 2

    run(main())


def test_a_restart_ends_the_other_handlers_and_a_spent_budget_the_actor() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Fragile.spawn(system=system, name="fragile")
            waiting = asyncio.create_task(one.wait())
            await asyncio.sleep(0)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="crash"):
                    await one.crash()
            with pytest.raises(ActorStoppedError):
                await waiting
            await eventually("the actor stops", lambda: system.local_actor_names() == [])

    run(main())


def test_supervision_wants_a_known_policy_and_a_factory() -> None:
    async def main() -> None:
        async with local_system() as system:
            with pytest.raises(ValueError, match="sometimes"):
                await system.spawn(Gate, restart_policy="sometimes")
            with pytest.raises(TypeError, match="factory"):
                await system.spawn(Gate(), restart_policy="always")
            await system.spawn(Gate, restart_policy="always")
            with pytest.raises(TypeError, match="cannot be an actor"):
                await system.spawn(object())
            with pytest.raises(ValueError, match="min_backoff"):
                pul.remote(min_backoff=5, max_backoff=1)

    run(main())


def test_init_is_idempotent_with_the_same_arguments_only() -> None:
    async def main() -> None:
        assert not pul.is_initialized()
        with pytest.raises(PulsingRuntimeError, match="not initialized"):
            pul.get_system()
        first, second = await asyncio.gather(pul.init("127.0.0.1:0"), pul.init("127.0.0.1:0"))
        assert first is second is pul.get_system() is await pul.init("127.0.0.1:0")
        with pytest.raises(PulsingRuntimeError, match="other arguments"):
            await pul.init("127.0.0.1:0", cluster="another")
        await pul.shutdown()
        await pul.shutdown()
        assert not pul.is_initialized()
        with pytest.raises(SystemShutDownError):
            await first.spawn(Gate())

    run(main())


def test_a_loop_that_ends_takes_its_system_along_and_the_next_loop_starts_afresh() -> None:
    async def forgetful() -> pul.ActorSystem:
        system = await pul.init("127.0.0.1:0")
        await system.spawn(Gate(), name="gate")
        return system

    for _ in range(2):
        system = run(forgetful())
        assert system.is_shut_down
        assert not pul.is_initialized()


def test_bad_settings_are_refused_by_name() -> None:
    async def main() -> None:
        for settings, word in (
            ({"seeds": "127.0.0.1:1"}, "seeds"),
            ({"join_timeout": -1}, "join_timeout"),
            ({"passphrase": "x", "insecure": True}, "passphrase"),
            ({"addr": "nonsense"}, "nonsense"),
            ({"head_addr": "127.0.0.1:1", "is_head_node": True}, "Cannot set both"),
        ):
            with pytest.raises(ValueError, match=word):
                await pul.init(**settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout=0"):
            pul.ActorRef.as_any(None).options(timeout=0)  # type: ignore[arg-type]

    run(main())


def test_mount_works_inside_the_loop_and_from_a_thread() -> None:
    class Plain:
        def hello(self) -> str:
            return "hello"

    async def main() -> None:
        await pul.init("127.0.0.1:0")
        pul.mount(Plain(), name="inside")
        await asyncio.to_thread(pul.mount, Plain(), name="outside")
        for name in ("inside", "outside"):
            assert await (await pul.resolve(name)).hello() == "hello"
        await asyncio.to_thread(pul.unmount, "outside")
        pul.unmount("inside")
        await eventually("both are gone", lambda: pul.get_system().local_actor_names() == [])
        await pul.shutdown()
        pul.unmount("inside")

    run(main())


def test_admin_numbers_are_true() -> None:
    from pulsing import admin

    async def main() -> None:
        async with local_system() as system:
            one = await Fragile.spawn(system=system, name="fragile")
            for _ in range(10):
                await one.count()
            listed = {actor["name"]: actor for actor in await admin.list_actors(system)}
            assert listed["fragile"]["class"].endswith("test_life.Fragile")
            assert not listed["fragile"]["internal"]
            metrics = await admin.get_metrics(system)
            assert metrics["messages_total"] >= 10
            assert metrics["actors_count"] == 2
            assert (await admin.get_node_info(system))["node_id"] == str(system.node_id)
            assert (await admin.health_check(system))["status"] == "healthy"
            assert (await admin.ping(system))["node_id"] == str(system.node_id)

    run(main())
