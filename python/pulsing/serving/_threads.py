"""Blocking engine work on threads that never keep a process from ending."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TypeVar, cast

__all__ = ["in_daemon_thread", "usable_cores"]

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run ``work`` on a thread of its own and wait for it.

    ``asyncio.to_thread`` would do, but the interpreter joins its threads at exit, and a load of many minutes must not
    hold up a Ctrl-C. Cancelling the caller abandons the thread: what it returns is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            # None only if T admits it.
            done.set_result(cast(T, value))

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - carried to the awaiting task, whatever it is
            failure = error
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                # A future refuses the first, and nobody looks for the second: a panic of a Rust extension is one.
                failure = RuntimeError(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
        try:
            loop.call_soon_threadsafe(deliver, value, failure)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
