"""Large data as values: what leaves the pickle, whose memory it is, and what arrives writable (R2, R15)."""

from __future__ import annotations

import array
import asyncio
import contextlib
import pickle
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from runtime_util import cluster, eventually, local_system, run

import pulsing as pul
from pulsing import _core
from pulsing.core import ActorProxy
from pulsing.core._bridge import bridge_of
from pulsing.core._pickle import copied, dumps, loads

LARGE = 100_000


def blank_view(size: int) -> memoryview:
    return memoryview(bytearray(size))


def blank_array(size: int) -> array.array[int]:
    return array.array("B", bytes(size))


def arrived(obj: Any) -> Any:
    """`obj` as it comes out of buffers like those that a link fills."""
    head, buffers = dumps(obj)
    return loads(head, [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize("block", [bytes(LARGE), bytearray(LARGE)], ids=["bytes", "bytearray"])
def test_large_bytes_stand_beside_the_pickle_as_the_object_they_are(block: Any) -> None:
    value = {"deep": [(1, {"er": block})], "again": block, "small": b"x"}
    head, buffers = dumps(value)
    assert len(head) < 1000
    assert any(buffer is block for buffer in buffers)
    assert sum(len(buffer) for buffer in buffers) < LARGE + 1000
    back = arrived(value)
    assert back == value
    assert type(back["again"]) is type(block)
    assert back["again"] is back["deep"][0][1]["er"]


def test_pieces_and_buffers_of_one_value_keep_their_places() -> None:
    blocks = [bytes([n]) * LARGE for n in range(4)]
    arrays = [array.array("B", bytes([n])) * LARGE for n in range(4)]
    text = "pièce" * LARGE
    views = [pickle.PickleBuffer(one) for one in arrays]
    back = arrived((blocks[:2], views[:2], text, blocks[2:], views[2:]))
    assert back[0] + back[3] == blocks
    assert back[1] + back[4] == [one.tobytes() for one in arrays]
    assert back[2] == text


def test_what_travels_by_value_leaves_the_pickle_too() -> None:
    block = bytes(LARGE)
    head, buffers = dumps((lambda: 7, block, memoryview(block)))
    assert any(buffer is block for buffer in buffers)
    function, *rest = loads(head, buffers)
    assert function() == 7
    assert rest == [block, block]


def test_more_buffers_than_a_frame_can_name_stay_in_the_pickle() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            store = await far(systems)
            many: list[Any] = [bytearray([n % 251]) * 5000 for n in range(6000)]
            assert len(dumps([memoryview(one) for one in many])[1]) < 3000
            assert [bytes(one) for one in await store.same([memoryview(one) for one in many])] == many
            # Pieces of the pickle itself are counted as well.
            many = [bytes([n % 251]) * 70_000 for n in range(1500)]
            assert await store.same(many) == many

    run(main())


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(b"abc")),
        memoryview(bytes(LARGE)),
        memoryview(array.array("d", range(LARGE))),
        memoryview(bytearray(LARGE)).cast("i", (100, LARGE // 400)),
        memoryview(bytearray(range(256)) * 1000)[::3],
        memoryview(b""),
        memoryview(array.array("d", [])),
    ],
    ids=["small", "read-only", "doubles", "two dimensions", "strided", "empty", "empty doubles"],
)
def test_memory_views_arrive_as_memory_views(view: memoryview) -> None:
    back = arrived(view)
    assert type(back) is memoryview
    assert (back.tolist(), back.format, back.shape) == (view.tolist(), view.format, view.shape)
    assert back.readonly == view.readonly


def test_a_copy_for_debugging_shares_no_memory() -> None:
    block = bytearray(LARGE)
    view = memoryview(block)
    back = copied({"view": view})["view"]
    back[0] = 1
    assert view[0] == 0


@pul.remote
class Store:
    def __init__(self) -> None:
        self.got: list[Any] = []
        self.block = bytearray()

    def same(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> None:
        self.got.append(value)

    def length(self, value: Any) -> int:
        return len(value)

    def change(self, value: Any) -> Any:
        memoryview(value)[0] = 9
        return value

    def returned_and_changed(self, size: int) -> bytearray:
        """Its own state, overwritten as soon as it has been returned."""
        self.block = bytearray(size)
        asyncio.get_running_loop().call_soon(self.overwrite)
        return self.block

    def overwrite(self) -> None:
        self.block[:] = b"\x01" * len(self.block)

    async def hold(self, value: Any) -> None:
        await asyncio.sleep(60)


async def far(systems: list[pul.ActorSystem]) -> ActorProxy:
    """An actor of the first node, seen from the second."""
    await Store.spawn(system=systems[0], name="store")
    proxy = await Store.resolve("store", system=systems[1], timeout=5)
    assert not proxy.is_local()
    return proxy


def across(test: Callable[[ActorProxy, Any, pul.ActorSystem], Awaitable[None]]) -> None:
    """Runs `test` with a far actor, its instance and the near system."""

    async def main() -> None:
        async with cluster(2) as systems:
            proxy = await far(systems)
            await test(proxy, systems[0].cells()[-1].instance, systems[1])

    run(main())


@pytest.mark.parametrize("size", [5_000_000, 101_000_000])
def test_arguments_of_any_size_arrive(size: int) -> None:
    async def test(store: ActorProxy, _: Any, __: pul.ActorSystem) -> None:
        assert await store.length(bytes(size)) == size
        back = await store.same({"in": [bytearray(size)]})
        assert len(back["in"][0]) == size

    across(test)


@pytest.mark.parametrize("size", [3, 5000, 70_000, 1_000_000])
@pytest.mark.parametrize("kind", [bytearray, blank_view, blank_array])
def test_received_data_is_writable(kind: Any, size: int) -> None:
    async def test(store: ActorProxy, _: Any, __: pul.ActorSystem) -> None:
        sent = kind(size)
        back = memoryview(await store.change(sent))
        assert (back[0], sent[0]) == (9, 0)
        back[-1] = 5

    across(test)


def test_an_argument_is_lent_until_its_call_returns() -> None:
    async def test(store: ActorProxy, _: Any, __: pul.ActorSystem) -> None:
        block = bytearray(30_000_000)
        task = asyncio.create_task(store.length(block))
        await asyncio.sleep(0)
        # An exported bytearray cannot be resized: this is the object's own memory, no copy.
        with pytest.raises(BufferError):
            block.append(1)
        assert await task == 30_000_000
        await eventually("the memory is given back", lambda: resizable(block))

    across(test)


def test_a_call_given_up_gives_its_memory_back() -> None:
    async def test(store: ActorProxy, instance: Any, near: pul.ActorSystem) -> None:
        await store.length(b"")
        block = bytearray(800_000_000)
        before = near.core.metrics()["bytes_out"]
        task = asyncio.create_task(store.keep(block))
        await eventually("it is under way", lambda: near.core.metrics()["bytes_out"] - before > 1_000_000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually("the memory is given back", lambda: resizable(block))
        assert near.core.metrics()["bytes_out"] - before < len(block)
        assert await store.length(bytes(LARGE)) == LARGE
        assert instance.got == []

    across(test)


def test_a_tell_sends_what_was_there_when_it_returned() -> None:
    async def test(store: ActorProxy, instance: Any, _: pul.ActorSystem) -> None:
        block = bytearray(20_000_000)
        await store.tell("keep", block)
        block[:] = b"\x01" * len(block)
        block.append(1)
        await eventually("it has arrived", lambda: bool(instance.got))
        assert instance.got[0] == bytes(20_000_000)
        # What cannot change is lent even so, and given back although no answer ever wakes this loop.
        gone = Gone(20_000_000)
        await store.tell("keep", memoryview(gone).toreadonly())
        held = gone.held
        del gone
        await eventually("the memory is given back", lambda: held == [])

    across(test)


def test_an_answer_is_what_was_returned() -> None:
    async def test(store: ActorProxy, instance: Any, _: pul.ActorSystem) -> None:
        assert await store.returned_and_changed(30_000_000) == bytes(30_000_000)
        assert instance.block == b"\x01" * 30_000_000

    across(test)


def test_r15_within_a_process_data_passes_by_reference() -> None:
    async def main() -> None:
        async with local_system() as system:
            store = await Store.spawn(system=system)
            for value in (bytes(LARGE), bytearray(LARGE), memoryview(bytearray(LARGE))):
                assert await store.same(value) is value

    run(main())


class Gone(bytearray):
    """Notes its own end in `held`."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.held = [size]

    def __del__(self) -> None:
        self.held.clear()


def resizable(block: bytearray) -> bool:
    try:
        block.append(1)
    except BufferError:
        return False
    del block[-1]
    return True


def test_r12_other_threads_run_while_large_writable_memory_is_copied() -> None:
    async def main() -> None:
        async with local_system() as system:
            bridge = bridge_of(asyncio.get_running_loop()).core
            nobody = pul.ActorId.generate().raw
            memory = bytearray(64 << 20)

            def another_ran() -> bool:
                gate = threading.Lock()
                ran: list[bool] = []

                def pass_gate() -> None:
                    with gate:
                        ran.append(True)

                with gate:
                    thread = threading.Thread(target=pass_gate)
                    thread.start()
                with contextlib.suppress(_core.CoreError):
                    system.core.tell(bridge, system.node_id.raw, nobody, 1, b"", [memory], None, None, False)
                meanwhile = bool(ran)
                thread.join()
                return meanwhile

            # Nobody gets the interpreter whom it is not given.
            before = sys.getswitchinterval()
            sys.setswitchinterval(1000.0)
            try:
                await eventually("another thread ran", another_ran)
            finally:
                sys.setswitchinterval(before)

    run(main())
