"""The event loop that runs in a thread of its own, for programs that have none."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_EXIT_SECONDS = 2.0
"""What the end of the interpreter waits for actors' last words, and then for the thread."""


class LoopThread:
    """A running loop and its thread; a daemon, so that it never keeps the interpreter from exiting (R13)."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._pid = os.getpid()
        self._at_exit: Callable[[], Coroutine[Any, Any, None]] | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="pulsing-loop", daemon=True)
        self._thread.start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        loop.call_soon(ready.set)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            # Systems that still run leave the cluster when the loop's generators are closed.
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    def at_exit(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs ``last()`` on the loop when the interpreter exits, if the loop has not been stopped by then.

        Called after the runtime has registered its own exit hook, so that this one runs first.
        """
        self._at_exit = last
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self._pid != os.getpid() or self._at_exit is None or not self.running:
            return
        ending = asyncio.run_coroutine_threadsafe(self._at_exit(), self.loop)
        # Whatever an actor's last words raise, or if they take too long: the interpreter exits.
        with contextlib.suppress(Exception):
            ending.result(_EXIT_SECONDS)
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the loop can be used."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def stop(self) -> None:
        """Ends the loop and waits for its thread, within reason."""
        atexit.unregister(self._exit)
        if self.running:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_EXIT_SECONDS)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
