"""What travels with a call beside its arguments: trace context and chosen context variables."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from runtime_util import cluster, run

import pulsing as pul
from pulsing.core import ActorProxy, ActorRef, Message
from pulsing.core._propagate import chosen

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-11111111111111111111111111111111-2222222222222222-00"

user: ContextVar[Any] = ContextVar("test_context_user", default="nobody")
secret: ContextVar[str] = ContextVar("test_context_secret", default="unset")


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """What a test chooses does not travel in others."""
    before = dict(chosen.variables), chosen.active
    yield
    chosen.variables, chosen.active = before


@pul.remote
class Seer:
    def __init__(self) -> None:
        self.peer: ActorProxy | None = None
        self.gate = asyncio.Event()

    def meet(self, peer: ActorProxy) -> None:
        self.peer = peer

    def see(self) -> tuple[Any, str, str | None]:
        return user.get(), secret.get(), pul.traceparent()

    async def asee(self) -> tuple[Any, str, str | None]:
        await asyncio.sleep(0)
        return self.see()

    @pul.blocking
    def bsee(self) -> tuple[Any, str, str | None]:
        return self.see()

    async def gsee(self) -> AsyncIterator[tuple[Any, str, str | None]]:
        yield self.see()
        await asyncio.sleep(0)
        yield self.see()

    async def change(self) -> Any:
        user.set("changed by the handler")
        return user.get()

    async def at_gate(self) -> list[Any]:
        before = user.get()
        self.gate.set() if before == "last" else await self.gate.wait()
        return [before, user.get()]

    async def onward(self, parent: str | None = None) -> Any:
        assert self.peer is not None
        if parent is None:
            return await self.peer.asee()
        with pul.trace(parent):
            inside = await self.peer.asee()
        return inside, await self.peer.asee()

    async def first_item(self, stream: Any) -> Any:
        return await anext(stream)

    async def receive(self, msg: Any) -> Any:
        return self.see()


@asynccontextmanager
async def seer(where: str) -> AsyncIterator[tuple[ActorProxy, list[pul.ActorSystem]]]:
    async with cluster(2 if where == "remote" else 1) as systems:
        one = await Seer.spawn(system=systems[0])
        yield ActorProxy(ActorRef(systems[-1], one.node_id, one.actor_id)), systems


everywhere = pytest.mark.parametrize("where", ["local", "remote"])


@everywhere
def test_a_chosen_variable_travels_and_no_other(where: str) -> None:
    assert pul.propagate(user) is user

    async def main() -> None:
        async with seer(where) as (one, _):
            secret.set("mine alone")
            user.set({"id": 7})
            for method in (one.see, one.asee, one.bsee):
                assert tuple(await method()) == ({"id": 7}, "unset", None)
            assert [tuple(seen) async for seen in one.gsee()] == [({"id": 7}, "unset", None)] * 2
            assert tuple(await one.ask("any message")) == ({"id": 7}, "unset", None)
            assert tuple(await one.ask(Message("Plain", b"body"))) == ({"id": 7}, "unset", None)

    run(main())


@everywhere
def test_without_a_choice_nothing_travels(where: str) -> None:
    async def main() -> None:
        async with seer(where) as (one, _):
            user.set("here")
            for method in (one.see, one.asee, one.bsee):
                assert tuple(await method()) == ("nobody", "unset", None)

    run(main())


@everywhere
def test_calls_never_see_each_others_values(where: str) -> None:
    pul.propagate(user)

    async def main() -> None:
        async with seer(where) as (one, _):

            async def call(name: str) -> list[Any]:
                user.set(name)
                return list(await one.at_gate())

            # All run at once in one actor; the last one lets the others go on.
            calls = [asyncio.create_task(call(f"caller {n}")) for n in range(20)]
            await asyncio.sleep(0)
            calls.append(asyncio.create_task(call("last")))
            for n, seen in enumerate(await asyncio.gather(*calls)):
                name = "last" if n == 20 else f"caller {n}"
                assert seen == [name, name]
            # What a handler sets stays with it.
            user.set("the caller's")
            assert await one.change() == "changed by the handler"
            assert user.get() == "the caller's"
            assert (await one.see())[0] == "the caller's"

    run(main())


@everywhere
def test_who_has_not_set_it_gets_the_value_of_the_spawn(where: str) -> None:
    pul.propagate(user)

    async def main() -> None:
        async def spawn() -> Any:
            user.set("the spawner")
            return await system.spawn(Seer)

        async with cluster(2) as systems:
            system = systems[0]
            one = await asyncio.create_task(spawn())
            one = ActorRef(systems[-1 if where == "remote" else 0], one.node_id, one.actor_id).as_any()
            assert (await one.see())[0] == "the spawner"
            user.set("me")
            assert (await one.see())[0] == "me"

    run(main())


@everywhere
def test_values_and_trace_reach_the_end_of_a_chain_of_calls(where: str) -> None:
    pul.propagate(user)

    async def main() -> None:
        async with seer(where) as (one, systems):
            last = await Seer.spawn(system=systems[-1])
            await one.meet(last)
            user.set("first")
            assert tuple(await one.onward()) == ("first", "unset", None)
            with pul.trace(PARENT):
                assert tuple(await one.onward()) == ("first", "unset", PARENT)
                # A handler may begin another trace; it ends with its block.
                inside, after = await one.onward(OTHER)
                assert inside[2] == OTHER
                assert after[2] == PARENT
            assert (await one.onward())[2] is None

    run(main())


@everywhere
def test_a_stream_in_the_arguments_runs_in_its_callers_context(where: str) -> None:
    pul.propagate(user)

    async def main() -> None:
        async with seer(where) as (one, _):

            async def mine() -> AsyncIterator[Any]:
                yield user.get(), secret.get(), pul.traceparent()

            user.set("me")
            secret.set("mine alone")
            with pul.trace(PARENT):
                assert tuple(await one.first_item(mine())) == ("me", "mine alone", PARENT)

    run(main())


@everywhere
def test_a_trace_covers_its_block_and_every_kind_of_call(where: str) -> None:
    async def main() -> None:
        async with seer(where) as (one, systems):
            assert pul.traceparent() is None
            with pul.trace() as parent:
                assert pul.traceparent() == parent
                for method in (one.see, one.asee, one.bsee):
                    assert (await method())[2] == parent
                assert (await one.ask(Message("Plain")))[2] == parent
                # The trace belongs to calls, not to whoever is spawned meanwhile.
                born = await Seer.spawn(system=systems[-1])
                with pul.trace() as same:
                    assert same == parent
            assert pul.traceparent() is None
            assert (await born.see())[2] is None
            with pul.trace() as another:
                assert another != parent
            for wrong in (
                "",
                "00-abc",
                PARENT.upper(),
                "ff" + PARENT[2:],
                PARENT.replace("b7ad6b7169203331", "0" * 16),
            ):
                with pytest.raises(ValueError, match="traceparent"), pul.trace(wrong):
                    pass

    run(main())


def test_the_plain_envelope_is_unchanged() -> None:
    from pulsing.core._outbound import _envelope
    from pulsing.core._pickle import loads

    _, head, buffers = _envelope(0, "see", (1,), {}, None)
    assert loads(head, buffers) == (0, "see", (1,), {})
    assert _envelope(0, "see", (1,), {}, {})[1] == head


def test_choices_that_make_no_sense_are_refused() -> None:
    pul.propagate(user)
    pul.propagate(user)
    with pytest.raises(ValueError, match="test_context_user"):
        pul.propagate(ContextVar("test_context_user"))
    wrong: Any = "user"
    with pytest.raises(TypeError, match="ContextVar"):
        pul.propagate(wrong)


def test_a_value_that_cannot_be_pickled_fails_at_the_call_by_name() -> None:
    pul.propagate(user)

    async def main() -> None:
        async with seer("remote") as (one, _):
            user.set({"loop": asyncio.get_running_loop()})
            with pytest.raises(TypeError, match=r"context variable 'test_context_user'\['loop'\]"):
                await one.see()

    run(main())


def test_a_variable_that_is_unknown_at_the_callee_does_no_harm() -> None:
    class OnlyHere:
        def __reduce__(self) -> Any:
            return exec, ("raise ImportError('not on this node')",)

    pul.propagate(user)

    async def main() -> None:
        async with seer("remote") as (one, _):
            user.set(OnlyHere())
            call = one.see()
            # Both nodes live in this process: the callee forgets the variable once the call is on its way.
            task = asyncio.create_task(call)
            await asyncio.sleep(0)
            chosen.variables.clear()
            assert (await task)[0] == "nobody"

    run(main())


# -- OpenTelemetry ----------------------------------------------------------------------------------------------------


class StandIn:
    """As much of OpenTelemetry's API as the runtime uses: `inject` and `extract`, `attach`, `Context`.

    A span is its ``traceparent``; what else its propagators say is one header, ``tracestate``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: ContextVar[dict[str, str] | None] = ContextVar("stand_in", default=None)
        for name, members in {
            "opentelemetry": {},
            "opentelemetry.trace": {},
            "opentelemetry.context": {"Context": dict, "attach": self.current.set},
            "opentelemetry.propagate": {"inject": self.inject, "extract": self.extract},
        }.items():
            module = types.ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)

    def inject(self, carrier: dict[str, str]) -> None:
        carrier.update(self.current.get() or {})

    def extract(self, carrier: dict[str, str], context: dict[str, str]) -> dict[str, str]:
        return {**context, **carrier}

    def begin(self, parent: str) -> None:
        self.current.set({"traceparent": parent, "tracestate": "vendor=1"})


@everywhere
def test_an_active_span_is_the_parent_on_both_sides(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = StandIn(monkeypatch)

    @pul.remote
    class Traced:
        async def see(self) -> Any:
            return telemetry.current.get(), pul.traceparent()

        async def begin(self, peer: ActorProxy) -> Any:
            telemetry.begin(OTHER)
            return await peer.see()

    async def main() -> None:
        async with cluster(2 if where == "remote" else 1) as systems:
            telemetry.begin(OTHER)
            one = await Traced.spawn(system=systems[0])
            one = ActorRef(systems[-1], one.node_id, one.actor_id).as_any()
            telemetry.begin(PARENT)
            seen, parent = await one.see()
            assert seen == {"traceparent": PARENT, "tracestate": "vendor=1"}
            assert parent == PARENT
            # A span that the handler begins is the parent of its calls.
            assert (await one.begin(one))[1] == OTHER
            # What `trace` says is nearer than a span outside.
            with pul.trace(OTHER):
                assert (await one.see())[1] == OTHER
            # The span that was active when the actor was spawned is none of its calls'.
            telemetry.current.set(None)
            seen, parent = await one.see()
            assert not seen
            assert parent is None

    run(main())
