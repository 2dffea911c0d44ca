"""What looks after the requests of a Worker: places, deadlines, and the fields that are read."""

import asyncio
import contextlib
from typing import Any

import pytest

from pulsing.serving import GenerateRequest, _request
from pulsing.serving._deadlines import Deadlines
from pulsing.serving._slots import Slots


class Recorded(dict[str, Any]):
    """A body that notes what is looked up in it."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def test_s3_no_field_is_read_only_where_another_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    # A body without any of `_READ` is not looked at field by field: nothing else may be read then.
    body = Recorded({"messages": [{"role": "user", "content": "x"}], "n": None})
    monkeypatch.setattr(_request, "parse_json", lambda _: body)
    slow = GenerateRequest.from_body("chat.completions", b"")
    assert body.seen - {"messages"} <= _request._READ
    del body["n"]
    assert GenerateRequest.from_body("chat.completions", b"") == slow


def test_r5_a_deadline_ends_what_runs_into_it_and_nothing_else() -> None:
    async def scenario() -> None:
        deadlines = Deadlines()
        ended: list[str] = []

        async def work(name: str, seconds: float | None, gate: asyncio.Event) -> None:
            try:
                with deadlines.within(seconds):
                    await gate.wait()
                ended.append(f"{name} done")
            except TimeoutError:
                ended.append(f"{name} late")
            # What goes on behind the deadline is not cancelled once more.
            await asyncio.sleep(0)

        gate, never = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        long = loop.create_task(work("long", 60, gate))
        free = loop.create_task(work("free", None, gate))
        # Armed for an hour, the timer must still hear of shorter ones that come later.
        short = [loop.create_task(work(f"short{number}", 0.02, never)) for number in range(3)]
        await asyncio.wait_for(asyncio.gather(*short), 10)
        assert sorted(ended) == ["short0 late", "short1 late", "short2 late"]
        gate.set()
        await asyncio.wait_for(asyncio.gather(long, free), 10)
        assert sorted(ended)[:2] == ["free done", "long done"]
        assert not deadlines._limits

    asyncio.run(scenario())


def test_r5_who_is_cancelled_within_a_deadline_is_cancelled() -> None:
    async def scenario() -> None:
        deadlines = Deadlines()

        async def work() -> None:
            with deadlines.within(60):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not deadlines._limits

    asyncio.run(scenario())


def test_s6_places_go_in_order_and_none_is_lost() -> None:
    async def scenario() -> None:
        slots = Slots(2)
        assert [slots.take() for _ in range(3)] == [True, True, False]
        order: list[int] = []

        async def wait(number: int) -> None:
            await slots.wait()
            order.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        slots.release()
        # Its turn has come, and it leaves in the same moment: the place goes on to the next.
        waiting[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting[0]
        with contextlib.suppress(asyncio.CancelledError):
            await waiting[1]
        await asyncio.wait_for(waiting[2], 10)
        assert order == [2]
        assert not slots.take(), "a free place while somebody waits"
        slots.release()
        await asyncio.wait_for(waiting[3], 10)
        slots.release()
        slots.release()
        assert [slots.take() for _ in range(3)] == [True, True, False]

    asyncio.run(scenario())
