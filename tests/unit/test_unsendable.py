"""What cannot leave the process fails where it is sent, by its path: R7, R15."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from runtime_util import cluster, collect, eventually, run

import pulsing as pul
from pulsing.core import ActorProxy, ActorRef
from pulsing.exceptions import ActorStoppedError, PulsingActorError, TooLargeError


class Job:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Refuses:
    """Its pickling raises `error`, or recurses for ever."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __getstate__(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.__getstate__()


DEEP = 100_000
"""More lists in one another than any version can pickle: from 3.14 on a stack of 8 MB is the limit."""


def nested(depth: int) -> list[Any]:
    whole: list[Any] = []
    for _ in range(depth):
        whole = [whole]
    return whole


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "ValueError": (lambda: Refuses(ValueError("no state")), TypeError, "ValueError: no state"),
    "KeyError": (lambda: [Refuses(KeyError("k"))], TypeError, r"\[0\] to .*KeyError: 'k'"),
    "StopIteration": (lambda: Refuses(StopIteration(1)), TypeError, "StopIteration: 1"),
    "MemoryError": (lambda: Refuses(MemoryError("full")), MemoryError, "full"),
    "recursion": (lambda: Refuses(None), TypeError, "nested too deeply"),
    "depth": (lambda: nested(DEEP), TypeError, "nested too deeply"),
}
"""What makes it, and what whoever sends it gets."""


class LockedError(Exception):
    """An error that holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@pul.remote
class Place:
    def __init__(self) -> None:
        self.calls = 0
        self.peer: ActorProxy | None = None

    def take(self, *things: Any, **named: Any) -> int:
        self.calls += 1
        return len(things) + len(named)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def answer(self) -> Any:
        return {"deep": [Job(lock=threading.Lock())]}

    def refused(self, kind: str) -> Any:
        return REFUSALS[kind][0]()

    async def refused_later(self, kind: str) -> Any:
        return REFUSALS[kind][0]()

    @pul.blocking
    def refused_in_thread(self, kind: str) -> Any:
        return REFUSALS[kind][0]()

    async def refused_item(self, kind: str) -> AsyncIterator[Any]:
        yield REFUSALS[kind][0]()

    def exits(self) -> Any:
        return Refuses(SystemExit(3))

    async def cancels(self) -> Any:
        return Refuses(asyncio.CancelledError())

    async def items(self) -> AsyncIterator[Any]:
        yield 1
        yield Job(lock=threading.Lock())

    def fail(self) -> None:
        raise LockedError("held")

    def fail_at_length(self) -> None:
        cause = ValueError("first")
        cause.add_note("x" * 1_000_000)
        raise KeyError("second") from cause

    def too_large(self) -> None:
        raise TooLargeError("300 bytes, limit 200")

    def meet(self, peer: ActorProxy) -> None:
        self.peer = peer

    async def relay(self, name: str) -> Any:
        assert self.peer is not None
        return await getattr(self.peer, name)()

    async def hang(self) -> None:
        self.calls += 1
        await asyncio.sleep(60)

    def count(self) -> int:
        return self.calls


def proxy_on(system: pul.ActorSystem, proxy: ActorProxy) -> ActorProxy:
    return ActorProxy(ActorRef(system, proxy.node_id, proxy.actor_id))


def local_parts() -> list[tuple[str, Any]]:
    """(path after the argument's name, object that cannot be sent)."""
    lock = threading.Lock()

    def held() -> Any:
        return lock

    class Local:
        guard = lock

    return [
        (r"", lock),
        (r"\[2\]", [1, 2, lock]),
        (r"\['a'\]\['b'\]", {"a": {"b": lock}}),
        (r"\.inner\.deeper\[0\]", Job(inner=Job(deeper=(lock,)))),
        (r"\.inner", Slotted(lock)),
        (r"'s variable 'lock'", lambda: lock),
        (r"'s variable 'lock'", held),
        (r"'s default 0", lambda given=lock: given),
        (r"\.guard", Local),
        (r"\[0\]'s variable 'lock'", [held]),
    ]


def test_r7_what_cannot_travel_fails_at_send_naming_its_path() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far = proxy_on(systems[1], await Place.spawn(system=systems[0]))
            for path, thing in local_parts():
                with pytest.raises(TypeError, match=rf"cannot send argument 0{path} to take: .*lock"):
                    await far.take(thing)
                with pytest.raises(TypeError, match=rf"cannot send argument 'job'{path} to take: .*lock"):
                    await far.take(1, job=thing)
                with pytest.raises(TypeError, match=rf"cannot send argument 0{path} to receive: .*lock"):
                    await far.ask(thing)
            assert await far.count() == 0

    run(main())


def test_lambdas_and_local_classes_that_can_travel_do() -> None:
    factor = 3

    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

        def times(self) -> int:
            return self.n * factor

    async def main() -> None:
        async with cluster(2) as systems:
            far = proxy_on(systems[1], await Place.spawn(system=systems[0]))
            assert await far.call(lambda n: n * factor, 5) == 15
            assert await far.call(lambda one: one.times(), Local(4)) == 12

    run(main())


def test_r1_answers_and_items_that_cannot_travel_are_errors_at_the_caller() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far = proxy_on(systems[1], await Place.spawn(system=systems[0]))
            with pytest.raises(TypeError, match=r"cannot send the answer\['deep'\]\[0\]\.lock to its caller"):
                await far.answer()
            got: list[Any] = []
            with pytest.raises(TypeError, match=r"cannot send the answer\.lock"):
                await collect(far.items(), got)
            assert got == [1]

    run(main())


def test_r7_an_error_with_a_long_history_arrives_as_what_it_is() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            caller = proxy_on(systems[1], await Place.spawn(system=systems[0]))
            with pytest.raises(KeyError, match="second") as caught:
                await caller.fail_at_length()
            told = str(caught.value.__cause__)
            assert "ValueError: first" in told
            assert "fail_at_length" in told
            assert "characters are left out" in told
            assert len(told) < 20_000

    run(main())


@pytest.mark.parametrize("debug_copy", [False, True], ids=["between nodes", "copies within one"])
def test_r1_whatever_pickling_raises_is_an_answer(debug_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSING_DEBUG_COPY", "1" if debug_copy else "0")

    async def main() -> None:
        async with cluster(2) as systems:
            place = await Place.spawn(system=systems[0])
            caller = (place if debug_copy else proxy_on(systems[1], place)).options(timeout=20)
            for kind, (make, error, words) in REFUSALS.items():
                for method in ("refused", "refused_later", "refused_in_thread"):
                    with pytest.raises(error, match=words):
                        await getattr(caller, method)(kind)
                with pytest.raises(error, match=words):
                    await collect(caller.refused_item(kind), [])
                with pytest.raises(error, match=words):
                    await caller.take(make())
            # Neither ends the actor, its node or its caller.
            with pytest.raises(TypeError, match="SystemExit"):
                await caller.exits()
            with pytest.raises(TypeError, match="CancelledError"):
                await caller.cancels()
            assert await caller.count() == 0

    run(main())


def test_r7_an_error_that_holds_a_lock_arrives_named_through_any_number_of_hops() -> None:
    async def main() -> None:
        async with cluster(3) as systems:
            await eventually("all know all", lambda: all(len(one.core.members()) == 3 for one in systems))
            last = await Place.spawn(system=systems[2])
            middle = await Place.spawn(system=systems[1])
            await middle.meet(proxy_on(systems[1], last))
            first = proxy_on(systems[0], middle)
            for ask in (proxy_on(systems[1], last).fail, lambda: first.relay("fail")):
                with pytest.raises(PulsingActorError, match="LockedError: held") as caught:
                    await ask()
                assert caught.value.type_name == f"{__name__}.LockedError"
                assert "raise LockedError" in caught.value.remote_traceback
            # What is the runtime's own keeps its class, text and advice.
            with pytest.raises(TooLargeError, match="300 bytes, limit 200") as large:
                await first.relay("too_large")
            assert large.value.retry_safe

    run(main())


def test_r7_a_refusal_that_passes_through_an_actor_still_names_who_refused() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            gone = await Place.spawn(system=systems[1], name="gone")
            middle = await Place.spawn(system=systems[1], name="middle")
            await middle.meet(gone)
            call = asyncio.create_task(proxy_on(systems[0], middle).relay("hang"))

            async def hangs() -> bool:
                return bool(await gone.count())

            await eventually("the innermost call hangs", hangs)
            await systems[1].kill("gone")
            with pytest.raises(ActorStoppedError, match="actor gone stopped"):
                await call

    run(main())
