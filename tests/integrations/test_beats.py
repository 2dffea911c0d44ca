"""How a node stays known to the rendezvous of a Ray job, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_util import LIMIT, eventually, local_system, run

from pulsing.core import ActorSystem
from pulsing.integrations import _ray_actor
from pulsing.integrations._meeting import BEAT, STALE
from pulsing.integrations._ray_actor import Beats


class Gone(Exception):  # noqa: N818 - stands for Ray's error
    """The rendezvous has ended."""


RAY = SimpleNamespace(is_initialized=lambda: True, exceptions=SimpleNamespace(RayActorError=Gone))


class Handle:
    """A rendezvous as Ray's handles look: what each call answers or raises."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.asked: list[str] = []
        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(remote=self._method(name, answer)))

    def _method(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def remote(*args: Any) -> Any:
            self.asked.append(name)
            future: Future[Any] = Future()
            try:
                future.set_result(answer(*args))
            except Exception as error:  # noqa: BLE001 - the caller's
                future.set_exception(error)
            return SimpleNamespace(future=lambda: future)

        return remote


def fail(error: Exception) -> Any:
    raise error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray_actor, "BEAT", 0.005)
    monkeypatch.setattr(_ray_actor, "_SPREAD_BEATS", 1)


def beats(system: ActorSystem, find: Callable[[], Any], brought: list[tuple[str, ...]] | None = None) -> Beats:
    def apart(lost: tuple[str, ...]) -> Future[None]:
        assert brought is not None
        brought.append(lost)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return Beats(RAY, system, find, apart)


def test_nodes_that_are_alive_and_no_members_are_brought_here_but_not_those_that_just_died() -> None:
    assert _ray_actor._APART_BEATS > STALE / BEAT

    async def scenario() -> None:
        brought: list[tuple[str, ...]] = []
        async with local_system() as system:
            # The one was heard of for as long as a dead one is, the other goes on.
            left = iter(range(int(STALE / BEAT)))
            meeting = Handle(
                beat=lambda _: ("10.0.0.1:1", system.addr) if next(left, None) is None else ("10.0.0.2:2",),
                leave=lambda _: None,
            )
            beats(system, lambda: meeting, brought).start(meeting, "terms")
            await eventually("it to be brought here", lambda: bool(brought))
        assert set(brought) == {("10.0.0.1:1",)}
        await eventually("it to say goodbye", lambda: meeting.asked[-1] == "leave")

    run(scenario())


def test_a_rendezvous_that_ended_or_does_not_answer_is_looked_for_again() -> None:
    async def scenario() -> None:
        again = threading.Event()
        found: list[Handle] = []

        def find() -> Handle:
            if not found:
                # It is not over with the first try, either.
                found.append(Handle(terms=lambda: fail(Gone())))
            else:
                found.append(Handle(terms=lambda: "terms", beat=lambda _: (again.set(), ())[1], leave=lambda _: None))
            return found[-1]

        slow = iter([TimeoutError()])
        first = Handle(beat=lambda _: fail(next(slow, Gone())))
        async with local_system() as system:
            beats(system, find).start(first, "terms")
            await eventually("it to be known again", again.is_set)
        assert first.asked == ["beat", "beat"]
        assert len(found) == 2

    run(scenario())


def test_another_cluster_in_its_place_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with local_system() as system:
            gone = Handle(beat=lambda _: fail(Gone()))
            beats(system, lambda: Handle(terms=lambda: "other")).start(gone, "terms")
            await eventually("the warning", lambda: "has begun another cluster" in caplog.text, LIMIT)
            assert system.addr in caplog.text

    run(scenario())
