"""Ports that stay ours between being chosen and being used."""

import contextlib
import errno
import fcntl
import os
import pathlib
import random
import socket
import tempfile
import threading

# Below the kernel's ephemeral ports, above those that people give to services (and Ray to its workers).
FIRST, LAST = 20000, 32767


class PortTakenError(Exception):
    """A fixed port is not free; the text says who holds it."""


class _Locks:
    """One byte of one file for each port: what other launchers of this user see as taken.

    A port's socket must be closed before the engine can bind it, and an engine may load for minutes before it does. The
    locks cover that time. POSIX drops all of a process's locks on a file when it closes any descriptor of it, so there
    is one descriptor a process, never closed.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._mine: set[int] = set()
        self._fd: int | None = None

    def take(self, port: int) -> bool:
        with self._guard:
            if port in self._mine:
                return False
            try:
                fcntl.lockf(self._file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise
            self._mine.add(port)
            return True

    def drop(self, port: int) -> None:
        with self._guard:
            if port in self._mine:
                self._mine.discard(port)
                fcntl.lockf(self._file(), fcntl.LOCK_UN, 1, port)

    def _file(self) -> int:
        if self._fd is None:
            path = pathlib.Path(tempfile.gettempdir(), f"pulsing-ports-{os.getuid()}")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
        return self._fd


_locks = _Locks()


def _bind(port: int, host: str, *, reuse: bool = False) -> socket.socket | None:
    """A socket that keeps the port on every address; None when somebody has it.

    Without SO_REUSEADDR where possible: two sockets that have it may both bind, and the second one may listen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    keeper = socket.socket(family, socket.SOCK_STREAM)
    if reuse:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        keeper.bind(("", port))
    except OSError as error:
        keeper.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    return keeper


class PortHolder:
    """Chooses ports for the workers of one host and keeps them.

    A port is held by a bound socket until `release_sockets`, just before the command runs, and by a lock that other
    launchers respect until `close`.
    """

    def __init__(self, host: str = "127.0.0.1", first: int = FIRST, last: int = LAST) -> None:
        self._host = host
        self._first, self._last = first, last
        # A place of one's own to start from: launchers that start together seldom meet.
        self._next = random.randint(first, last)
        self._sockets: dict[int, socket.socket | None] = {}

    def dynamic(self, count: int = 1) -> int:
        """A block of free consecutive ports; gives its first.

        Raises:
            PortTakenError: there is none left.
        """
        span = self._last - self._first + 1
        tried = 0
        while tried < span:
            start = self._next
            if start + count - 1 > self._last:
                tried += self._last - start + 1
                self._next = self._first
                continue
            taken = next((port for port in range(start, start + count) if not self._hold(port)), None)
            if taken is None:
                self._next = start + count
                return start
            self.release(start, taken - start)
            tried += taken - start + 1
            self._next = taken + 1
        raise PortTakenError(f"no block of {count} free ports between {self._first} and {self._last}")

    def fixed(self, port: int, count: int = 1) -> int:
        """Holds exactly these ports.

        Raises:
            PortTakenError: one is not free; names its holder where the system tells.
        """
        for at in range(port, port + count):
            if not self._hold(at, fixed=True):
                self.release(port, at - port)
                raise PortTakenError(
                    f"port {at} is taken{holder_of(at) or ' by another fleet, or a process that does not listen on it'}"
                )
        return port

    def rehold(self, port: int, count: int = 1) -> bool:
        """For ports that are ours by lock: whether nobody has bound them meanwhile, which needs that we let them go."""
        return all(self._sockets.get(at) is not None or _is_free(at, self._host) for at in range(port, port + count))

    def release_sockets(self, port: int, count: int = 1) -> None:
        """Lets the command bind these ports; other launchers still leave them alone."""
        for at in range(port, port + count):
            held = self._sockets.get(at)
            if held is not None:
                held.close()
                self._sockets[at] = None

    def release(self, port: int, count: int = 1) -> None:
        """Gives ports back."""
        for at in range(port, port + count):
            if at in self._sockets:
                held = self._sockets.pop(at)
                if held is not None:
                    held.close()
                _locks.drop(at)

    def close(self) -> None:
        """Gives all ports back."""
        for port in list(self._sockets):
            self.release(port)

    def __enter__(self) -> "PortHolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self, port: int, *, fixed: bool = False) -> bool:
        if not _locks.take(port):
            return False
        held = _bind(port, self._host)
        if held is None and fixed and _is_free(port, self._host):
            # Only connections that are still closing: a server may bind, so there is no reason to refuse the port.
            held = _bind(port, self._host, reuse=True)
        if held is None:
            _locks.drop(port)
            return False
        self._sockets[port] = held
        return True


def _is_free(port: int, host: str) -> bool:
    """Whether a server could bind: connections that are still closing (TIME_WAIT) do not hinder it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def holder_of(port: int) -> str | None:
    """` by pid 12 (python server.py)`, or None where the system does not tell."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(fd.readlink()) in inodes:
                        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                        return f" by pid {process.name} ({words[:200]})"
    return " by a process of another user"
