"""How a process ends and divides, and who may begin: R12, R13. Each program runs in an interpreter of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from runtime_util import local_system, run

import pulsing as pul
from pulsing._core import observe_get

HEAD = """
import asyncio, os, signal, sys, threading, time
import pulsing as pul

@pul.remote
class Busy:
    async def slow(self):
        await asyncio.sleep(600)
    async def numbers(self):
        n = 0
        while True:
            yield n
            n += 1
    @pul.blocking
    def block(self):
        time.sleep(600)
    def ping(self):
        return "pong"
"""


def program(body: str) -> list[str]:
    """A command that runs `body` after `HEAD`."""
    return [sys.executable, "-X", "faulthandler", "-c", HEAD + textwrap.dedent(body)]


def outcome(body: str, *arguments: str, limit: float = 30.0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program."""
    done = subprocess.run(
        [*program(body), *arguments],
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


IN_FLIGHT = """
async def begin():
    system = await pul.init("127.0.0.1:0")
    one = await Busy.spawn(name="one")
    there = await pul.actor_system("127.0.0.1:0", seeds=[system.addr])
    far = await Busy.resolve("one", system=there, timeout=10)
    tasks = [asyncio.create_task(work) for work in (one.slow(), far.slow(), one.block(), far.block())]
    stream, distant = await one.numbers(), await far.numbers()
    assert (await anext(stream), await anext(distant)) == (0, 0)
    watch = pul.watch(one)
    await one.slow.tell()
    await asyncio.sleep(0.05)
    kept.append((tasks, stream, distant, watch))

kept = []

def second():
    async def serve():
        await pul.actor_system("127.0.0.1:0")
        ready.set()
        await asyncio.sleep(600)
    asyncio.run(serve())

ready = threading.Event()
"""

ENDS = {
    "the end of asyncio.run": """
        asyncio.run(begin())
    """,
    "a loop that nobody closes": """
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
    """,
    "sys.exit in the loop": """
        async def leave():
            await begin()
            sys.exit(0)
        asyncio.run(leave())
    """,
    "a second loop in a thread": """
        threading.Thread(target=second, daemon=True).start()
        ready.wait()
        asyncio.run(begin())
    """,
}


@pytest.mark.parametrize("how", list(ENDS))
def test_r13_an_exit_with_work_in_flight_is_quiet_and_quick(how: str) -> None:
    assert outcome(IN_FLIGHT + textwrap.dedent(ENDS[how])) == (0, "", "")


def test_r13_a_forked_child_is_refused_and_its_parent_and_a_spawned_child_work() -> None:
    body = """
        import multiprocessing

        def use(queue):
            try:
                asyncio.run(pul.init("127.0.0.1:0"))
            except BaseException as error:
                queue.put((type(error).__name__, str(error)))
            else:
                queue.put(("", ""))

        async def main():
            await pul.init("127.0.0.1:0")
            one = await Busy.spawn()
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=use, args=(queue,))
            child.start()
            name, text = await asyncio.to_thread(queue.get)
            await asyncio.to_thread(child.join)
            assert name == "PulsingRuntimeError" and "'spawn'" in text and "fork" in text, (name, text)
            assert child.exitcode == 0, child.exitcode
            for _ in range(100):
                assert await one.ping() == "pong"
            # A child that starts afresh, as with multiprocessing's spawn method.
            fresh = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "import asyncio, pulsing; asyncio.run(pulsing.init('127.0.0.1:0'))"
            )
            assert await fresh.wait() == 0
            await pul.shutdown()

        asyncio.run(main())
    """
    code, _, errors = outcome(body)
    assert (code, "Traceback" in errors, "panicked" in errors) == (0, False, False), errors


def test_r13_threads_that_race_for_the_first_use_all_get_a_system() -> None:
    body = """
        barrier, errors = threading.Barrier(8), []

        async def use():
            system = await pul.actor_system("127.0.0.1:0")
            one = await Busy.spawn(system=system)
            assert await one.ping() == "pong"
            await system.shutdown()

        def work():
            barrier.wait()
            try:
                asyncio.run(use())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
    """
    assert outcome(body) == (0, "", "")


SERVING = """
async def main():
    await pul.init("127.0.0.1:0", seeds=sys.argv[1:])
    await Ender.spawn(name="ender")
    await pul.core.run_until_signal("ender", grace=5.0)
    print("left", flush=True)

@pul.remote
class Ender:
    async def end(self):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        return "last words"
    def hold(self, seconds):
        import ctypes
        print("holding", flush=True)
        ctypes.PyDLL(None).sleep(seconds)
    def on_stop(self):
        print("stopped", flush=True)
"""


def serve(body: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that runs beside the test."""
    return subprocess.Popen(
        [*program(body), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_r13_sigterm_from_within_a_handler_drains_and_leaves() -> None:
    async def main() -> None:
        async with local_system() as system:
            process = serve(SERVING + "\nasyncio.run(main())", system.addr)
            try:
                ender = await system.resolve("ender", timeout=30)
                watch = pul.watch(ender)
                assert await ender.end() == "last words"
                assert (await asyncio.wait_for(watch, 10)).reason == "node_left"
                out, errors = await asyncio.to_thread(process.communicate, timeout=30)
                assert (process.returncode, out.split(), errors) == (0, ["stopped", "left"], "")
            finally:
                process.kill()
                process.communicate()

    run(main())


def test_r13_shutdown_from_a_signal_handler_drains_and_ends() -> None:
    body = """
        async def main():
            loop = asyncio.get_running_loop()
            await pul.init("127.0.0.1:0")
            one = await Busy.spawn()
            ended = asyncio.Event()

            async def leave():
                await pul.shutdown(0.05)
                ended.set()

            def asked(number, frame):
                # In any thread's stead, between two steps of whatever runs: it can only ask the loop.
                loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(leave())))

            tasks = []
            signal.signal(signal.SIGTERM, asked)
            hanging = asyncio.create_task(one.slow())
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            await ended.wait()
            try:
                await hanging
            except pul.ActorStoppedError:
                print("ended")

        asyncio.run(main())
    """
    assert outcome(body) == (0, "ended\n", "")


def test_r12_a_thread_that_holds_the_interpreter_delays_no_heartbeat() -> None:
    async def main() -> None:
        async with local_system() as system:
            process = serve(SERVING + "\nasyncio.run(main())", system.addr)
            try:
                ender = await system.resolve("ender", timeout=30)
                addr = next(m["addr"] for m in system.core.members() if not m["me"])
                before = system.core.metrics()["suspicions"]
                held = asyncio.create_task(ender.hold(2))
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == "holding\n"
                answers = 0
                while not held.done():
                    # Its network answers within a second although its interpreter cannot.
                    ((status, _, why),) = await asyncio.to_thread(observe_get, [addr], "/health", 1.0)
                    assert status == 200, why
                    answers += 1
                    assert all(m["state"] == "alive" for m in system.core.members())
                    await asyncio.sleep(0.05)
                await held
                assert answers >= 3
                assert system.core.metrics()["suspicions"] == before
                process.send_signal(signal.SIGTERM)
                _, errors = await asyncio.to_thread(process.communicate, timeout=30)
                assert process.returncode == 0
                # The watchdog may tell of the blocked loop; nothing else is said.
                assert "Traceback" not in errors
            finally:
                process.kill()
                process.communicate()

    run(main())
