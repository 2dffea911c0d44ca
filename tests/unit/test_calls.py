"""Calls inside one process: R1, R2, R5, R7, R11, R14, R15."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from runtime_util import cluster, eventually, local_system, run

import pulsing as pul
from pulsing.core import ActorProxy, Message
from pulsing.exceptions import CallCancelledError, DeadlockError, PulsingTimeoutError, PulsingUnsupportedError


class Panic(BaseException):
    """As a panic in Rust code arrives: no Exception."""


@pul.remote
class Subject:
    label = "a class attribute"

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.log: list[Any] = []

    def add(self, n: int = 1) -> int:
        self.value += n
        return self.value

    def note(self, what: Any) -> None:
        self.log.append(what)

    def get_log(self) -> list[Any]:
        return self.log

    def same(self, thing: Any) -> Any:
        return thing

    async def sleep(self, seconds: float) -> str:
        self.log.append("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        return "slept"

    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    def fail(self) -> None:
        raise KeyError("missing")

    def cancel_inline(self) -> None:
        raise asyncio.CancelledError

    def panic(self) -> None:
        raise Panic("attempt to divide by zero")

    async def panic_later(self) -> None:
        await asyncio.sleep(0)
        raise Panic("attempt to divide by zero")

    @pul.blocking
    def panic_in_thread(self) -> None:
        raise Panic("attempt to divide by zero")

    async def current_task(self) -> bool:
        before = asyncio.current_task()
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        return asyncio.current_task() is before

    async def call_with_limit(self, other: ActorProxy, limit: float) -> float:
        begun = time.monotonic()
        with pytest.raises(PulsingTimeoutError):
            await other.sleep.options(timeout=limit)(30)
        return time.monotonic() - begun

    def _secret(self) -> None: ...


def test_sync_async_and_attributes() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(5, system=system)
            assert await one.add() == 6
            assert await one.add(n=2) == 8
            assert await one.sleep(0) == "slept"
            assert await one.as_any().value == 8
            assert await asyncio.create_task(one.add()) == 9
            assert await asyncio.gather(one.add(), one.add()) == [10, 11]
            assert await asyncio.wait_for(one.add(), 5) == 12
            await one.current_task()

    run(main())


def test_unknown_and_private_names_are_attribute_errors() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            with pytest.raises(AttributeError, match=r"nothing.*add"):
                _ = one.nothing
            with pytest.raises(AttributeError):
                _ = one._secret
            with pytest.raises(AttributeError, match="has no method 'nothing'"):
                await one.as_any().nothing()
            with pytest.raises(AttributeError, match="is a method"):
                await one.as_any().add

    run(main())


def test_arguments_pass_by_reference() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            thing = object()
            assert await one.same(thing) is thing

    run(main())


def test_debug_copy_catches_what_will_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSING_DEBUG_COPY", "1")

    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            thing = ["x"]
            copy = await one.same(thing)
            assert copy == thing
            assert copy is not thing
            with pytest.raises(TypeError, match="cannot send"):
                await one.same(asyncio.get_running_loop())

    run(main())


def test_errors_keep_type_and_do_not_end_the_actor() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            with pytest.raises(KeyError, match="missing"):
                await one.fail()
            assert await one.add() == 1

    run(main())


def test_deadline_cancels_the_handler() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            with pytest.raises(PulsingTimeoutError) as caught:
                await one.sleep.options(timeout=0.05)(30)
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.duration_ms == 50
            await eventually("the handler is cancelled", lambda: "cancelled" in system.cells()[-1].instance.log)

    run(main())


def test_the_system_sets_the_default_deadline_and_none_must_be_asked_for() -> None:
    async def main() -> None:
        async with local_system(default_timeout=0.05) as system:
            one = await Subject.spawn(system=system)
            with pytest.raises(PulsingTimeoutError):
                await one.sleep(30)
            assert await one.options(timeout=None).sleep(0.1) == "slept"
        assert pul.SystemConfig().default_timeout == 30.0

    run(main())


def test_nested_calls_inherit_the_remainder() -> None:
    async def main() -> None:
        async with local_system() as system:
            one, two = await Subject.spawn(system=system), await Subject.spawn(system=system)
            begun = time.monotonic()
            with pytest.raises(PulsingTimeoutError):
                await one.call_with_limit.options(timeout=0.1)(two, 30.0)
            assert time.monotonic() - begun < 5
            await eventually("the inner handler is cancelled", lambda: "cancelled" in system.cells()[-1].instance.log)

    run(main())


def test_cancelling_the_caller_cancels_the_handler() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            task = asyncio.create_task(one.sleep(30))
            await eventually("the handler runs", lambda: "begun" in system.cells()[-1].instance.log)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually("the handler is cancelled", lambda: "cancelled" in system.cells()[-1].instance.log)

    run(main())


@pytest.mark.parametrize("remote", [False, True])
def test_a_call_cancelled_before_its_handler_began_leaves_nothing_behind(remote: bool) -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            one = await Subject.spawn(system=there, name="one")
            caller = await here.resolve("one", timeout=5) if remote else one
            # Whether the cancellation meets the handler before its first step is a matter of the scheduler's: many
            # pauses between call and cancellation find it.
            for turns in range(300):
                task = asyncio.ensure_future(caller.sleep(30))
                for _ in range(turns % 30 + 1):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await asyncio.wait_for(caller.add(), 5) == 1
            cell = there._names["one"]
            await eventually("no handler runs", lambda: cell.handlers.idle)

    run(main())


def test_a_handler_that_cancels_itself_does_not_cancel_its_caller() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            with pytest.raises(CallCancelledError):
                await one.cancel_itself()

    run(main())


@pytest.mark.parametrize("method", ["panic", "panic_later", "panic_in_thread"])
def test_what_is_no_exception_reaches_the_caller_too(method: str) -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            with pytest.raises(Panic, match="divide by zero"):
                await asyncio.wait_for(getattr(one, method)(), 5)
            assert await one.add() == 1

    run(main())


def test_an_inline_method_that_raises_cancellation_costs_nobody_else() -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            one = await Subject.spawn(system=there, name="one")
            with pytest.raises(CallCancelledError, match="cancel_inline"):
                await one.cancel_inline()
            far = await here.resolve("one", timeout=5)
            calls = [far.cancel_inline() if n % 2 else far.add() for n in range(64)]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
            assert results[::2] == list(range(1, 33))
            assert {type(result) for result in results[1::2]} == {CallCancelledError}
            with pytest.raises(pul.PulsingActorError, match=r"Panic: .*divide by zero"):
                await far.panic()

    run(main())


def test_messages_start_in_arrival_order_whatever_their_kind() -> None:
    @pul.remote
    class Mixed:
        def __init__(self) -> None:
            self.log: list[int] = []

        def quick(self, n: int) -> None:
            self.log.append(n)

        async def slow(self, n: int) -> None:
            self.log.append(n)
            await asyncio.sleep(0)

        def get(self) -> list[int]:
            return self.log

    async def main() -> None:
        async with local_system() as system:
            one = await Mixed.spawn(system=system)
            for n in range(200):
                await one.tell("slow" if n % 3 else "quick", n)
            assert await one.get() == list(range(200))
            await asyncio.gather(*((one.slow if n % 2 else one.quick)(n) for n in range(200, 300)))
            assert await one.get() == list(range(300))

    run(main())


def test_async_methods_interleave_and_serial_ones_do_not() -> None:
    class Base:
        def __init__(self) -> None:
            self.inside = self.most = 0

        async def visit(self) -> int:
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0.001)
            self.inside -= 1
            return self.most

    @pul.remote
    class Free(Base): ...

    @pul.remote
    @pul.serial
    class Serial(Base): ...

    async def main() -> None:
        async with local_system() as system:
            free, serial = await Free.spawn(system=system), await Serial.spawn(system=system)
            assert max(await asyncio.gather(*(free.visit() for _ in range(10)))) == 10
            assert max(await asyncio.gather(*(serial.visit() for _ in range(10)))) == 1
            bounded = ActorProxy(await system.spawn(Base, max_concurrency=3))
            assert max(await asyncio.gather(*(bounded.visit() for _ in range(10)))) == 3

    run(main())


def test_r5_a_wait_that_only_a_message_behind_it_could_end_fails_naming_both_calls() -> None:
    class Base:
        def __init__(self) -> None:
            self.opened = asyncio.Event()

        async def hold(self) -> str:
            await self.opened.wait()
            return "held"

        async def release(self) -> None:
            self.opened.set()

    @pul.remote
    class Free(Base): ...

    @pul.remote
    @pul.serial
    class Serial(Base): ...

    async def main() -> None:
        async with cluster(2) as (here, there):
            free = await Free.spawn(system=here)
            assert await asyncio.gather(free.hold(), free.release()) == ["held", None]
            near = await Serial.spawn(system=here, name="door")
            far = await Serial.resolve("door", system=there, timeout=5)
            behind = r"door.release, waiting for door.hold to return"
            # From afar either end may be the first to say so.
            for door, text in ((near, behind), (far, r"door\.release")):
                calls = door.options(timeout=0.2).hold(), door.options(timeout=0.1).release()
                ended = await asyncio.gather(*calls, return_exceptions=True)
                for error, words in zip(ended, (r"door\.hold", text), strict=True):
                    assert isinstance(error, PulsingTimeoutError), ended
                    assert re.search(words, str(error)), ended
                    assert error.state_changed == "maybe"

    run(main())


def test_receive_runs_one_at_a_time_and_answers_messages() -> None:
    class Echo(pul.Actor):
        def __init__(self) -> None:
            self.busy = False

        async def receive(self, msg: Any) -> Any:
            assert not self.busy
            self.busy = True
            await asyncio.sleep(0)
            self.busy = False
            return msg

    async def main() -> None:
        async with local_system() as system:
            ref = await system.spawn(Echo(), name="echo")
            assert await asyncio.gather(*(ref.ask(n) for n in range(20))) == list(range(20))
            proxy = await system.resolve("echo")
            assert await proxy.ask(Message.from_json("Hello", {"a": 1})) == Message.from_json("Hello", {"a": 1})
            await ref.tell("nobody answers")

    run(main())


def test_an_actor_without_receive_says_so() -> None:
    class Methods(pul.Actor):
        def hello(self) -> str:
            return "hello"

    async def main() -> None:
        async with local_system() as system:
            ref = await system.spawn(Methods())
            with pytest.raises(PulsingUnsupportedError, match="hello"):
                await ref.ask("x")
            assert await ref.as_type(Methods).hello() == "hello"
            plain = await Subject.spawn(system=system)
            with pytest.raises(PulsingUnsupportedError, match="add"):
                await plain.ask("x")

    run(main())


@pul.remote
class Node:
    """Calls along a path of serial or free methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.peers: dict[str, ActorProxy] = {}

    def meet(self, peers: dict[str, ActorProxy]) -> None:
        self.peers = peers

    @pul.serial
    async def serial(self, path: list[str]) -> str:
        return await self.peers[path[0]].serial(path[1:]) if path else self.name

    async def free(self, path: list[str]) -> str:
        return await self.peers[path[0]].free(path[1:]) if path else self.name

    @pul.serial
    async def serial_then_free(self) -> str:
        return await self.peers[self.name].free([])

    async def free_then_sync(self) -> str:
        return await self.peers[self.name].own_name()

    def own_name(self) -> str:
        return self.name

    @pul.serial
    async def later(self, done: asyncio.Future[str]) -> None:
        async def call() -> None:
            done.set_result(await self.peers[self.name].serial([]))

        self.task = asyncio.create_task(call())


def test_a_cycle_of_serial_methods_fails_at_once_naming_the_chain() -> None:
    async def main() -> None:
        async with local_system() as system:
            peers = {name: await Node.spawn(name, system=system, name=name) for name in "abc"}
            for node in peers.values():
                await node.meet(peers)
            with pytest.raises(DeadlockError, match="a -> b -> c -> a"):
                await peers["a"].serial(["b", "c", "a"])
            with pytest.raises(DeadlockError, match="a -> a"):
                await peers["a"].serial(["a"])
            assert await peers["a"].serial(["b", "c"]) == "c"
            # Methods that interleave may come back to where they came from.
            assert await peers["a"].free(["b", "a", "b"]) == "b"
            assert await peers["a"].serial_then_free() == "a"
            assert await peers["a"].free_then_sync() == "a"
            # A task that outlives the serial turn it was started in holds nothing.
            done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            await peers["a"].later(done)
            assert await done == "a"

    run(main())


def test_a_loop_of_local_calls_lets_others_run() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)
            task = asyncio.create_task(asyncio.sleep(0, "turn"))
            for _ in range(100):
                await one.add()
            assert task.done()

    run(main())


def test_calling_from_another_loop_goes_through_its_own_bridge() -> None:
    async def main() -> None:
        async with local_system() as system:
            one = await Subject.spawn(system=system)

            async def elsewhere() -> int:
                return await one.add(3)

            assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) == 3
            assert await one.add() == 4

    run(main())


def test_a_class_stays_usable() -> None:
    assert Subject(3).add() == 4
    assert Subject.label == "a class attribute"
    assert isinstance(Subject(), Subject)

    class More(Subject):  # type: ignore[misc,valid-type]
        def more(self) -> int:
            return self.add(10)

    assert More().more() == 10
    with pytest.raises(TypeError, match="goes on a class"):
        pul.remote(lambda: None)  # type: ignore[call-overload]


def test_delayed_sends_to_itself_later_and_can_be_taken_back() -> None:
    @pul.remote
    class Ticker:
        def __init__(self) -> None:
            self.ticks = 0

        def tick(self) -> None:
            self.ticks += 1

        def start(self) -> None:
            self.delayed(0.01).tick()  # type: ignore[attr-defined]
            self.delayed(0.01).tick().cancel()  # type: ignore[attr-defined]

        def count(self) -> int:
            return self.ticks

    async def main() -> None:
        async with local_system() as system:
            one = await Ticker.spawn(system=system)
            await one.start()
            assert await one.count() == 0

            async def ticked() -> bool:
                return bool(await one.count() == 1)

            await eventually("one tick", ticked)

    run(main())


def test_a_blocking_method_does_not_stall_the_loop() -> None:
    import threading

    @pul.remote
    class Blocker:
        @pul.blocking
        def wait(self, gate: threading.Event) -> str:
            assert gate.wait(20)
            return threading.current_thread().name

        def quick(self) -> str:
            return "quick"

    async def main() -> None:
        async with local_system() as system:
            one = await Blocker.spawn(system=system)
            gate = threading.Event()
            task = asyncio.create_task(one.wait(gate))
            await asyncio.sleep(0.01)
            assert not task.done()
            # The actor itself stays busy until the thread returns (R12).
            with pytest.raises(PulsingTimeoutError):
                await one.quick.options(timeout=0.05)()
            gate.set()
            assert await task == "pulsing-blocking"
            assert await one.quick() == "quick"
        with pytest.raises(TypeError, match="async already"):
            pul.blocking(asyncio.sleep)

    run(main())
