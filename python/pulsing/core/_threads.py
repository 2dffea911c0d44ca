"""Threads beside the event loop: those that run blocking methods, and those that wait for what the loop does.

The former are daemons: a method that never returns must not keep the interpreter from exiting (R13).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pulsing.exceptions import CallCancelledError, PulsingRuntimeError

T = TypeVar("T")

_IDLE_SECONDS = 30.0
_LOOP_CHECK = 1.0
"""Seconds between two looks at whether the loop that a thread waits for still exists."""

_lock = threading.Lock()
_ready = threading.Condition(_lock)
_jobs: deque[Callable[[], None]] = deque()
_idle = 0


def _work() -> None:
    global _idle  # noqa: PLW0603 - one pool a process
    while True:
        with _ready:
            _idle += 1
            try:
                while not _jobs:
                    if not _ready.wait(_IDLE_SECONDS) and not _jobs:
                        return
                job = _jobs.popleft()
            finally:
                _idle -= 1
        job()
        del job


async def run_in_thread(context: contextvars.Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function` in a thread. Cancelling the awaiting task drops the result; the thread itself runs on."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    # A loop with a clock of its own (`pulsing.testing`) must not run ahead of a thread.
    hold: Callable[[], Callable[[], None]] | None = getattr(loop, "hold_clock", None)
    release = hold() if hold is not None else None

    def settle(result: Any, error: BaseException | None) -> None:
        if release is not None:
            release()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            # A future cannot carry it.
            wrapped = RuntimeError("a blocking method raised StopIteration")
            wrapped.__cause__ = error
            future.set_exception(wrapped)
        else:
            future.set_exception(error)

    def job() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, whatever it is
            failure = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(settle, result, failure)
            except RuntimeError:
                return  # closed in between: nobody waits any more

    with _ready:
        _jobs.append(job)
        if len(_jobs) > _idle:
            threading.Thread(target=_work, name="pulsing-blocking", daemon=True).start()
        else:
            _ready.notify()
    return await future


def wait_for(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs ``work()`` as a task of `loop`, in a copy of this thread's context, and waits for it here.

    An interrupt (Ctrl-C) cancels the task.

    Raises:
        PulsingRuntimeError: This thread runs an event loop, which would stand still; or `loop` is closed.
        CallCancelledError: The loop ended before the task did.
    """
    refuse_on_a_loop()
    context = contextvars.copy_context()
    done = threading.Lock()
    done.acquire()
    task: asyncio.Task[T] | None = None
    failure: BaseException | None = None
    given_up = False

    def start() -> None:
        nonlocal task, failure
        if given_up:
            return
        try:
            task = loop.create_task(work(), context=context)
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            failure = error
            done.release()
        else:
            task.add_done_callback(lambda _: done.release())

    def cancel() -> None:
        nonlocal given_up
        given_up = True
        if task is not None:
            task.cancel()

    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError:
        raise PulsingRuntimeError("the event loop of the actor system is closed") from None
    try:
        while not done.acquire(timeout=_LOOP_CHECK):
            if loop.is_closed():
                raise CallCancelledError("the event loop of the actor system ended before the call did")
    except BaseException:
        if not loop.is_closed():
            loop.call_soon_threadsafe(cancel)
        raise
    if failure is not None:
        raise failure
    assert task is not None
    if task.cancelled():
        raise CallCancelledError("the call was cancelled on its event loop, which is ending")
    return task.result()


def refuse_on_a_loop() -> None:
    """Refuses to block a thread that runs an event loop.

    Raises:
        PulsingRuntimeError: It does.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise PulsingRuntimeError(
        "a blocking call inside a running event loop would stop the loop: use 'await' with the functions of pulsing "
        "itself here, or call from another thread"
    )
