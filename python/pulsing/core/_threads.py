"""Threads for blocking methods. Daemons: a method that never returns must not keep the interpreter from exiting
(R13).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_IDLE_SECONDS = 30.0

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

    def settle(result: Any, error: BaseException | None) -> None:
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
