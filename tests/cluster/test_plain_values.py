"""Values between nodes that no pickler touches: what arrives is what pickle would have brought (R1, R6, R7)."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from runtime_util import cluster, eventually, run

import pulsing as pul
from pulsing.core import _bridge
from pulsing.exceptions import PulsingError


@pul.remote
class Mirror:
    def __init__(self) -> None:
        self.streams = 0

    def echo(self, *values: Any) -> Any:
        return values[0] if len(values) == 1 else values

    def kinds(self, *values: Any) -> list[str]:
        return [repr(value) for value in values]

    def pair(self) -> list[list[int]]:
        one = [1]
        return [one, one]

    def knot(self) -> list[Any]:
        knot: list[Any] = [7]
        knot.append(knot)
        return knot

    def open_streams(self) -> int:
        return self.streams

    async def stream(self) -> AsyncIterator[int]:
        self.streams += 1
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            self.streams -= 1


INTS = [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**200]
TEXTS = ["", "echo", "x" * 255, "x" * 256, "x" * 4096, "x" * 4097, "é\u1234\U0001f600", "\0", "\ud800"]
VALUES = [
    None,
    True,
    False,
    *INTS,
    *(-one for one in INTS[1:]),
    -128,
    -129,
    *(0.0, -0.0, 1.5, math.inf, -1e308, 5e-324),
    *TEXTS,
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    *([], [1], ["a", "a", b"b"], {}, {"a": 1}, {"a": [1, {"b": ()}], 2: (3, "a")}, set(), {1, 2}, bytearray(b"xy")),
    *((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((1,),)), frozenset({1})),
]


def test_r1_values_cross_as_they_are() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            for value in VALUES:
                for given in ((value,), (value, value), (1, value, "x", value, None)):
                    got = await far.echo(*given)
                    want = given if len(given) > 1 else value
                    assert (type(got), repr(got)) == (type(want), repr(want))
                    # What the callee saw: two mistakes could cancel out.
                    assert await far.kinds(*given) == [repr(one) for one in given]
            assert math.isnan(await far.echo(math.nan))
            assert type(await far.echo(PulsingInt(3))) is PulsingInt

    run(main())


class PulsingInt(int):
    """A number that is more than one."""


def test_r1_what_is_one_object_arrives_as_one() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            left, right = await far.pair()
            assert left is right
            assert left == [1]
            knot = await far.knot()
            assert knot[0] == 7
            assert knot[1] is knot
            assert await far.kinds(knot) == ["[7, [...]]"]

    run(main())


def test_r1_what_is_given_many_times_is_sent_once() -> None:
    async def main() -> None:
        async with cluster(2, max_message=1 << 20) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            for value in (b"x" * 4000, "x" * 4000):
                assert await far.echo(*[value] * 600) == (value,) * 600

    run(main())


def _value(dice: random.Random, depth: int = 3) -> Any:
    kind = dice.randrange(9 if depth else 6)
    if kind == 0:
        return dice.choice([None, True, False])
    if kind == 1:
        return dice.getrandbits(dice.randrange(1, 80)) * dice.choice([1, -1])
    if kind == 2:
        return dice.uniform(-1e9, 1e9)
    if kind == 3:
        return "".join(chr(dice.randrange(1, 0xD7FF)) for _ in range(dice.randrange(12)))
    if kind in (4, 5):
        return dice.randbytes(dice.choice([0, 1, 5, 255, 256, 300]))
    several = [_value(dice, depth - 1) for _ in range(dice.randrange(6))]
    # Some of it twice: a pickle then refers back.
    several += [dice.choice(several)] if several and dice.randrange(2) else []
    if kind == 6:
        return several
    if kind == 7:
        return tuple(several)
    return {f"{at}": one for at, one in enumerate(several)}


def test_r1_any_plain_values_cross_as_they_are() -> None:
    async def main() -> None:
        dice = random.Random(4)
        async with cluster(2) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            values = [_value(dice) for _ in range(600)]
            for value, got in zip(values, await asyncio.gather(*map(far.echo, values)), strict=True):
                assert (type(got), repr(got)) == (type(value), repr(value))

    run(main())


def test_r1_r7_a_broken_pickle_is_an_error_of_its_call() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            whole = pickle.dumps((0, "echo", (1, b"two", {"three": [4.0]}), {}), 5)
            bridge = _bridge.bridge_of(asyncio.get_running_loop())

            async def ask(pickled: bytes) -> Any:
                future = bridge.loop.create_future()
                handle = two.core.call(
                    bridge.core, far.ref.node_id.raw, far.ref.actor_id.raw, 1, pickled,
                    [], 30.0, None, [], None, False, 16,
                )  # fmt: skip
                bridge.handlers[handle.token] = future.set_result
                event = await future
                bridge.forget(handle.token)
                return event

            assert (await ask(whole))[0] == _bridge.VALUE
            odd = [pickle.dumps(value, 5) for value in (None, 5, (), (0, "echo"), (0, [], (), {}), ("echo", 1, 2, 3))]
            cut = [whole[:at] for at in range(len(whole))]
            torn = [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(2, len(whole))]
            for event in await asyncio.gather(*map(ask, odd + cut)):
                assert event[0] == _bridge.ERROR
            # What became of these depends on the place: an answer comes, whichever it is.
            for event in await asyncio.gather(*map(ask, torn)):
                assert event[0] in (_bridge.VALUE, _bridge.ERROR)
            assert await far.echo(1) == 1

    run(main())


@pytest.mark.parametrize("taken", [False, True], ids=["before its beginning was seen", "after"])
def test_r6_a_call_cancelled_as_its_stream_begins_ends_the_producer(taken: bool) -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            mirror = await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            assert await far.echo(1) == 1
            bridge = _bridge.bridge_of(asyncio.get_running_loop())
            begun: list[Any] = []
            usual = bridge._begun

            def noted(event: Any) -> None:
                if not taken:
                    task.cancel()
                begun.append(event)
                usual(event)

            vars(bridge)["_begun"] = noted

            async def reading() -> Any:
                return await far.stream()

            task = asyncio.create_task(reading())
            await asyncio.sleep(0)
            # No turn of the loop comes between the event and the cancellation.
            while not begun:
                bridge._drain()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            async def ended() -> bool:
                return bool(await mirror.open_streams() == 0)

            await eventually("the producer has ended", ended)

    run(main())


def test_r1_an_answer_after_its_caller_gave_up_costs_nobody_anything() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            assert await far.echo(1) == 1
            bridge = _bridge.bridge_of(asyncio.get_running_loop())
            waiting = len(bridge.handlers)
            for _ in range(50):
                tasks = [asyncio.ensure_future(far.echo(number)) for number in range(20)]
                await asyncio.sleep(0)
                for task in tasks[::2]:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert done[1::2] == list(range(1, 20, 2))
                assert all(isinstance(error, asyncio.CancelledError) for error in done[::2])
            assert len(bridge.handlers) == waiting

    run(main())


def test_r7_errors_of_plain_calls_are_typed() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            await Mirror.spawn(system=one, name="mirror")
            far = await Mirror.resolve("mirror", system=two, timeout=5)
            with pytest.raises(AttributeError, match="nothing"):
                await far.as_any().nothing(1)
            await one.stop("mirror")
            with pytest.raises(PulsingError):
                await far.echo(1)

    run(main())
