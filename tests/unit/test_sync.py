"""`pul.sync`, for code without an event loop: R1, R5, R6, R11, R13."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from runtime_util import LIMIT, eventually, run

import pulsing as pul
from pulsing.core import Message, StreamMessage
from pulsing.core._propagate import chosen
from pulsing.exceptions import (
    CallCancelledError,
    ConfigError,
    DeadlockError,
    MailboxFull,
    NameNotFoundError,
    NameTakenError,
    PulsingRuntimeError,
    PulsingTimeoutError,
)


@pytest.fixture
def system() -> Iterator[pul.sync.System]:
    with pul.sync.init("127.0.0.1:0") as running:
        yield running


@pul.remote
class Subject:
    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.begun = 0
        self.closed = 0

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    async def slow(self, seconds: float) -> str:
        self.begun += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.closed += 1
        return "slept"

    async def numbers(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
        finally:
            self.closed += 1

    async def broken(self) -> AsyncIterator[int]:
        yield 1
        raise KeyError("in the middle")

    async def total(self, items: Any) -> int:
        total = 0
        async for n in items:
            total += n
        return total

    def fail(self) -> None:
        raise ValueError("as it was raised")

    def get_closed(self) -> int:
        return self.closed

    async def myself(self) -> Any:
        return await pul.resolve("subject")

    async def meet(self, peer: Any) -> int:
        return int(await peer.add(1))

    @pul.blocking
    def call_back(self, peer: Any) -> int:
        return int(pul.sync.proxy(peer).add(1))


class Receiver(pul.Actor):
    async def receive(self, msg: Any) -> Any:
        if msg == "stream":
            message, writer = StreamMessage.create("Numbers")
            for n in range(3):
                await writer.write(n)
            writer.close()
            return message
        return msg


def soon(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        time.sleep(0.005)


def test_calls_block_and_return_values_and_errors(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject, 5, name="subject")
    assert one.add(2) == 7
    assert pul.sync.resolve("subject", cls=Subject).add(1) == 8
    assert pul.sync.refer(one.ref.actor_id).add(1) == 9
    assert one.as_any().value.get() == 9
    with pytest.raises(ValueError, match="as it was raised"):
        one.fail()
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        one.nothing()
    one.add.tell(10)
    one.tell("add", 10)
    soon("both tells are handled", lambda: one.add(0) == 29)
    with pytest.raises(NameTakenError):
        pul.sync.spawn(Subject, name="subject")
    for end in (pul.sync.stop, pul.sync.drain, pul.sync.kill):
        end("subject" if end is pul.sync.kill else one)
        with pytest.raises(NameNotFoundError):
            pul.sync.resolve("subject")
        one = pul.sync.spawn(Subject, name="subject")
    assert [member["me"] for member in system.members()] == [True]
    assert pul.sync.run(pul.get_system().all_named_actors)


def test_r9_ends_are_watched_and_fates_linked(system: pul.sync.System) -> None:
    one, other, third = (pul.sync.spawn(Subject) for _ in range(3))
    with pytest.raises(TimeoutError):
        pul.sync.watch(one, 0.05)
    pul.sync.link(one, other)
    pul.sync.link(other, third)
    pul.sync.unlink(other, third)
    pul.sync.kill(one)
    assert pul.sync.watch(one).reason == "killed"
    assert pul.sync.watch(other.ref, 10.0).reason == "failed"
    assert third.add(1) == 1
    threading.Timer(0.05, pul.sync.stop, [third]).start()
    assert pul.sync.watch(third.awaiting, 10.0) == pul.core.Ended(third.ref, "stopped")


def test_messages_and_their_streams(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Receiver())
    assert one.ask({"a": 1}) == {"a": 1}
    assert one.ask(Message("Kind", b"body")) == Message("Kind", b"body")
    stream = one.ask("stream")
    assert stream.msg_type == "Numbers"
    assert list(stream) == [0, 1, 2]
    one.tell("nobody waits")
    with pytest.raises(TypeError, match="constructor arguments"):
        pul.sync.spawn(Receiver, 1)


def test_r6_streams_iterate_and_end_promptly(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject)
    assert list(one.numbers(1000)) == list(range(1000))
    got = []
    with pytest.raises(KeyError, match="in the middle"):
        got.extend(one.broken())
    for n in one.numbers(1_000_000):
        if n == 100:
            break
    soon("a dropped stream ends its producer", lambda: one.get_closed() == 2)
    with one.numbers(1_000_000) as stream:
        assert next(stream) == 0
    assert one.get_closed() == 3
    assert list(stream) == []


def test_r6_generators_and_streams_are_arguments_too(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject)
    assert one.total(n for n in range(100)) == 4950
    assert one.total(items=one.numbers(10)) == 45


def test_r5_deadlines_and_options(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject)
    for call in (one.slow.options(timeout=0.05), one.options(timeout=0.05).slow):
        with pytest.raises(PulsingTimeoutError):
            call(60)
    soon("both handlers are cancelled", lambda: one.get_closed() == 2)
    held = pul.sync.spawn(Receiver(), mailbox=16)
    assert held.ask("x", timeout=5, no_wait=True) == "x"
    with pytest.raises(ValueError, match="timeout=0"):
        one.options(timeout=0)
    assert issubclass(MailboxFull, PulsingRuntimeError)


def test_proxies_travel_as_what_the_other_side_can_use(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject, name="subject")
    other = pul.sync.spawn(Subject)
    itself = one.myself()
    assert isinstance(itself, pul.sync.Proxy)
    assert itself == one.as_any()
    assert other.meet(one) == 1
    assert other.call_back(one) == 2
    assert pul.sync.proxy(one) is one
    assert pul.sync.proxy(one.ref).add(1) == 3
    assert isinstance(one.awaiting, pul.ActorProxy)


def test_r11_a_blocking_method_that_waits_on_itself_is_a_deadlock(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject)
    with pytest.raises(DeadlockError):
        one.call_back(one)


def test_many_threads_call_at_once_each_with_its_own_context(system: pul.sync.System) -> None:
    tag: ContextVar[int] = ContextVar("test_sync_tag")
    before = dict(chosen.variables), chosen.active
    pul.propagate(tag)

    @pul.remote
    class Tagged:
        async def get(self) -> int:
            await asyncio.sleep(0)
            return tag.get()

    one = pul.sync.spawn(Tagged)
    wrong: list[Any] = []

    def work(number: int) -> None:
        tag.set(number)
        for _ in range(50):
            seen = one.get()
            if seen != number:
                wrong.append((number, seen))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    chosen.variables, chosen.active = before
    assert not wrong


def test_init_is_idempotent_with_the_same_arguments_only() -> None:
    with pytest.raises(PulsingRuntimeError, match=r"pul\.sync\.init"):
        pul.sync.resolve("anything")
    with pul.sync.init("127.0.0.1:0") as system:
        assert pul.sync.init("127.0.0.1:0").node_id == system.node_id
        with pytest.raises(PulsingRuntimeError, match="other arguments"):
            pul.sync.init("127.0.0.1:0", default_timeout=5.0)
    pul.sync.shutdown()
    with pytest.raises(ConfigError):
        pul.sync.init("127.0.0.1:0", seeds="not a list")
    with pytest.raises(PulsingRuntimeError, match=r"pul\.sync\.init"):
        pul.sync.resolve("anything")
    # A system that failed to start leaves no thread behind, and one that was shut down none either.
    soon("the loop's thread is gone", lambda: "pulsing-loop" not in {thread.name for thread in threading.enumerate()})
    with pul.sync.init("127.0.0.1:0"):
        assert pul.sync.spawn(Subject, 1).add(1) == 2


def test_inside_a_running_loop_it_refuses_in_words(system: pul.sync.System) -> None:
    one = pul.sync.spawn(Subject)

    async def main() -> None:
        calls: list[Callable[[], Any]] = [
            lambda: one.add(1),
            lambda: pul.sync.init("127.0.0.1:0"),
            lambda: pul.sync.resolve("subject"),
            lambda: pul.sync.spawn(Subject),
            pul.sync.shutdown,
        ]
        for call in calls:
            with pytest.raises(PulsingRuntimeError, match="blocking call inside a running event loop"):
                call()

    run(main())
    assert one.add(1) == 1


def test_threads_call_actors_of_a_system_that_a_loop_runs() -> None:
    async def main() -> None:
        await pul.init("127.0.0.1:0")
        try:
            await Subject.spawn(5, name="subject")

            def work() -> tuple[int, int, list[int]]:
                one = pul.sync.resolve("subject")
                born = pul.sync.spawn(Subject, 1)
                assert pul.sync.init("127.0.0.1:0").node_id == pul.get_system().node_id
                return one.add(1), born.add(1), list(one.numbers(3))

            assert await asyncio.to_thread(work) == (6, 2, [0, 1, 2])
            assert await (await Subject.resolve("subject")).add(1) == 7
        finally:
            await pul.shutdown()

    run(main())


def test_a_call_whose_loop_ends_fails_instead_of_waiting_for_ever() -> None:
    failed: list[BaseException] = []

    async def main() -> None:
        await pul.init("127.0.0.1:0")
        one = await Subject.spawn(name="subject")
        instance = pul.get_system().cells()[-1].instance

        def work() -> None:
            try:
                pul.sync.proxy(one).options(timeout=None).slow(600)
            except BaseException as error:  # noqa: BLE001 - looked at below
                failed.append(error)

        threading.Thread(target=work, daemon=True).start()
        await eventually("it waits", lambda: bool(instance.begun))

    run(main())
    soon("the call ends with its loop", lambda: bool(failed))
    assert isinstance(failed[0], (pul.ActorStoppedError, CallCancelledError))


# `print` writes a line and its end in two steps, and the actor's thread may print between them.
PROGRAM = """
import sys, time, asyncio
import pulsing as pul

def say(line):
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()

@pul.remote
class Sleeper:
    begun = False
    async def sleep(self, seconds):
        say("sleeping")
        self.begun = True
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            say("cancelled")
            raise
    def ping(self):
        return "pong"
    def busy(self):
        return self.begun
    def on_stop(self):
        say("stopped")

if __name__ == "__main__":
    pul.sync.init("127.0.0.1:0")
    one = pul.sync.spawn(Sleeper, name="sleeper")
"""


IN_FLIGHT = """
import contextlib, threading
def sleep():
    with contextlib.suppress(pul.ActorStoppedError):
        one.sleep(60)
threading.Thread(target=sleep, daemon=True).start()
while not one.busy():
    time.sleep(0.01)
say(one.ping())
"""


def program(rest: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(PROGRAM) + textwrap.indent(rest, "    ")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )


@pytest.mark.parametrize(
    "rest",
    [
        "say(one.ping())\n",
        IN_FLIGHT,
        "say(one.ping())\nsys.exit(0)\n",
    ],
    ids=["end", "work in flight", "sys.exit"],
)
def test_r13_a_program_that_just_ends_exits_cleanly(rest: str) -> None:
    with program(rest) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert "pong" in out
    # Actors get to say goodbye.
    assert "stopped" in out
    assert err == ""


def test_an_interrupt_cancels_the_call_that_waits() -> None:
    # A process of a shell's background job is born with interrupts ignored, and so are its children.
    rest = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    one.sleep(60)
except KeyboardInterrupt:
    say("interrupted")
say(one.ping())
pul.sync.shutdown()
"""
    with program(rest) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sleeping\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert sorted(out.split()) == ["cancelled", "interrupted", "pong", "stopped"]


def test_a_forked_child_is_told_so() -> None:
    rest = """
import os, warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    try:
        one.ping()
    except pul.PulsingRuntimeError as error:
        os._exit(3 if "forked" in str(error) else 4)
    os._exit(5)
say(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])} {one.ping()}")
"""
    with program(rest) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert "3 pong" in out
