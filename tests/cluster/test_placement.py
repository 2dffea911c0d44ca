"""Where actors are placed and what it takes to get there: R8, R9, and complaints #5, #18 and #19 of other runtimes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from runtime_util import cluster, eventually, free_port, local_system, run

import pulsing as pul
from pulsing.core import PYTHON_ACTOR_SERVICE_NAME
from pulsing.exceptions import (
    CodeNotFoundError,
    NameTakenError,
    NodeNotFoundError,
    PulsingActorError,
    PulsingTimeoutError,
    RemoteTraceback,
)

READY: list[Callable[[], Any]] = []
"""Called just before an actor is ready: the nodes of these tests share one process."""


@pul.remote(mailbox=17, max_concurrency=3)
class Placed:
    def __init__(self, mood: str = "good") -> None:
        if mood == "bad":
            raise KeyError("bad mood")
        if mood == "exit":
            sys.exit(3)
        self.mood = mood

    async def on_start(self) -> None:
        if self.mood == "late":
            raise ConnectionResetError("late")
        if self.mood == "slow":
            await asyncio.sleep(60)
        for told in READY:
            asyncio.get_running_loop().call_soon(told)

    def where(self) -> str:
        return self.mood

    def fail(self) -> None:
        raise ValueError("on purpose")


NODE = """
import asyncio, sys
import pulsing as pul
from pulsing.core import run_until_signal

async def main():
    system = await pul.init("127.0.0.1:0", seeds=sys.argv[1:])
    await run_until_signal(system=system)

asyncio.run(main())
"""


@contextmanager
def node(seed: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, which can import Pulsing and nothing of these tests."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environ["PYTHONPATH"] = str(pathlib.Path(pul.__file__).parents[1])
    process = subprocess.Popen([sys.executable, "-c", NODE, seed], env=environ, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def joined(system: pul.ActorSystem, others: int) -> list[str]:
    """The Python nodes beside `system`'s, once there are `others`."""

    async def all_there() -> bool:
        return len(await system.get_named_instances(PYTHON_ACTOR_SERVICE_NAME)) == others + 1

    await eventually("the other nodes are known", all_there, 30)
    found = await system.get_named_instances(PYTHON_ACTOR_SERVICE_NAME)
    return [one["node_id"] for one in found if one["node_id"] != str(system.node_id)]


def test_remote_placement_is_even_among_the_other_nodes() -> None:
    async def main() -> None:
        async with cluster(4) as systems:
            one = systems[0]
            await joined(one, 3)
            spread = Counter([(await Placed.spawn(system=one, placement="remote")).node_id for _ in range(9)])
            assert spread == {system.node_id: 3 for system in systems[1:]}

    run(main())


def test_remote_placement_leaves_out_nodes_that_run_no_python_actors() -> None:
    async def main() -> None:
        async with cluster(3) as (one, two, three):
            await joined(one, 2)
            # A node without the service is what a node written in Rust looks like.
            await two.stop(PYTHON_ACTOR_SERVICE_NAME)

            async def gone() -> bool:
                return len(await one.get_named_instances(PYTHON_ACTOR_SERVICE_NAME)) == 2

            await eventually("its service is withdrawn", gone)
            assert {(await Placed.spawn(system=one, placement="remote")).node_id for _ in range(4)} == {three.node_id}
            with pytest.raises(NodeNotFoundError, match="it is no Python node"):
                await Placed.spawn(system=one, placement=two.node_id)

    run(main())


def test_an_address_places_and_one_that_is_no_member_is_told_who_is() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            port = two.addr.rpartition(":")[2]
            for address in (two.addr, f"localhost:{port}"):
                assert (await Placed.spawn(system=one, placement=address)).node_id == two.node_id
            assert (await Placed.spawn(system=one, placement=one.addr)).node_id == one.node_id
            assert (await one.spawn(Placed, placement=two.addr)).node_id == two.node_id
            nobody = f"127.0.0.1:{free_port()}"
            for wrong in (nobody, "no-such-host.invalid:1", pul.NodeId.generate()):
                with pytest.raises(NodeNotFoundError) as refused:
                    await Placed.spawn(system=one, placement=wrong)
                assert str(wrong) in str(refused.value)
                assert f"{two.node_id} at {two.addr}" in str(refused.value)
            for wrong in ("elsewhere", "host:", "host:0", ":1"):
                with pytest.raises(ValueError, match=f"placement='{wrong}'"):
                    await Placed.spawn(system=one, placement=wrong)

    run(main())


def test_r8_what_fails_over_there_raises_here_and_frees_the_name() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            for mood, kind in (("bad", KeyError), ("late", ConnectionResetError), ("exit", PulsingActorError)):
                with pytest.raises(kind) as failed:
                    await Placed.spawn(mood, system=one, name="moody", placement=two.node_id)
                assert isinstance(failed.value.__cause__, RemoteTraceback)
                assert "__init__" in str(failed.value.__cause__) or "on_start" in str(failed.value.__cause__)
                assert two.local_actor_names() == []
            assert await (await Placed.spawn(system=one, name="moody", placement=two.node_id)).where() == "good"
            with pytest.raises(NameTakenError):
                await Placed.spawn(system=one, name="moody", placement=two.node_id)

    run(main())


def test_limits_of_decorator_and_spawn_travel() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):

            def limits() -> tuple[int, int]:
                cell = two.cells()[-1]
                return cell.mailbox.capacity, cell.handlers.max_concurrency

            await Placed.spawn(system=one, placement=two.node_id)
            assert limits() == (17, 3)
            await Placed.spawn(system=one, placement=two.node_id, mailbox=20)
            assert limits() == (20, 3)
            await one.spawn(lambda: Placed("made"), placement=two.node_id, max_concurrency=5)
            assert limits() == (256, 5)
            with pytest.raises(ValueError, match="mailbox=3"):
                await Placed.spawn(system=one, placement=two.node_id, mailbox=3)
            with pytest.raises(ValueError, match="max_concurrency=0"):
                pul.remote(max_concurrency=0)(type("C", (), {}))

    run(main())


def test_a_factory_is_supervised_where_it_was_sent() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            words = ["from", "a", "closure"]
            ref = await one.spawn(
                lambda: Placed(" ".join(words)),
                placement=two.node_id,
                restart_policy="on_failure",
                min_backoff=0.01,
                name="supervised",
            )
            placed = ref.as_any()
            assert await placed.where() == "from a closure"
            with pytest.raises(ValueError, match="on purpose"):
                await placed.fail()
            cell = two.cells()[-1]
            await eventually("it is restarted", lambda: cell.life.restarts == 1)
            assert await placed.where() == "from a closure"
            moved = await one.spawn(Placed.cls("copied"), placement=two.node_id)
            assert await moved.as_any().where() == "copied"
            loop = asyncio.get_running_loop()
            with pytest.raises(TypeError, match="cannot send"):
                await one.spawn(lambda: Placed(str(loop)), placement=two.node_id)

    run(main())


def test_a_caller_that_gives_up_leaves_no_actor_there() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):
            before = len(two.cells())
            starting = asyncio.create_task(Placed.spawn("slow", system=one, name="slow", placement=two.node_id))
            await eventually("it is starting", lambda: len(two.cells()) == before + 1)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await eventually("it is taken back", lambda: len(two.cells()) == before)
            # The other race: it is ready there, and its answer is on the way.
            starting = asyncio.create_task(Placed.spawn(system=one, name="quick", placement=two.node_id))
            READY.append(starting.cancel)
            with pytest.raises(asyncio.CancelledError):
                await starting
            READY.clear()
            await eventually("it is taken back, too", lambda: two.local_actor_names() == [])

    run(main())


def test_code_that_is_missing_there_is_named_with_the_way_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "only_here.py").write_text("class Thing:\n    def say(self):\n        return 'here'\n")
    sys.path.insert(0, str(tmp_path))
    try:
        thing = importlib.import_module("only_here").Thing

        async def main() -> None:
            async with local_system() as system:
                with node(system.addr):
                    (there,) = await joined(system, 1)
                    with pytest.raises(CodeNotFoundError) as missing:
                        await system.spawn(thing, placement=there)
                    assert (missing.value.module, missing.value.retry_safe) == ("only_here", True)
                    assert there in str(missing.value)
                    assert "install module 'only_here' there" in str(missing.value)
                    # An argument that needs it, and a factory that does.
                    for sent in (functools.partial(thing), thing()):
                        with pytest.raises(CodeNotFoundError, match=f"cannot be read on node {there}.*'only_here'"):
                            await system.spawn(sent, placement=there)

        run(main())
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("only_here", None)


MAIN = """
import asyncio, sys
import pulsing as pul
from pulsing.core import PYTHON_ACTOR_SERVICE_NAME

class Note:
    def __init__(self, text): self.text = text

def shout(text): return text.upper()

@pul.remote
class Keeper:
    def __init__(self, first): self.notes = [first]
    def keep(self, note):
        self.notes.append(note)
        # Note is the same class here however it came: with the class of this actor, or with an argument.
        return [type(n) is Note and isinstance(n, Note) for n in self.notes], shout(note.text)
    def itself(self): return isinstance(self, Keeper), Note("from there")
    def apply(self, function, value): return function(value)

async def main():
    system = await pul.init("127.0.0.1:0")
    print(system.addr, flush=True)
    while len(found := await system.get_named_instances(PYTHON_ACTOR_SERVICE_NAME)) < 2:
        await asyncio.sleep(0.01)
    keeper = await Keeper.spawn(Note("one"), placement="remote")
    assert not keeper.is_local()
    assert await keeper.keep(Note("two")) == ([True, True], "TWO")
    assert await keeper.keep(Note("three")) == ([True, True, True], "THREE")
    same, note = await keeper.itself()
    assert same and type(note) is Note, note
    local = 5
    assert await keeper.apply(lambda x: x + local, 1) == 6
    assert await keeper.apply(shout, "x") == "X"
    class Inner:
        def go(self): return Note("inner")
    inner = (await pul.spawn(lambda: Inner(), placement="remote")).as_any()
    assert type(await inner.go()) is Note
    await pul.shutdown()
    print("done", flush=True)

asyncio.run(main())
"""


def test_classes_and_functions_of_a_main_program_work_there(tmp_path: pathlib.Path) -> None:
    """Complaints #18 and #19: one class stays one class per definition, whichever way it comes."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(MAIN))
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        assert process.stdout is not None
        with node(process.stdout.readline().strip()):
            out, _ = process.communicate(timeout=50)
        assert (process.returncode, out) == (0, "done\n")
    finally:
        process.kill()
        process.wait()


def test_a_wrapped_class_sent_beside_something_by_value_stays_the_class_it_is() -> None:
    async def main() -> None:
        async with cluster(2) as (one, two):

            class Local:
                def check(self, other: Any) -> bool:
                    return type(other) is Placed.cls

            local = (await one.spawn(Local, placement=two.node_id)).as_any()
            assert await local.check(Placed("a plain instance"))

    run(main())


MAY_RETURN = threading.Event()
ENDED: list[str] = []


@pul.remote
class Stuck:
    def __init__(self) -> None:
        MAY_RETURN.wait(30)

    def on_stop(self) -> None:
        ENDED.append("stuck")


@asynccontextmanager
async def elsewhere(seed: str, **settings: Any) -> AsyncIterator[pul.ActorSystem]:
    """A node that has joined, on the loop of another thread."""

    async def live() -> None:
        async with local_system(seeds=[seed], **settings) as system:
            started.set_result((system, asyncio.get_running_loop()))
            await over.wait()

    started: concurrent.futures.Future[tuple[pul.ActorSystem, asyncio.AbstractEventLoop]] = concurrent.futures.Future()
    over = asyncio.Event()
    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    system, loop = await asyncio.wrap_future(started)
    try:
        yield system
    finally:
        loop.call_soon_threadsafe(over.set)
        await asyncio.to_thread(thread.join)


def test_r8_a_constructor_that_holds_up_another_node_fails_its_spawn_and_leaves_no_actor_there() -> None:
    async def main() -> None:
        async with local_system() as here, elsewhere(here.addr, start_timeout=0.1) as there:
            with pytest.raises(PulsingTimeoutError, match=rf"1.2 s: the start of .*Stuck on node {there.node_id}"):
                await Stuck.spawn(system=here, name="stuck", placement=there.node_id)
            # It is still in there. What it becomes is ended, and its name free again.
            assert not ENDED
            MAY_RETURN.set()
            await eventually("what came late is stopped", lambda: bool(ENDED))
            await eventually("its name is free", lambda: there.local_actor_names() == [])
            again = await Stuck.spawn(system=here, name="stuck", placement=there.node_id)
            assert again.node_id == there.node_id

    try:
        run(main())
    finally:
        MAY_RETURN.set()


def test_r8_a_spawn_elsewhere_that_fails_by_its_limit_leaves_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with cluster(2, start_timeout=0.05) as (here, there):
            for _ in range(3):
                with pytest.raises(PulsingTimeoutError, match="on_start of actor slow"):
                    await Placed.spawn("slow", system=here, name="slow", placement=there.node_id)
            # What was told after those spawns has been heard once a later order is done.
            await Placed.spawn(system=here, name="fine", placement=there.node_id)
            assert there.local_actor_names() == ["fine"]

    run(main())
    assert "no such actor" not in caplog.text
