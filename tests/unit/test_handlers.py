"""Async handlers begin at once and are tasks like any other: what asyncio promises a task holds in them (R12, R14)."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest
from runtime_util import LIMIT, Run, eventually, local_system

import pulsing as pul
from pulsing.core._bridge import CANCELLED, INBOUND, bridge_of
from pulsing.core._inbound import InboundCall, Inlet
from pulsing.exceptions import CallCancelledError


def here() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def plain() -> Any:
    return here().done(), here().cancelling()


async def same_task_after_a_suspension() -> Any:
    first = here()
    await asyncio.sleep(0)
    second = here()
    await asyncio.sleep(0.001)
    return first is second is here(), first in asyncio.all_tasks(), first.done(), first.get_name() == second.get_name()


async def looks_at_its_task_at_once() -> Any:
    task = here()
    before = task.get_loop() is asyncio.get_running_loop(), task.get_name() == task.get_name(), bool(repr(task))
    task.set_name("mine")
    with pytest.raises(asyncio.InvalidStateError):
        task.result()
    with pytest.raises(asyncio.InvalidStateError):
        task.exception()
    await asyncio.sleep(0)
    return before, task.get_name(), task is here(), task in asyncio.all_tasks()


async def a_limit_that_is_reached() -> Any:
    try:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
    except TimeoutError:
        return "timed out", here().cancelling(), await asyncio.sleep(0, "goes on")


async def a_limit_that_had_passed() -> Any:
    try:
        async with asyncio.timeout(-1):
            await asyncio.sleep(60)
    except TimeoutError:
        return "timed out", here().cancelling(), await asyncio.sleep(0, "goes on")


async def a_limit_that_holds() -> Any:
    async with asyncio.timeout(30) as limit:
        await asyncio.sleep(0)
    return limit.expired(), here().cancelling()


async def a_limit_around_no_suspension() -> Any:
    async with asyncio.timeout(30) as limit:
        await plain()
    return limit.expired(), here().cancelling()


async def a_group_that_works() -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(asyncio.sleep(0.001 * n, n)) for n in range(3)]
    return [task.result() for task in tasks], here().cancelling()


async def a_group_whose_child_fails() -> Any:
    async def fails() -> None:
        raise KeyError("child")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            await asyncio.sleep(60)
    except ExceptionGroup as errors:
        return [type(error) for error in errors.exceptions], here().cancelling(), await asyncio.sleep(0, "goes on")


async def cancels_itself_and_waits() -> Any:
    here().cancel("enough")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as error:
        return "cancelled", here().cancelling(), error.args


async def cancels_itself_after_a_suspension() -> Any:
    await asyncio.sleep(0)
    here().cancel()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "cancelled", here().cancelling()


async def cancels_itself_twice_and_takes_one_back() -> Any:
    here().cancel()
    here().cancel()
    here().uncancel()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "cancelled", here().cancelling()


async def cancels_itself_and_waits_for_what_ends_slowly() -> Any:
    log = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("told")
            await asyncio.sleep(0.01)
            log.append("ended")
            raise

    child = asyncio.create_task(slow())
    await asyncio.sleep(0)
    here().cancel()
    try:
        await child
    except asyncio.CancelledError:
        return log, child.cancelled()


async def cancels_itself_and_waits_for_what_has_not_begun() -> Any:
    child = asyncio.create_task(asyncio.sleep(60))
    here().cancel()
    try:
        await child
    except asyncio.CancelledError:
        return child.cancelled()


async def cancels_itself_and_takes_it_back() -> Any:
    here().cancel()
    here().uncancel()
    try:
        await asyncio.sleep(0.001)
    except asyncio.CancelledError:
        return "cancelled", here().cancelling()


async def cancels_itself_and_yields() -> Any:
    here().cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return "cancelled"


async def waits_for_what_fails() -> Any:
    async def fails() -> None:
        raise KeyError("inner")

    try:
        await asyncio.create_task(fails())
    except KeyError:
        await asyncio.sleep(0)
        return "caught"


async def waits_for_what_is_done() -> Any:
    future = asyncio.get_running_loop().create_future()
    future.set_result(7)
    return await future, await asyncio.wait_for(asyncio.sleep(0, "quick"), 5)


async def swallows_a_cancellation() -> Any:
    here().cancel()
    for _ in range(3):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            here().uncancel()
    return here().cancelling()


BODIES = [
    plain,
    same_task_after_a_suspension,
    looks_at_its_task_at_once,
    a_limit_that_is_reached,
    a_limit_that_had_passed,
    a_limit_that_holds,
    a_limit_around_no_suspension,
    a_group_that_works,
    a_group_whose_child_fails,
    cancels_itself_and_waits,
    cancels_itself_after_a_suspension,
    cancels_itself_twice_and_takes_one_back,
    cancels_itself_and_waits_for_what_ends_slowly,
    cancels_itself_and_waits_for_what_has_not_begun,
    cancels_itself_and_takes_it_back,
    cancels_itself_and_yields,
    waits_for_what_fails,
    waits_for_what_is_done,
    swallows_a_cancellation,
]

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


@pul.remote
class Host:
    def __init__(self) -> None:
        self.kept: Any = None
        self.log: list[Any] = []

    async def run(self, body: Callable[[], Awaitable[Any]]) -> Any:
        return await body()

    async def keep_task(self, suspend: bool, call_back: bool) -> str:
        self.kept = asyncio.current_task()
        if call_back:
            self.kept.add_done_callback(lambda _: self.log.append("done"))
        if suspend:
            await asyncio.sleep(0)
        return "kept"

    async def cancel_at_once(self) -> str:
        here().cancel()
        try:
            await asyncio.sleep(60)
        finally:
            self.log.append("cleaned")
        return "never"

    async def cancel_and_return(self) -> str:
        here().cancel()
        return "answered"

    async def raise_at_once(self) -> None:
        raise KeyError("at once")

    async def variable(self) -> list[str]:
        found = [seen.get()]
        seen.set("inside")
        found.append(seen.get())
        await asyncio.sleep(0)
        found.append(seen.get())
        return found

    async def note(self, what: Any) -> None:
        self.log.append(what)

    async def down(self, other: Any, depth: int) -> int:
        return 0 if depth == 0 else 1 + await other.down(self.kept, depth - 1)


@pytest.mark.parametrize("body", BODIES)
def test_r14_a_handler_is_a_task_like_any_other(run: Run, body: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with local_system() as system:
            host = await Host.spawn(system=system)
            expected = await asyncio.create_task(body())
            assert await host.run(body) == expected
            # From a callback of the loop, where no task is current.
            ref = await system.spawn(Receiver(body))
            later = asyncio.get_running_loop().create_future()
            await ref.tell(later)
            assert await later == expected

    run(main())


class Receiver(pul.Actor):
    def __init__(self, body: Callable[[], Awaitable[Any]]) -> None:
        self.body = body

    async def receive(self, msg: Any) -> None:
        msg.set_result(await self.body())


def test_an_async_method_that_need_not_wait_answers_without_a_turn_of_the_loop(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            host = await Host.spawn(system=system)
            turns = []
            asyncio.get_running_loop().call_soon(turns.append, 1)
            await host.note("x")
            assert not turns

    run(main())


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize("call_back", [False, True])
def test_a_task_that_was_kept_ends(run: Run, suspend: bool, call_back: bool) -> None:
    async def main() -> None:
        async with local_system() as system:
            actor = Host.cls()
            host = (await system.spawn(actor)).as_any()
            assert await host.keep_task(suspend, call_back) == "kept"
            await eventually("the task is done", actor.kept.done)
            await actor.kept
            if call_back:
                await eventually("the callback ran", lambda: actor.log == ["done"])

    run(main())


def test_a_handler_that_cancels_itself_before_its_first_suspension_cleans_up(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            actor = Host.cls()
            host = (await system.spawn(actor)).as_any()
            with pytest.raises(CallCancelledError):
                await host.cancel_at_once()
            assert actor.log == ["cleaned"]
            assert await host.cancel_and_return() == "answered"
            with pytest.raises(KeyError, match="at once"):
                await host.raise_at_once()
            assert here().cancelling() == 0

    run(main())


def test_a_handlers_variables_stay_its_own(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            host = await Host.spawn(system=system)
            before = seen.get()
            assert (await host.variable())[1:] == ["inside", "inside"]
            assert seen.get() == before
            assert (await host.variable())[0] != "inside"

    run(main())


def test_the_callers_task_is_current_again_after_a_nested_first_step(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            host = await Host.spawn(system=system)
            me = here()
            await host.note(1)
            assert here() is me
            with pytest.raises(KeyError):
                await host.raise_at_once()
            assert here() is me
            async with asyncio.timeout(LIMIT):
                await asyncio.gather(*(host.run(same_task_after_a_suspension) for _ in range(50)))
            assert here() is me

    run(main())


def test_calls_nested_deeper_than_the_stack_are_answered(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            one, two = Host.cls(), Host.cls()
            one.kept = (await system.spawn(one)).as_any()
            two.kept = (await system.spawn(two)).as_any()
            assert await one.kept.options(timeout=None).down(two.kept, 400) == 400

    run(main())


def test_a_tell_returns_before_its_handler_begins(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            actor = Host.cls()
            host = (await system.spawn(actor)).as_any()
            for n in range(5):
                await host.note.tell(n)
            assert actor.log == []
            # R2: what follows a tell does not overtake it.
            await host.note("asked")
            assert actor.log == [0, 1, 2, 3, 4, "asked"]

    run(main())


def test_a_task_factory_of_the_loops_user_is_honoured(run: Run) -> None:
    async def main() -> None:
        async with local_system() as system:
            host = await Host.spawn(system=system)
            loop = asyncio.get_running_loop()
            made = []

            def factory(loop: Any, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
                made.append(coro)
                return asyncio.Task(coro, loop=loop, **kwargs)

            loop.set_task_factory(factory)
            try:
                assert await host.run(a_limit_that_is_reached) == ("timed out", 0, "goes on")
            finally:
                loop.set_task_factory(None)
            assert made

    run(main())


class Refused:
    """A protocol call that arrived, as Rust hands it to the loop, and what was said to its caller."""

    codec, trace, one_way = 3, None, False

    def __init__(self, token: int) -> None:
        self.token = token
        self.answered = self.cancelled = False
        self.told: list[str] = []

    def refuse(self, kind: str, *_: object) -> None:
        self.answered = True
        self.told.append(kind)


@pytest.mark.parametrize("ended_by", ["its caller", "its actor"])
def test_r1_a_protocol_call_that_ends_before_it_began_is_answered_and_leaves_nothing(run: Run, ended_by: str) -> None:
    begun = []

    class Protocol(pul.Actor):
        __pulsing_protocols__: ClassVar[set[int]] = {3}

        async def on_protocol_call(self, call: InboundCall) -> None:
            begun.append(call)

    async def main() -> None:
        async with local_system() as system:
            cell = system.cell((await system.spawn(Protocol())).actor_id)
            assert cell is not None
            bridge = bridge_of(system.loop)
            handlers, running = dict(bridge.handlers), system.watch.running
            call = Refused(bridge.core.token())
            Inlet(bridge, cell)((INBOUND, cell.key, call))
            if ended_by == "its caller":
                call.cancelled = True
                bridge.handlers[call.token]((CANCELLED, call.token))
            else:
                cell.handlers.cancel_protocols()
            await eventually("the call is answered", lambda: call.answered)
            assert call.told == ["cancelled" if ended_by == "its caller" else "actor_stopped"]
            assert not begun
            assert bridge.handlers == handlers
            assert system.watch.running == running

    run(main())


def test_what_a_cancelled_protocol_call_held_is_given_back_at_once(run: Run) -> None:
    class Mark:
        pass

    held: list[weakref.ref[Mark]] = []

    class Protocol(pul.Actor):
        __pulsing_protocols__: ClassVar[set[int]] = {3}

        async def on_protocol_call(self, call: InboundCall) -> None:
            # As a Worker's, it knows its own task; the task knows how it ended.
            own, mark = asyncio.current_task(), Mark()
            held.append(weakref.ref(mark))
            await asyncio.Event().wait()
            assert own is not None

    async def main() -> None:
        async with local_system() as system:
            cell = system.cell((await system.spawn(Protocol())).actor_id)
            assert cell is not None
            bridge = bridge_of(system.loop)
            call = Refused(bridge.core.token())
            gc.disable()
            try:
                Inlet(bridge, cell)((INBOUND, cell.key, call))
                await eventually("it has begun", lambda: bool(held))
                call.cancelled = True
                bridge.handlers[call.token]((CANCELLED, call.token))
                await eventually("it is given back", lambda: held[0]() is None)
            finally:
                gc.enable()

    run(main())
