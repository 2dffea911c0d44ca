"""Tasks whose first step runs at once, in the turn that made them (design section 3)."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol


class Owner(Protocol):
    """Who wants to know the task from its first step on."""

    task: asyncio.Task[None] | None


Start = Callable[[asyncio.AbstractEventLoop, Coroutine[Any, Any, None], contextvars.Context, Owner], None]

if sys.version_info >= (3, 12):

    def _start(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
        owner: Owner,
    ) -> None:
        asyncio.Task(coroutine, loop=loop, context=context, eager_start=True)

else:
    import types
    from asyncio.tasks import _enter_task, _leave_task

    _FINISHED = object()

    class _Step:
        """Where a task's coroutine stands: what it waits for after its first step, or that it has ended."""

        __slots__ = ("coroutine", "waits_for")

        def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
            self.coroutine = coroutine
            self.waits_for: Any = _FINISHED

    @types.coroutine
    def _primed() -> Generator[None, None, None]:
        yield

    @types.coroutine
    def _resume(step: _Step, error: BaseException | None) -> Generator[Any, Any, None]:
        waits_for = step.waits_for
        while True:
            if error is None:
                try:
                    yield waits_for
                except BaseException as thrown:  # noqa: BLE001 - handed to the coroutine, whatever it is
                    error = thrown
                else:
                    yield from step.coroutine.__await__()
                    return
            try:
                waits_for = step.coroutine.throw(error)
            except StopIteration:
                return
            error = None

    async def _continue(step: _Step) -> None:
        """The coroutine that the task is made with; takes over where the first step ended."""
        error: BaseException | None = None
        try:
            # Sent to before the task has it: thrown into, a coroutine that has not begun would end without a line.
            await _primed()
        except BaseException as thrown:
            error = thrown
            if step.waits_for is _FINISHED:
                raise
            # A task that waits passes a cancellation on to what it waits for, and learns of it from there.
            cancel = getattr(step.waits_for, "cancel", None)
            if isinstance(error, asyncio.CancelledError) and cancel is not None and cancel(*error.args):
                error = None
        if step.waits_for is not _FINISHED:
            await _resume(step, error)

    class HandlerTask(asyncio.Task[None]):
        """A task that is made complete only when its first step suspends or somebody looks at it.

        Until then it exists to be `asyncio.current_task()`: it counts cancellations as any task does, and so
        `asyncio.timeout` and TaskGroup, which keep it, find themselves in the task that goes on. What an unfinished
        `asyncio.Task` cannot answer completes it first.
        """

        __slots__ = ("_complete", "_parts", "_step")

        _parts: tuple[asyncio.AbstractEventLoop, contextvars.Context]
        _step: _Step
        _complete: bool

        def complete(self) -> None:
            """Makes it a task in full, with what it has been told so far."""
            if self._complete:
                return
            self._complete = True
            raw: Any = self
            cancelled, message, times = raw._must_cancel, raw._cancel_message, self.cancelling()
            continuation = _continue(self._step)
            continuation.send(None)
            loop, context = self._parts
            super().__init__(continuation, loop=loop, context=context)
            if cancelled:
                for _ in range(max(1, times)):
                    self.cancel(message)
                if times == 0:
                    self.uncancel()

        def add_done_callback(self, *args: Any, **kwargs: Any) -> None:
            self.complete()
            super().add_done_callback(*args, **kwargs)

        def remove_done_callback(self, *args: Any) -> int:
            self.complete()
            return super().remove_done_callback(*args)

        def get_loop(self) -> asyncio.AbstractEventLoop:
            self.complete()
            return super().get_loop()

        def get_coro(self) -> Any:
            return self._step.coroutine

        def get_name(self) -> str:
            self.complete()
            return super().get_name()

        def set_name(self, value: object) -> None:
            self.complete()
            super().set_name(value)

        def get_stack(self, *, limit: int | None = None) -> list[Any]:
            self.complete()
            return super().get_stack(limit=limit)

        def result(self) -> None:
            self.complete()
            super().result()

        def exception(self) -> BaseException | None:
            self.complete()
            return super().exception()

        def __await__(self) -> Generator[Any, None, None]:
            self.complete()
            return super().__await__()

        def __repr__(self) -> str:
            self.complete()
            return super().__repr__()

    # What `sys.getrefcount` says of a task that only `_start` knows: its variable and the argument of the question.
    _ALONE = 2

    # asyncio.current_task() looks here, too, but takes three times as long.
    _running: dict[asyncio.AbstractEventLoop, asyncio.Task[Any]] = vars(asyncio.tasks)["_current_tasks"]

    def _start(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
        owner: Owner,
    ) -> None:
        task = HandlerTask.__new__(HandlerTask)
        task._parts = (loop, context)
        task._step = step = _Step(coroutine)
        task._complete = False
        owner.task = task
        outer = _running.get(loop)
        if outer is not None:
            _leave_task(loop, outer)
        _enter_task(loop, task)
        try:
            step.waits_for = context.run(coroutine.send, None)
        except StopIteration:
            pass
        finally:
            _leave_task(loop, task)
            if outer is not None:
                _enter_task(loop, outer)
        # Whoever kept an ended task may still wait for it; alone it needs no turn of the loop.
        if step.waits_for is not _FINISHED or sys.getrefcount(task) > _ALONE:
            task.complete()


_start_eagerly: Start = _start


def start_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], context: contextvars.Context, owner: Owner
) -> None:
    """Makes a task of `coroutine` and runs its first step before it returns.

    The task that is current in the first step is the one that continues. A loop that has a task factory of its user
    keeps it, and its tasks begin when that says. A task that has ended by the time this returns and that nobody keeps
    is gone: where `owner` is told of it, the coroutine's last step has to make it forget.
    """
    if loop.get_task_factory() is not None:
        loop.create_task(coroutine, context=context)
    else:
        _start_eagerly(loop, coroutine, context, owner)
