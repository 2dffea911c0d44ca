"""`pul.bootstrap`: a node of whatever this process is part of."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Unpack

from pulsing.core import _global
from pulsing.core._config import NodeSettings
from pulsing.core._settings import given
from pulsing.core._system import ActorSystem
from pulsing.core._threads import refuse_on_a_loop
from pulsing.exceptions import CallCancelledError, ConfigError, PulsingRuntimeError
from pulsing.integrations import ray as _ray_job
from pulsing.integrations import torchrun as _torchrun_job
from pulsing.integrations._job import Options, complete

_log = logging.getLogger("pulsing")

Start = Callable[[], Coroutine[Any, Any, ActorSystem]]


class Bootstrap:
    """Calling it begins, `ready` waits for the end of that, `stop` undoes it. A process has one: ``pul.bootstrap``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._task: asyncio.Task[None] | None = None

    def __call__(
        self,
        *,
        ray: bool = True,
        torchrun: bool = True,
        on_ready: Callable[[], object] | None = None,
        wait_timeout: float | None = None,
        expected: int | None = None,
        addr: str | None = None,
        seeds: Sequence[str] | None = None,
        passphrase: str | None = None,
        passphrase_file: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        **settings: Unpack[NodeSettings],
    ) -> bool | None:
        """Starts the process's own system as what surrounds it demands, in the background.

        The first of these that holds: seeds are given, here, in the environment or in the file; Ray is initialized;
        torchrun's variables are set; else this is a cluster of its own. In a thread that runs an event loop the system
        belongs to that loop, and ``await pul.bootstrap.ready()`` waits for it; else it gets a loop as ``pul.sync.init``
        does.

        Args:
            ray: Look for Ray.
            torchrun: Look for torchrun.
            on_ready: Called without arguments when the system runs and the expected nodes are there, on the loop, or
                in the thread, that started it.
            wait_timeout: Seconds to wait here; None: return at once. Not in a thread that runs an event loop.
            expected: Nodes to wait for, this one counted; default: under torchrun all ranks, else none.
            addr: As for `pul.init`, and so are the others.
            seeds: Nodes to join.
            passphrase: Secret of the cluster.
            passphrase_file: File with it.
            config: TOML file of settings.
            **settings: As for `pul.init`.

        Returns:
            None without `wait_timeout`; else whether the system is ready. False: it goes on in the background.

        Raises:
            PulsingRuntimeError: It runs already; or `wait_timeout` where an event loop runs.
            ConfigError: Settings that make no sense.
            Exception: While it waits, what the start raised. In the background that is an error in the log.
        """
        common: dict[str, Any] = {
            "addr": addr,
            "expected": expected,
            "passphrase": passphrase,
            "passphrase_file": passphrase_file,
            "config": config,
            **settings,
        }
        start = self._starter(common, seeds, ray, torchrun)
        loop = _running_loop()
        if loop is not None and wait_timeout is not None:
            raise PulsingRuntimeError(
                "wait_timeout would stop the event loop that runs here: call pul.bootstrap() without it, then "
                "'await pul.bootstrap.ready(timeout)'"
            )
        if wait_timeout is not None and not wait_timeout >= 0:
            raise ConfigError(f"wait_timeout={wait_timeout!r}: expected seconds, 0 or more, or None for not at all")
        with self._lock:
            if self._attempt is not None and not self._attempt.over:
                raise PulsingRuntimeError("pul.bootstrap() was called before: pul.bootstrap.stop() undoes it")
            attempt = self._attempt = _Attempt(start, on_ready)
        if loop is not None:
            # A loop keeps no task alive by itself.
            self._task = loop.create_task(attempt.on_this_loop(), name="pulsing-bootstrap")
        else:
            threading.Thread(target=attempt.in_this_thread, name="pulsing-bootstrap", daemon=True).start()
        if wait_timeout is None:
            return None
        if not attempt.done.wait(wait_timeout):
            return False
        attempt.result()
        return True

    async def ready(self, timeout: float | None = None) -> ActorSystem:
        """Waits for the system that the call began.

        Args:
            timeout: Seconds; None for ever.

        Raises:
            TimeoutError: It is not there yet; it goes on.
            PulsingRuntimeError: Nothing was begun.
            Exception: What the start raised.
        """
        attempt = self._attempt
        if attempt is None:
            raise PulsingRuntimeError("nothing to wait for: call pul.bootstrap() first")
        async with asyncio.timeout(timeout):
            while not attempt.done.is_set():  # noqa: ASYNC110 - the other end may be a thread
                await asyncio.sleep(0.02)
        return attempt.result()

    def stop(self) -> None:
        """Ends what the call began: the start if that is still under way, else the system. Not in a thread that runs an
        event loop; there, ``await pul.shutdown()`` ends the system.

        Raises:
            PulsingRuntimeError: This thread runs an event loop.
        """
        refuse_on_a_loop()
        from pulsing import sync

        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()
            attempt.done.wait()
            if attempt.system is not None and _global._current() is attempt.system:
                sync.shutdown()

    def _starter(self, common: dict[str, Any], seeds: Sequence[str] | None, ray: bool, torchrun: bool) -> Start:
        usual = given(common["config"], os.environ)
        if not seeds and not usual.get("seeds"):
            if ray and _ray_job.is_inside_ray():
                return lambda: _ray_job.init_inside_ray(**common)
            if torchrun and _torchrun_job.is_torchrun():
                return lambda: _torchrun_job.init_inside_torchrun(**common)
        options = Options(
            **{name: common[name] for name in ("addr", "expected", "passphrase", "passphrase_file", "config")},
            settings={name: value for name, value in common.items() if name in NodeSettings.__annotations__},
        )
        del common["expected"]

        async def plain() -> ActorSystem:
            before = _global._current()
            system = await _global.init(seeds=seeds, **common)
            return await complete(system, options.expected, options.deadline, stop=before is None)

        return plain


class _Attempt:
    """One start, from its call to its end."""

    def __init__(self, start: Start, on_ready: Callable[[], object] | None) -> None:
        self.done = threading.Event()
        self.system: ActorSystem | None = None
        self._start = start
        self._on_ready = on_ready
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def over(self) -> bool:
        """Whether it failed, or its system has ended."""
        return self.done.is_set() and (self.system is None or self.system is not _global._current())

    def result(self) -> ActorSystem:
        """What came of it, when it is done."""
        if self._error is not None:
            raise self._error
        assert self.system is not None
        return self.system

    def cancel(self) -> None:
        """Ends the start if it is under way."""
        with self._lock:
            self._cancelled = True
            if self._task is not None and not self.done.is_set():
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def on_this_loop(self) -> None:
        """Runs it to its end, whatever that is; errors are kept for `result`, and logged."""
        try:
            self.system = await self._run()
        except asyncio.CancelledError:
            self._failed(CallCancelledError("pul.bootstrap() was cancelled before the system was ready"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody may wait for it elsewhere
            self._failed(error)
        self._finish()

    def in_this_thread(self) -> None:
        """The same with a loop of its own for the system."""
        from pulsing import sync

        try:
            self.system = sync._begin(self._run).system
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
        self._finish()

    async def _run(self) -> ActorSystem:
        with self._lock:
            if self._cancelled:
                raise CallCancelledError("pul.bootstrap() was cancelled before the system was ready")
            self._task = asyncio.current_task()
        return await self._start()

    def _failed(self, error: Exception) -> None:
        self._error = error
        if not self._cancelled:
            _log.error("pul.bootstrap() failed: %s", error)
        self.done.set()

    def _finish(self) -> None:
        try:
            if self.system is not None and self._on_ready is not None:
                self._on_ready()
        except Exception:  # noqa: BLE001 - the caller's own
            _log.exception("on_ready of pul.bootstrap() failed")
        finally:
            self.done.set()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


bootstrap = Bootstrap()
"""Makes this process a node of what surrounds it; see `Bootstrap.__call__`."""
