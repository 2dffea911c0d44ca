"""Actors in processes of their own (``new_process=True``): started, watched, started again, and never left behind.

The process runs a node that joins this cluster, so that every promise holds for its actor on the path that all remote
actors take. What is special about it is here: it lives and dies with the node that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from pulsing.core import _child
from pulsing.core._errors import text_of
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._lifecycle import logging_settings
from pulsing.core._refs import ActorRef
from pulsing.core._spawn import Blueprint, SpawnOptions
from pulsing.core._supervision import RestartBudget
from pulsing.exceptions import ProcessDiedError, PulsingRuntimeError, PulsingTimeoutError

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

_KILL_AFTER = 1.0
"""Seconds that a process gets beyond what its actor may take, before it is killed."""
_CAUSE_LIMIT = 1.0
"""Seconds within which a process that cost us its link has been reaped."""

_log = logging.getLogger("pulsing")


class Process:
    """One operating system process, from its start until it is reaped. Belongs to the loop it is started on."""

    def __init__(self, system: ActorSystem, label: str, addr: str, actor: ActorId) -> None:
        if not sys.executable:
            raise PulsingRuntimeError(
                "new_process=True needs an interpreter to start, but sys.executable is empty here"
            )
        self._loop = system.loop
        self._label = label
        self.joined: asyncio.Future[NodeId] = self._loop.create_future()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.said_goodbye = False
        self.addr = addr
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            with theirs:
                command = [sys.executable, *_flags(), "-P", _child.__file__]
                command += [str(theirs.fileno()), str(os.getpid()), label]
                # Not in a thread: Linux kills the child when the thread that started it ends. In a process group of its
                # own: Ctrl-C at the terminal is for us, who drain what runs there and end it then.
                self._popen = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
                )
        except BaseException:
            self._channel.close()
            raise
        threading.Thread(target=self._reap, name=f"pulsing-process-{self._popen.pid}", daemon=True).start()
        self._talk = self._loop.create_task(self._listen(_boot(system, label, addr, actor)))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    def _reap(self) -> None:
        code = self._popen.wait()
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._has_ended, code)

    def _has_ended(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    async def _listen(self, boot: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._channel, boot)
            while (message := await self._receive()) is not None:
                self._heard(message)
        except (OSError, EOFError) as error:
            _log.debug("the channel to the process of actor %s broke: %s", self._label, error)
        finally:
            self._channel.close()

    def _heard(self, message: tuple[str, Any]) -> None:
        what, value = message
        if what == "joined" and not self.joined.done():
            node, self.addr = value
            self.joined.set_result(NodeId(node))
        elif what == "failed" and not self.joined.done():
            self.joined.set_exception(
                PulsingRuntimeError(f"the process of actor {self._label} could not join this cluster: {value}")
            )
        elif what == "ended":
            self.said_goodbye = True

    async def _receive(self) -> tuple[str, Any] | None:
        size = await self._exactly(_child.LENGTH.size)
        if size is None:
            return None
        body = await self._exactly(_child.LENGTH.unpack(size)[0])
        return None if body is None else _child.decode(body)

    async def _exactly(self, size: int) -> bytes | None:
        got = b""
        while len(got) < size:
            more = await self._loop.sock_recv(self._channel, size - len(got))
            if not more:
                return None
            got += more
        return got

    async def end(self, grace: float, limit: float) -> None:
        """Asks it to stop its actor and leave; what is left of it after `limit` seconds is killed. Returns once it is
        reaped.
        """
        if not self.ended.done():
            with contextlib.suppress(OSError, ValueError):
                await self._loop.sock_sendall(self._channel, _child.frame(("stop", grace)))
            await asyncio.wait([self.ended], timeout=limit)
        if not self.ended.done():
            self.kill()
            await asyncio.wait([self.ended])

    def kill(self) -> None:
        """Ends it at once."""
        self._popen.kill()

    def how(self) -> str:
        """How it ended, in words."""
        code = self.ended.result()
        if code >= 0:
            return f"with exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def death(self) -> ProcessDiedError:
        """The error for its end."""
        code = self.ended.result()
        return ProcessDiedError(
            f"the process of actor {self._label} ended {self.how()} before the actor was ready; its stderr says more",
            self._label,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )


class ProcessActor:
    """An actor in a process of its own, as the node that started it sees it."""

    def __init__(self, system: ActorSystem, plan: Blueprint, options: SpawnOptions, actor: ActorId) -> None:
        self._system = system
        self._plan = plan
        self._options = dataclasses.replace(options, new_process=False)
        self._budget = RestartBudget(options.policy.under(system.config))
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False
        self._restarting = False
        self.name = options.name
        self.public = options.public is not False
        self.id = actor
        self.ref: ActorRef | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        return self.name or self._plan.label

    async def start(self) -> ActorRef:
        """Starts the process and the actor in it; whatever goes wrong, nothing is left of either."""
        at = self._system.addr if self._system.config.advertise is None else self._system.core.bound
        ref = await self._start(f"{at.rpartition(':')[0]}:0")
        self._watching = self._system.background(self._watch())
        return ref

    async def _start(self, addr: str) -> ActorRef:
        from pulsing.core._service import create_there

        process = self._process = Process(self._system, self.label, addr, self.id)
        limit = self._system.config.process_start_timeout
        try:
            either: set[asyncio.Future[Any]] = {process.joined, process.ended}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if process.joined.done():
                self.ref = await create_there(
                    self._system, process.joined.result(), self._plan, self._options, self.id, limit
                )
                return self.ref
            if process.ended.done():
                raise process.death()
            raise PulsingTimeoutError(
                f"the start of the process of actor {self.label} (process_start_timeout says how long it may take)",
                round((limit or 0.0) * 1000),
            )
        except BaseException as error:
            if isinstance(error, ConnectionError | PulsingRuntimeError):
                # A process that died takes its link with it, which is seen first.
                await asyncio.wait([process.ended], timeout=_CAUSE_LIMIT)
            died = process.ended.done() and not process.said_goodbye
            if not process.joined.done():
                process.kill()
            await asyncio.shield(self._system.background(process.end(0.0, _KILL_AFTER)))
            if died and not isinstance(error, ProcessDiedError | asyncio.CancelledError):
                raise process.death() from error
            raise

    async def _watch(self) -> None:
        while self._process is not None:
            process = self._process
            await asyncio.wait([process.ended])
            if self._stopping:
                return
            if process.said_goodbye:
                _log.debug("the process of actor %s has ended with its actor", self.label)
                break
            if not self._options.policy.restarts:
                _log.error("the process of actor %s ended %s: the actor is gone", self.label, process.how())
                break
            self._restarting = True
            again = await self._restarted(process)
            self._restarting = False
            if not again:
                break
        self._system.processes.forget(self)

    async def _restarted(self, process: Process) -> bool:
        # On the address of the old one, which tells every node that the old one is no more (M4).
        addr = process.addr
        how, reason = process.how(), "node_lost"
        while True:
            delay = self._budget.next_delay(time.monotonic())
            if delay is None:
                _log.error("the process of actor %s ended %s, too often: the actor is gone", self.label, how)
                return False
            _log.warning("the process of actor %s ended %s: starting it again in %.2f s", self.label, how, delay)
            await asyncio.sleep(delay)
            self.id = ActorId.generate()
            self._system.core.restarted(
                self.id.raw, reason, name=self.name, class_name=self._plan.label, public=self.public
            )
            try:
                await self._start(addr)
            except Exception as error:  # noqa: BLE001 - a failed start counts like one more death
                how, reason = f"and did not start again ({type(error).__name__}: {text_of(error)})", "failed"
                continue
            return True

    async def stop(self, grace: float) -> None:
        """Ends the actor and its process."""
        self._stopping = True
        process, watching = self._process, self._watching
        if self._restarting and watching is not None:
            # What it has started so far, it takes back itself.
            watching.cancel()
            await asyncio.wait([watching])
        elif process is not None:
            hooks = self._system.config.stop_timeout if grace > 0 else 0.0
            await process.end(grace, grace + hooks + _KILL_AFTER)
        self._system.processes.forget(self)


class Processes:
    """The processes that one node has started for actors."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._actors: list[ProcessActor] = []
        self.in_memory = False
        """The node is on a network of `pulsing.testing`, which no other process can join."""

    async def spawn(self, plan: Blueprint, options: SpawnOptions, actor: ActorId) -> ActorRef:
        """Starts an actor in a process of its own.

        Raises:
            ValueError: It is to be started again, and could not be found then.
            PulsingRuntimeError: The network is one in memory.
            ProcessDiedError: The process ended before the actor was ready.
            PulsingTimeoutError: It did not join within ``process_start_timeout``.
            Exception: What the constructor or `on_start` raised.
        """
        if self.in_memory:
            raise PulsingRuntimeError("new_process=True on a network in memory: another process cannot join that")
        if options.policy.restarts and options.name is None:
            raise ValueError(
                "new_process=True with a restart policy needs a name: an actor whose process is started again is found "
                "under it, not through the proxies of the old one"
            )
        one = ProcessActor(self._system, plan, options, actor)
        self._actors.append(one)
        try:
            return await one.start()
        except BaseException:
            self.forget(one)
            raise

    def forget(self, actor: ProcessActor) -> None:
        """Frees what it held; idempotent."""
        if actor in self._actors:
            self._actors.remove(actor)

    def find(self, which: Any) -> ProcessActor | None:
        """The one with this name, id, reference or proxy."""
        which = getattr(which, "actor_id", which)
        for one in self._actors:
            if which == (one.name if isinstance(which, str) else one.id) or which == str(one.id):
                return one
        return None

    async def stop(self, grace: float) -> None:
        """Ends all of them."""
        for error in await asyncio.gather(*(one.stop(grace) for one in list(self._actors)), return_exceptions=True):
            if isinstance(error, BaseException):
                _log.error("the process of an actor did not stop cleanly", exc_info=error)


def _boot(system: ActorSystem, label: str, addr: str, actor: ActorId) -> bytes:
    """What the process is told. Over its own channel: a command line and an environment can be read by others."""
    config = dataclasses.replace(
        system.config,
        addr=addr,
        seeds=(system.addr,),
        join_timeout=system.config.process_start_timeout,
        # One address, which is taken.
        observe_addr=None,
    )
    if config.advertise is not None:
        # A port of its own, and a way to the parent that needs no detour through what stands between it and others.
        host = system.addr.rpartition(":")[0]
        own = system.core.bound.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
        config = dataclasses.replace(config, advertise=f"{host}:0", seeds=(own,))
    uvloop = type(system.loop).__module__.split(".")[0] == "uvloop"
    return _child.frame((sys.path, sys.argv)) + _child.frame((config, label, actor, uvloop, logging_settings()))


def _flags() -> list[str]:
    """This interpreter's own flags: what is off or strict here is so there."""
    flags = sys.flags
    found = ["-O"] * flags.optimize
    for on, flag in ((flags.isolated, "-I"), (flags.dont_write_bytecode, "-B"), (flags.dev_mode, "-Xdev")):
        if on:
            found.append(flag)
    if not flags.isolated:
        found += ["-E"] * flags.ignore_environment + ["-s"] * flags.no_user_site
    return [*found, *(f"-W{option}" for option in sys.warnoptions)]
