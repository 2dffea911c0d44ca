"""A port that was chosen stays ours until it is used."""

import contextlib
import socket
import subprocess
import sys
from collections import Counter

import pytest

from pulsing.fleet import PortHolder, PortTakenError

# A launcher that takes ports, lets go of the sockets as if engines were loading, and keeps them otherwise.
LAUNCHER = """
import sys
from pulsing.fleet import PortHolder
holder = PortHolder(first=int(sys.argv[1]), last=int(sys.argv[2]))
ports = [holder.dynamic() for _ in range(int(sys.argv[3]))]
for port in ports:
    holder.release_sockets(port)
print(*ports, flush=True)
sys.stdin.read()
"""


def test_a_thousand_ports_in_parallel_launchers_are_a_thousand_ports() -> None:
    # A range so small that the launchers do meet, and yet with room for what else runs on this machine.
    words = [sys.executable, "-c", LAUNCHER, "21000", "22899", "250"]
    launchers = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    got: Counter[int] = Counter()
    for launcher in launchers:
        assert launcher.stdout is not None
        got.update(map(int, launcher.stdout.readline().split()))
    for launcher in launchers:
        launcher.communicate("")
    assert len(got) == 1000
    assert set(got.values()) == {1}


def test_a_held_port_cannot_be_bound() -> None:
    with PortHolder() as holder:
        port = holder.dynamic()
        for reuse in (0, 1):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                with pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", port))
        assert holder.rehold(port)
        holder.release_sockets(port)
        with socket.create_server(("127.0.0.1", port)):
            assert not holder.rehold(port)
        assert holder.rehold(port)


def test_blocks_are_consecutive_and_skip_what_is_taken() -> None:
    with socket.socket() as other, PortHolder(first=23000, last=23100) as holder:
        other.bind(("", 23005))
        starts = [holder.dynamic(10), holder.dynamic(10), holder.dynamic(10)]
        taken = [port for start in starts for port in range(start, start + 10)]
        assert len(set(taken)) == 30
        assert 23005 not in taken
    with (
        PortHolder(first=23000, last=23008) as holder,
        pytest.raises(PortTakenError, match="no block of 10 free ports"),
    ):
        holder.dynamic(10)


def test_a_port_with_reuseport_listeners_is_not_free() -> None:
    with socket.socket() as other, PortHolder() as holder:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortTakenError, match="is taken by pid"):
            holder.fixed(other.getsockname()[1])


def test_closing_connections_do_not_hold_a_fixed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    # The server closed first, so its side of the connection lingers.
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        pytest.fail("this system keeps no closing connection: the test shows nothing")
    with PortHolder() as holder:
        assert holder.fixed(port) == port


def test_released_ports_are_free_again() -> None:
    with PortHolder(first=23100, last=23100) as holder:
        assert holder.dynamic() == 23100
        with pytest.raises(PortTakenError):
            PortHolder(first=23100, last=23100).dynamic()
    with PortHolder(first=23100, last=23100) as holder:
        assert holder.dynamic() == 23100
