"""Whatever a constructor or a hook raises, its spawn ends with it, its name is free, and nobody else is harmed (R8)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runtime_util import Run, cluster, eventually, local_system

import pulsing as pul
from pulsing.exceptions import CallCancelledError, PulsingActorError, PulsingSystemError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Base(BaseException):
    """No `Exception`."""


class Actor(pul.Actor):
    """Raises in one of its hooks, from its second life on if it is told so."""

    made = 0

    def __init__(self, where: str, error: BaseException, first: int = 1) -> None:
        type(self).made += 1
        self.where = where if type(self).made >= first else ""
        self.error = error
        self.hit("constructor")

    def hit(self, here: str) -> None:
        if here == self.where:
            raise self.error

    async def on_start(self, actor_id: pul.ActorId) -> None:
        self.hit("on_start")

    async def on_stop(self) -> None:
        self.hit("on_stop")

    def metadata(self) -> dict[str, str]:
        self.hit("metadata")
        return {}

    async def receive(self, message: str) -> str:
        self.hit("receive")
        return message

    async def fail(self) -> None:
        raise ValueError("begin anew")


class SyncStop(Actor):
    def on_stop(self) -> None:
        self.hit("on_stop")


RAISED: list[tuple[BaseException, type[BaseException], type[BaseException]]] = [
    (UnprintableError(), UnprintableError, UnprintableError),
    (Base("base"), Base, PulsingActorError),
    (asyncio.CancelledError(), CallCancelledError, CallCancelledError),
    (SystemExit(3), PulsingSystemError, PulsingSystemError),
    (ExceptionGroup("many", [ValueError("one")]), ExceptionGroup, ExceptionGroup),
    (TimeoutError("mine"), TimeoutError, TimeoutError),
]
"""What is raised, what its spawner on the same node gets, and what one on another node gets."""


@pytest.mark.parametrize("where", ["constructor", "metadata", "on_start"])
def test_r8_a_start_that_raises_anything_fails_and_frees_its_name(where: str, run: Run) -> None:
    async def main() -> None:
        async with cluster(2) as (here, there):
            for error, near, far in RAISED:
                for node, expected in ((here, near), (there, far)):
                    with pytest.raises(expected) as caught:
                        await here.spawn(lambda error=error: Actor(where, error), name="one", placement=node.node_id)
                    assert type(caught.value) is expected
                    # Free, and the spawner's task goes on uncancelled.
                    await here.stop(await here.spawn(Actor("", error), name="one", placement=node.node_id))

    run(main())


@pytest.mark.parametrize("where", ["on_stop", "receive"])
def test_r8_an_end_or_a_handler_that_raises_anything_frees_its_name(where: str, run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            for kind, error in [(kind, error) for kind in (Actor, SyncStop) for error, _, _ in RAISED]:
                ref = await system.spawn(kind(where, error), name="one")
                (ended,) = await asyncio.gather(ref.ask("hi"), return_exceptions=True)
                assert (ended == "hi") is (where == "on_stop")
                await system.stop(ref)
                await eventually("the name is free", lambda: "one" not in system.local_actor_names())

    run(main())


@pytest.mark.parametrize("where", ["constructor", "metadata", "on_start"])
def test_r9_a_restart_that_raises_anything_counts_and_ends_with_the_budget(where: str, run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            for error, _, _ in RAISED:
                Actor.made = 0
                options: dict[str, Any] = {"restart_policy": "on_failure", "max_restarts": 2, "min_backoff": 0.001}
                ref = await system.spawn(lambda error=error: Actor(where, error, first=2), name="one", **options)
                watch = pul.watch(ref)
                with pytest.raises(ValueError, match="begin anew"):
                    await ref.as_any().fail()
                async with asyncio.timeout(10):
                    ended = await watch
                assert (ended.reason, Actor.made) == ("failed", 3)
                await eventually("the name is free", lambda: "one" not in system.local_actor_names())

    run(main())
