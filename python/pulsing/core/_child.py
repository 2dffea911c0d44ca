"""The program of a process that runs one actor (``new_process=True``); `_process` starts it.

It is run as a file, before it knows where Pulsing is: only the standard library is imported until the first message has
said so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsing.core._config import SystemConfig
    from pulsing.core._ids import ActorId

LENGTH = struct.Struct("!I")

_GRACE = 5.0
"""Seconds that running calls get when the actor ends by itself or by a signal."""
_EXIT_LIMIT = 0.8
"""Seconds that the interpreter may take to end once the actor has: threads that users left behind would hold it."""
_ORPHAN_LIMIT = 0.5
"""Seconds that the actor gets once the process that it belongs to is gone."""
_PR_SET_PDEATHSIG = 1


def frame(message: tuple[Any, ...]) -> bytes:
    """A message as it travels between a process and the one it belongs to."""
    body = pickle.dumps(message)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> tuple[str, Any]:
    """A message that came from the process."""
    what, value = pickle.loads(body)
    return str(what), value


class Parent:
    """The process that this one belongs to."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def receive(self) -> bytes | None:
        """The next message; None: it is gone."""
        size = self._exactly(LENGTH.size)
        return None if size is None else self._exactly(LENGTH.unpack(size)[0])

    def _exactly(self, size: int) -> bytes | None:
        got = b""
        while len(got) < size:
            try:
                more = self._channel.recv(size - len(got))
            except OSError:
                return None
            if not more:
                return None
            got += more
        return got

    def tell(self, what: str, value: Any = None) -> None:
        """Says how it goes here; whether anybody listens is seen elsewhere."""
        with contextlib.suppress(OSError):
            self._channel.sendall(frame((what, value)))


def die_with(parent: int) -> None:
    """Has the kernel end this process with the one that started it. Elsewhere than on Linux the channel's end does."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it was quicker


async def serve(parent: Parent, config: SystemConfig, label: str, actor: ActorId) -> None:
    """Runs a node until its actor has ended, a signal comes, or the parent says so or is gone."""
    from pulsing.core import _global
    from pulsing.core._errors import text_of
    from pulsing.core._system import ActorSystem
    from pulsing.exceptions import BindError

    loop = asyncio.get_running_loop()
    told: asyncio.Future[float] = loop.create_future()

    def stop(grace: float) -> None:
        if not told.done():
            told.set_result(grace)

    threading.Thread(target=_listen, args=(parent, loop, stop), name="pulsing-parent", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, _GRACE)
    try:
        try:
            system = await ActorSystem.create(config, process_of=label)
        except BindError:
            # The address of the process before this one has been taken by somebody else.
            host = (config.addr or "").rpartition(":")[0]
            system = await ActorSystem.create(dataclasses.replace(config, addr=f"{host}:0"), process_of=label)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
        parent.tell("failed", f"{type(error).__name__}: {text_of(error)}")
        return
    _global.adopt(system)
    system.when_ended(actor, lambda: stop(_GRACE))
    parent.tell("joined", (system.node_id.raw, system.core.bound))
    grace = await told
    parent.tell("ended")
    await system.shutdown(grace)


def _listen(parent: Parent, loop: asyncio.AbstractEventLoop, stop: Any) -> None:
    while (body := parent.receive()) is not None:
        what, value = decode(body)
        if what == "stop":
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop, value)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(stop, 0.0)
    threading.Event().wait(_ORPHAN_LIMIT)
    os._exit(1)


def main() -> None:
    """Serves the parent whose end of the channel is this process's file number in the first argument."""
    number, parent_id = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(number, False)
    die_with(parent_id)
    parent = Parent(socket.socket(fileno=number))
    first = parent.receive()
    if first is None:
        return
    # Nothing of Pulsing is in the first message: it says where to find that.
    sys.path[:], sys.argv[:] = pickle.loads(first)
    second = parent.receive()
    if second is None:
        return
    config, label, actor, fast, log = pickle.loads(second)
    if log is not None:
        from pulsing.core._lifecycle import start_logging

        start_logging(*log)
    factory = None
    if fast:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(parent, config, label, actor))
    sys.stdout.flush()
    sys.stderr.flush()
    ending = threading.Timer(_EXIT_LIMIT, os._exit, [0])
    ending.daemon = True
    ending.start()


if __name__ == "__main__":
    main()
