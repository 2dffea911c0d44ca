"""The queue between Rust and a loop, on both of its wake descriptors; and where it must refuse (R13)."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import textwrap
from typing import Any, cast

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing import _core
from pulsing.core._bridge import LoopBridge


@pytest.mark.parametrize("pipe", ["0", "1"])
def test_calls_between_nodes_on_either_descriptor(monkeypatch: pytest.MonkeyPatch, pipe: str) -> None:
    monkeypatch.setenv("PULSING_BRIDGE_PIPE", pipe)

    @pul.remote
    class Echo:
        def echo(self, value: int) -> int:
            return value

    async def main() -> None:
        async with cluster(2) as (one, two):
            await Echo.spawn(system=one, name="echo")
            remote = await two.resolve("echo", timeout=5)
            for burst in range(5):
                assert await asyncio.gather(*(remote.echo(n) for n in range(burst * 50))) == list(range(burst * 50))

    run(main())


def test_an_idle_queue_is_not_readable_and_drains_to_nothing() -> None:
    bridge = _core.Bridge()
    assert bridge.drain() == []
    assert select.select([bridge.fileno()], [], [], 0) == ([], [], [])
    assert bridge.token() != bridge.token()
    bridge.close()


class Scripted:
    """The extension's half of a bridge, with events of a test's own."""

    def __init__(self, *events: tuple[Any, ...]) -> None:
        self.events = list(events)
        self.flushed = 0

    def drain(self) -> list[tuple[Any, ...]]:
        return self.events

    def flush(self) -> None:
        self.flushed += 1


def test_r1_an_answer_to_a_caller_that_was_cancelled_in_the_same_turn_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        bridge = LoopBridge(asyncio.get_running_loop())
        first, second = bridge.loop.create_future(), bridge.loop.create_future()
        bridge.handlers[1] = lambda _: first.cancel()
        bridge.handlers[2], bridge.handlers[3] = first.set_result, second.set_result
        real, bridge.core = bridge.core, cast(Any, Scripted((0, 1), (0, 2), (0, 3)))
        bridge._drain()
        assert first.cancelled()
        assert second.result() == (0, 3)
        assert bridge.core.flushed == 1
        assert not caplog.records
        # Twice the answer to one call is one: no caller, but whoever wrote the bridge, is to blame.
        bridge._drain()
        assert "internal error" in caplog.text
        bridge.core = real
        bridge.close()

    run(main())


def test_r13_what_interrupts_a_turn_of_the_loop_costs_nobody_else_an_event() -> None:
    class Interrupt(BaseException):
        """As Ctrl-C in a handler."""

    def interrupt(event: tuple[Any, ...]) -> None:
        seen.append(event)
        raise Interrupt

    async def main() -> None:
        bridge = LoopBridge(asyncio.get_running_loop())
        bridge.loop.set_exception_handler(lambda _, context: escaped.append(context["exception"]))
        bridge.handlers[1], bridge.handlers[2] = interrupt, seen.append
        real, bridge.core = bridge.core, cast(Any, Scripted((0, 1), (0, 2), (1, 1), (1, 2)))
        with pytest.raises(Interrupt):
            bridge._drain()
        assert bridge.core.flushed == 1
        await eventually("the others' events are delivered", lambda: len(seen) == 4)
        assert [type(one) for one in escaped] == [Interrupt]
        bridge.core = real
        bridge.close()

    seen: list[tuple[Any, ...]] = []
    escaped: list[BaseException] = []
    run(main())
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_r6_items_that_come_with_the_beginning_of_a_stream_wait_for_its_caller() -> None:
    async def main() -> None:
        bridge = LoopBridge(asyncio.get_running_loop())
        asked = bridge.loop.create_future()
        seen: list[tuple[Any, ...]] = []
        bridge.handlers[1], bridge.handlers[2] = asked.set_result, seen.append
        real, bridge.core = bridge.core, cast(Any, Scripted((2, 1), (3, 1, 0, b"", ()), (3, 1, 1, b"x", ()), (2, 2)))
        bridge._drain()
        assert asked.result() == (2, 1, [(3, 1, 0, b"", ()), (3, 1, 1, b"x", ())])
        assert seen == [(2, 2)], "whoever takes events as they come gets them so"
        bridge.core = real
        bridge.close()

    run(main())


def script(text: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        check=False,
    )


def test_exit_with_work_in_flight_is_clean_and_quick() -> None:
    done = script("""
        import asyncio, sys, threading, time
        import pulsing as pul

        @pul.remote
        class Slow:
            async def sleep(self):
                await asyncio.sleep(60)
            async def numbers(self):
                while True:
                    yield 1
                    await asyncio.sleep(0.001)
            @pul.blocking
            def block(self):
                time.sleep(60)

        async def main():
            one = await pul.actor_system("127.0.0.1:0")
            two = await pul.actor_system("127.0.0.1:0", seeds=[one.addr])
            await Slow.spawn(system=one, name="slow")
            far = await two.resolve("slow", timeout=5)
            tasks = [asyncio.create_task(far.sleep()), asyncio.create_task(far.block())]
            stream = await far.numbers()
            await anext(stream)
            sys.exit(0)

        begun = time.monotonic()
        asyncio.run(main())
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_without_the_loops_end_is_clean() -> None:
    done = script(
        """
        import asyncio
        import pulsing as pul

        async def main():
            await pul.init("127.0.0.1:0")

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        # Neither shut down nor closed.
    """,
        PYTHONWARNINGS="ignore",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_gets_an_error_and_its_parent_goes_on() -> None:
    done = script("""
        import asyncio, os, warnings
        warnings.simplefilter("ignore")
        import pulsing as pul

        @pul.remote
        class Echo:
            def echo(self, x):
                return x

        async def main():
            system = await pul.init("127.0.0.1:0")
            echo = await Echo.spawn(name="echo")
            pid = os.fork()
            if pid == 0:
                try:
                    pul.get_system()
                except pul.PulsingRuntimeError as error:
                    assert "forked" in str(error) and "spawn" in str(error)
                    os._exit(7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            assert await echo.echo(5) == 5
            await pul.shutdown()

        asyncio.run(main())

        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(pul.init("127.0.0.1:0"))
            except pul.PulsingRuntimeError:
                raise SystemExit(8)
            raise SystemExit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_before_the_first_start_is_fine() -> None:
    done = script("""
        import asyncio, os
        import pulsing as pul

        async def main():
            await pul.init("127.0.0.1:0")
            await pul.shutdown()

        pid = os.fork()
        asyncio.run(main())
        if pid:
            raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_busy_port_is_an_error_that_names_it() -> None:
    async def main() -> None:
        first = await pul.actor_system("127.0.0.1:0")
        with pytest.raises(OSError, match=first.addr) as caught:
            await pul.actor_system(first.addr)
        assert isinstance(caught.value, pul.PulsingRuntimeError)
        await first.shutdown()

    run(main())


def test_log_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="yaml"):
        _core.init_logging("info", "yaml")
    with pytest.raises(ValueError, match="=="):
        _core.init_logging("==", "text")
