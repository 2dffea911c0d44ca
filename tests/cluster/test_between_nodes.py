"""Calls between nodes of one process: R1, R2, R5, R6, R7, R10, R11, M5, placement."""

from __future__ import annotations

import array
import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from runtime_util import cluster, collect, eventually, run

import pulsing as pul
from pulsing.core import ActorProxy, InboundCall, Message, StreamMessage
from pulsing.core._options import PLAIN
from pulsing.core._outbound import remote_ask
from pulsing.core._streams import WINDOW
from pulsing.exceptions import (
    ActorNotFoundError,
    ActorStoppedError,
    DeadlockError,
    NameNotFoundError,
    PulsingRuntimeError,
    PulsingTimeoutError,
    RemoteTraceback,
)


class CustomError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number

    def __reduce__(self) -> Any:
        return CustomError, (self.number,)


@pul.remote
class Far:
    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.log: list[Any] = []
        self.peer: ActorProxy | None = None

    def add(self, a: int, b: int = 0) -> int:
        return a + b

    def get_tag(self) -> str:
        return self.tag

    def note(self, n: Any) -> None:
        self.log.append(n)

    async def anote(self, n: Any) -> None:
        self.log.append(n)

    def get_log(self) -> list[Any]:
        return self.log

    async def sleep(self, seconds: float) -> None:
        self.log.append("begun")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    def fail(self) -> None:
        raise CustomError(7)

    async def numbers(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                self.log.append(i)
                yield i
        finally:
            self.log.append("ended")

    async def broken(self) -> AsyncIterator[int]:
        yield 1
        raise CustomError(8)

    def writable(self, block: pickle.PickleBuffer) -> pickle.PickleBuffer:
        view = memoryview(block)
        view[0] = 9
        return pickle.PickleBuffer(view)

    def length(self, block: bytes) -> int:
        return len(block)

    def meet(self, peer: ActorProxy) -> None:
        self.peer = peer

    @pul.serial
    async def bounce(self, times: int) -> int:
        assert self.peer is not None
        return int(await self.peer.bounce(times - 1)) if times else 0

    def itself(self) -> Any:
        return self

    def unpicklable(self) -> Any:
        return (n for n in [asyncio.get_running_loop()]) and asyncio.get_running_loop()


async def pair(systems: list[pul.ActorSystem]) -> tuple[ActorProxy, Far]:
    """A proxy on systems[1] of an actor on systems[0], and the instance itself."""
    await Far.spawn(system=systems[0], name="far")
    proxy = await Far.resolve("far", system=systems[1], timeout=5)
    assert not proxy.is_local()
    return proxy, systems[0].cells()[-1].instance


def test_calls_values_and_errors() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, _ = await pair(systems)
            assert await far.add(1, b=2) == 3
            with pytest.raises(CustomError, match="number 7") as caught:
                await far.fail()
            assert caught.value.number == 7
            assert isinstance(caught.value.__cause__, RemoteTraceback)
            assert "raise CustomError(7)" in str(caught.value.__cause__)
            copy = await far.itself()
            assert isinstance(copy, Far)
            assert copy.add(1) == 1
            with pytest.raises(AttributeError, match="has no method 'nothing'"):
                await far.as_any().nothing()
            with pytest.raises(TypeError, match="cannot send"):
                await far.unpicklable()
            with pytest.raises(TypeError, match="cannot send"):
                await far.add(asyncio.get_running_loop())

    run(main())


def test_one_senders_messages_start_in_order() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, instance = await pair(systems)
            big = bytes(300_000)
            for n in range(100):
                await far.tell("anote" if n % 2 else "note", n if n % 10 else (n, big))
            await eventually("all have arrived", lambda: len(instance.log) == 100)
            assert [n[0] if isinstance(n, tuple) else n for n in instance.log] == list(range(100))

    run(main())


def test_deadline_and_cancellation_reach_the_handler() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, instance = await pair(systems)
            with pytest.raises(PulsingTimeoutError):
                await far.sleep.options(timeout=0.05)(60)
            await eventually("the handler is cancelled", lambda: instance.log == ["begun", "cancelled"])
            task = asyncio.create_task(far.sleep(60))
            await eventually("the handler runs again", lambda: len(instance.log) == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually("it is cancelled again", lambda: instance.log[2:] == ["begun", "cancelled"])

    run(main())


def test_streams_have_credit_errors_and_prompt_ends() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, instance = await pair(systems)
            assert [n async for n in far.numbers(1000)] == list(range(1000))
            got: list[int] = []
            with pytest.raises(CustomError, match="number 8"):
                await collect(far.broken(), got)
            assert got == [1]
            instance.log.clear()
            stream = await far.numbers(100_000)
            assert await anext(stream) == 0
            await eventually("the producer uses its credit", lambda: len(instance.log) >= WINDOW)
            for _ in range(20):
                assert await far.add(1) == 1
            assert len(instance.log) <= WINDOW + 2
            await stream.aclose()
            await eventually("the producer's finally runs", lambda: instance.log[-1] == "ended")
            async for n in far.numbers(100_000):
                if n == 3:
                    break
            await eventually("it runs after a break, too", lambda: instance.log.count("ended") == 2)

    run(main())


def test_buffers_arrive_writable_and_large_messages_whole() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, _ = await pair(systems)
            block = array.array("B", bytes(1_000_000))
            back = memoryview(await far.writable(pickle.PickleBuffer(block)))
            assert (len(back), back[0], back.readonly) == (1_000_000, 9, False)
            assert block[0] == 0
            assert await far.length(bytes(3_000_000)) == 3_000_000

    run(main())


def test_references_travel_and_stay_the_same_actor() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, _ = await pair(systems)
            near = await Far.spawn("near", system=systems[1])
            await far.meet(near)
            await near.meet(far)
            assert (await far.as_any().peer).ref == near.ref
            assert await systems[0].refer(str(near.actor_id)) == near.ref
            assert await systems[1].refer(far.actor_id) == far.ref
            with pytest.raises(DeadlockError):
                await far.bounce(3)
            with pytest.raises(ActorNotFoundError):
                await systems[0].refer(pul.ActorId.generate())

    run(main())


def test_a_name_may_have_instances_on_many_nodes() -> None:
    async def main() -> None:
        async with cluster(3) as systems:
            for n, system in enumerate(systems):
                await Far.spawn(str(n), system=system, name="many")
            last = systems[2]

            async def all_known() -> bool:
                return len(await last.get_named_instances("many")) == 3

            await eventually("all instances are known", all_known)
            tags = {await (await Far.resolve("many", system=last)).get_tag() for _ in range(6)}
            assert tags == {"0", "1", "2"}
            only = await Far.resolve("many", system=last, node_id=systems[0].node_id)
            assert await only.get_tag() == "0"
            await systems[0].stop("many")

            async def two_left() -> bool:
                return len(await last.get_named_instances("many")) == 2

            await eventually("the stopped one disappears", two_left, 1.0)
            with pytest.raises(ActorNotFoundError):
                await only.get_tag()

    run(main())


def test_private_actors_are_not_published_and_resolve_waits() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            await Far.spawn(system=systems[0], name="hidden", public=False)
            assert (await systems[0].resolve("hidden")).is_local()
            with pytest.raises(NameNotFoundError, match="hidden"):
                await systems[1].resolve("hidden")
            waiting = asyncio.create_task(systems[1].resolve("late", timeout=10))
            await asyncio.sleep(0)
            await Far.spawn(system=systems[0], name="late")
            assert not (await waiting).is_local()
            names = [entry["name"] for entry in await systems[1].all_named_actors()]
            assert "late" in names
            assert "hidden" not in names

    run(main())


def test_placement_puts_an_actor_elsewhere() -> None:
    @pul.remote
    class Local:
        """Known to this test only: it travels by value."""

        def __init__(self, word: str) -> None:
            self.word = word
            if word == "bad":
                raise ValueError("bad word")

        def say(self) -> str:
            return self.word

    async def main() -> None:
        async with cluster(2) as systems:
            one, two = systems
            placed = await Far.spawn("there", system=one, placement="remote", name="placed")
            assert placed.node_id == two.node_id
            assert await placed.get_tag() == "there"
            assert await (await Local.spawn("hello", system=one, placement=str(two.node_id))).say() == "hello"
            with pytest.raises(ValueError, match="bad word"):
                await Local.spawn("bad", system=one, placement=two.node_id)
            with pytest.raises(ValueError, match="nowhere"):
                await Far.spawn(system=one, placement="nowhere")
            with pytest.raises(PulsingRuntimeError):
                await Far.spawn(system=one, placement=pul.NodeId.generate())

    run(main())


def test_messages_and_their_streams_between_nodes() -> None:
    class Mirror(pul.Actor):
        async def receive(self, msg: Any) -> Any:
            if msg == "stream":
                message, writer = StreamMessage.create("Items")

                async def write() -> None:
                    for n in range(100):
                        await writer.write({"n": n})
                    writer.close()

                self.task = asyncio.create_task(write())
                return message
            return msg

    async def main() -> None:
        async with cluster(2) as (one, two):
            await one.spawn(Mirror(), name="mirror")
            mirror = await two.resolve("mirror", timeout=5)
            assert await mirror.ask({"any": ["thing"]}) == {"any": ["thing"]}
            assert await mirror.ask(Message("Kind", b"body")) == Message("Kind", b"body")
            answer = await mirror.ask("stream")
            assert answer.msg_type == "Items"
            assert [item["n"] async for item in answer] == list(range(100))

    run(main())


def test_stop_and_leave_are_seen() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            far, instance = await pair(systems)
            task = asyncio.create_task(far.sleep(60))
            await eventually("it runs", lambda: instance.log == ["begun"])
            await systems[0].kill("far")
            with pytest.raises(ActorStoppedError):
                await task
            await systems[0].shutdown(0.0)

            async def left() -> bool:
                return all(m["state"] != "alive" for m in await systems[1].members() if not m["me"])

            await eventually("the departure is seen", left, 1.0)

    run(main())


def test_protocol_calls_arrive_raw_and_are_cancelled() -> None:
    class Protocol(pul.Actor):
        __pulsing_protocols__: ClassVar[set[int]] = {0}

        def __init__(self) -> None:
            self.log: list[str] = []

        async def on_protocol_call(self, call: InboundCall) -> None:
            what = call.head.decode()
            if what == "reply":
                call.reply(b"Answer", [bytes(call.buffers[0])])
            elif what == "stream":
                for n in range(200):
                    await call.send(b"Item", [str(n).encode()])
                call.end()
            elif what == "fail":
                call.fail("some.Type", "words", code=418, data=b"{}")
            elif what == "raise":
                raise CustomError(9)
            elif what == "exit":
                raise SystemExit(3)
            elif what == "wait":
                try:
                    await asyncio.sleep(60)
                finally:
                    self.log.append("cancelled")

        def hello(self) -> str:
            return "hello"

    async def main() -> None:
        async with cluster(2) as (one, two):
            actor = Protocol()
            await one.spawn(actor, name="protocol")
            far = await two.resolve("protocol", timeout=5)
            assert await far.ask(Message("reply", b"x")) == Message("Answer", b"x")
            items = [item.payload async for item in await far.ask(Message("stream", b"x"))]
            assert items == [str(n).encode() for n in range(200)]
            with pytest.raises(pul.PulsingActorError, match="words") as caught:
                await far.ask(Message("fail", b"x"))
            assert (caught.value.code, caught.value.data) == (418, b"{}")
            with pytest.raises(CustomError):
                await far.ask(Message("raise", b"x"))
            with pytest.raises(PulsingRuntimeError, match="without an answer"):
                await far.ask(Message("nothing", b"x"))
            with pytest.raises(PulsingTimeoutError):
                await far.ask(Message("wait", b"x"), timeout=0.05)
            await eventually("the task is cancelled", lambda: actor.log == ["cancelled"])
            assert await far.hello() == "hello"
            # An exit ends the actor, not its node.
            ended = pul.watch(far)
            with pytest.raises(ActorStoppedError):
                await far.ask(Message("exit", b"x"))
            assert ((await ended).reason, (await ended).error) == ("failed", "SystemExit: 3")

    run(main())


def test_metadata_changes_are_published() -> None:
    class Described(pul.Actor):
        def metadata(self) -> dict[str, str]:
            return {"kind": "test", "state": "loading"}

        def ready(self) -> None:
            self.set_metadata(state="ready")

    async def main() -> None:
        async with cluster(2) as (one, two):
            await one.spawn(Described(), name="described")
            far = await two.resolve("described", timeout=5)
            assert (await two.get_named_instances("described"))[0]["metadata"]["state"] == "loading"
            await far.ready()

            async def is_ready() -> bool:
                return (await two.get_named_instances("described"))[0]["metadata"] == {"kind": "test", "state": "ready"}

            await eventually("the change is seen", is_ready)

    run(main())


def test_a_call_through_rust_on_the_same_node_keeps_its_errors() -> None:
    async def main() -> None:
        async with cluster(1) as (one,):
            near = await Far.spawn(system=one)
            assert await remote_ask(near.ref, 0, "add", (1, 2), {}, 5.0, PLAIN, None) == 3
            with pytest.raises(CustomError):
                await remote_ask(near.ref, 0, "fail", (), {}, 5.0, PLAIN, None)

    run(main())
