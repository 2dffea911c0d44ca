"""One process's way into the cluster of a Ray job, without Ray: what it does with nodes that are away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_util import run

from pulsing.exceptions import JoinError
from pulsing.integrations import ray as ray_integration
from pulsing.integrations._job import Deadline, Terms
from pulsing.integrations._meeting import STALE, Entry, Meeting
from pulsing.integrations.ray import _Joining


class ActorDied(Exception):  # noqa: N818 - stands for Ray's error
    """What Ray raises for a call to an actor that has ended."""


RAY: Any = SimpleNamespace(exceptions=SimpleNamespace(RayActorError=ActorDied))


class Rendezvous:
    """A `Meeting` whose calls look like those of a Ray actor's handle, on a clock that its callers move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meeting = Meeting(0.0)
        self.lose_answer_of: str | None = None

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            lost = self.lose_answer_of == method
            result = getattr(self.meeting, method)(*args, self.now)
            if lost:
                self.lose_answer_of = None
                self.now += ray_integration._ANSWER_WITHIN
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if lost:
                answer.set_exception(TimeoutError(method))
            else:
                answer.set_result(result)
            return answer

        return SimpleNamespace(remote=remote)


class Joiner(_Joining):
    """Joins nodes that are in `alive`; each attempt takes the time it may take at most."""

    def __init__(self, rendezvous: Rendezvous, alive: set[str]) -> None:
        async def start(terms: Terms, listen: str, seeds: tuple[str, ...], within: float) -> Any:
            rendezvous.now += within
            self.tries += 1
            assert self.tries < 6, f"it goes round among dead nodes: {seeds}"
            if seeds and not alive.intersection(seeds):
                raise JoinError(f"tried {seeds}")
            addr = f"10.0.0.9:{self.tries}"
            return SimpleNamespace(addr=addr, shutdown=self._gone)

        options: Any = SimpleNamespace(deadline=Deadline(60.0), start=start)
        super().__init__(RAY, options, None)
        self.tries = 0
        self._rendezvous = rendezvous
        self._meeting = rendezvous
        self._terms = Terms("c", "host").text()

    async def _gone(self, grace: float) -> None:
        pass

    async def _enter(self, away: tuple[str, ...]) -> Entry:
        self._meeting = self._rendezvous
        entry: Entry = await self._call("enter", self._who, away)
        return entry

    def _listen(self) -> str:
        return "10.0.0.9:0"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_integration, "_ASK_AGAIN", 0.0)
    monkeypatch.setattr(ray_integration, "Beats", lambda *_: SimpleNamespace(start=lambda *_: None))


def test_dead_nodes_are_given_up_for_good_also_when_a_third_one_dies_meanwhile() -> None:
    rendezvous = Rendezvous()
    for addr in ("10.0.0.1:1", "10.0.0.2:1"):
        rendezvous.meeting.beat(addr, 0.0)
    joiner = Joiner(rendezvous, alive=set())
    enter = joiner._enter

    async def one_more_dies(away: tuple[str, ...]) -> Entry:
        if joiner.tries == 2:
            rendezvous.meeting.beat("10.0.0.3:1", rendezvous.now - STALE)
        return await enter(away)

    joiner._enter = one_more_dies
    run(joiner.run())


def test_a_first_node_whose_beginning_was_not_confirmed_is_no_seed_of_its_own() -> None:
    rendezvous = Rendezvous()
    for addr in ("10.0.0.1:1", "10.0.0.2:1"):
        rendezvous.meeting.beat(addr, 0.0)
    joiner = Joiner(rendezvous, alive=set())
    rendezvous.lose_answer_of = "begin"
    run(joiner.run())
    assert rendezvous.meeting.seeds(rendezvous.now, ("10.0.0.1:1", "10.0.0.2:1")) == (f"10.0.0.9:{joiner.tries}",)
