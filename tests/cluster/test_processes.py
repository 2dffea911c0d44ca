"""Nodes as processes: what a death, a signal and an exit look like from outside (R9, R13)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from runtime_util import collect, eventually, local_system, run

import pulsing as pul
from pulsing.exceptions import ActorStoppedError, ConnectionLostError

NODE = """
import asyncio, sys
import pulsing as pul
from pulsing.core import run_until_signal

@pul.remote
class Child:
    async def sleep(self, seconds):
        print("sleeping", flush=True)
        await asyncio.sleep(seconds)
        return "slept"
    async def numbers(self):
        n = 0
        while True:
            yield n
            n += 1
            await asyncio.sleep(0.001)
    def make(self):
        return Value(7)
    def on_stop(self):
        print("stopped", flush=True)

class Value:
    def __init__(self, x): self.x = x

async def main():
    system = await pul.init("127.0.0.1:0", seeds=sys.argv[1:])
    await Child.spawn(name="child")
    print("ready", flush=True)
    await run_until_signal("child", grace=5.0)
    print("left", flush=True)

asyncio.run(main())
"""


@contextmanager
def child(seed: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(NODE), seed],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_killing_the_callee_fails_calls_and_streams_within_two_seconds() -> None:
    async def main() -> None:
        async with local_system() as system:
            with child(system.addr) as process:
                far = await system.resolve("child", timeout=30)
                stream = await far.numbers()
                assert await anext(stream) == 0
                asks = [asyncio.create_task(far.sleep(60)) for _ in range(5)]
                assert process.stdout is not None
                for _ in range(6):
                    await asyncio.to_thread(process.stdout.readline)
                process.kill()
                begun = time.monotonic()
                for outcome in await asyncio.gather(*asks, return_exceptions=True):
                    assert isinstance(outcome, ConnectionLostError)
                    assert not outcome.retry_safe
                with pytest.raises(ConnectionLostError):
                    await collect(stream, [])
                assert time.monotonic() - begun < 2

                async def forgotten() -> bool:
                    return await system.get_named_instances("child") == []

                await eventually("its name disappears", forgotten, 5.0)

    run(main())


def test_sigterm_lets_running_calls_finish_and_leaves() -> None:
    async def main() -> None:
        async with local_system() as system:
            with child(system.addr) as process:
                far = await system.resolve("child", timeout=30)
                ask = asyncio.create_task(far.sleep(0.5))
                assert process.stdout is not None
                for word in ("ready", "sleeping"):
                    assert (await asyncio.to_thread(process.stdout.readline)).strip() == word
                process.send_signal(signal.SIGTERM)
                assert await ask == "slept"
                out, err = await asyncio.to_thread(process.communicate, timeout=30)
                assert (process.returncode, err) == (0, "")
                assert out.split() == ["stopped", "left"]

    run(main())


def test_a_second_signal_ends_it_at_once_with_code_1() -> None:
    async def main() -> None:
        async with local_system() as system:
            with child(system.addr) as process:
                far = await system.resolve("child", timeout=30)
                ask = asyncio.create_task(far.sleep(30))
                assert process.stdout is not None
                for _ in range(2):
                    await asyncio.to_thread(process.stdout.readline)
                process.send_signal(signal.SIGINT)

                # The first signal is being obeyed as soon as the node takes no more calls.
                async def refuses() -> bool:
                    try:
                        await far.options(timeout=1).sleep(0)
                    except pul.PulsingError as error:
                        return isinstance(error, ActorStoppedError | pul.ActorNotFoundError)
                    return False

                await eventually("it stops", refuses)
                process.send_signal(signal.SIGINT)
                await asyncio.to_thread(process.wait, 10)
                assert process.returncode == 1
                with pytest.raises(pul.PulsingError):
                    await ask

    run(main())


def test_values_of_a_main_program_travel() -> None:
    async def main() -> None:
        async with local_system() as system:
            with child(system.addr):
                far = await system.resolve("child", timeout=30)
                assert (await far.make()).x == 7

    run(main())
