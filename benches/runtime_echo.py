"""The floor: bare TCP between two processes, without actors, names or pickles."""

import asyncio
import contextlib
import socket
import threading
from typing import Any

import runtime_meter as meter


class Answering(asyncio.Protocol):
    """Sends back each whole message of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[bytes] = []
        self.got = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.got += len(data)
        if self.got >= self.size:
            self.transport.write(b"".join(self.parts))
            self.parts, self.got = [], 0


class Asking(Answering):
    """Its other side: one message at a time."""

    waiter: "asyncio.Future[bytes]"

    def ask(self, message: bytes) -> "asyncio.Future[bytes]":
        """Sends, and promises the answer."""
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        return self.waiter

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.got += len(data)
        if self.got >= self.size:
            whole = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
            self.parts, self.got = [], 0
            self.waiter.set_result(whole)


def receive(link: socket.socket, block: memoryview) -> bool:
    """Fills the block; False at the end of the connection."""
    got = 0
    while got < len(block):
        count = link.recv_into(block[got:])
        if not count:
            return False
        got += count
    return True


def blocking_server(listener: socket.socket) -> None:
    """Echoes whole big messages on blocking sockets."""
    block = memoryview(bytearray(meter.BIG))
    with contextlib.suppress(OSError):
        while True:
            link, _ = listener.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while receive(link, block):
                link.sendall(block)


async def serve() -> None:
    """The second process: a port for each kind of echo."""
    loop = asyncio.get_running_loop()
    small = await loop.create_server(lambda: Answering(len(meter.SMALL)), "127.0.0.1", 0)
    big = await loop.create_server(lambda: Answering(meter.BIG), "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=blocking_server, args=(listener,), daemon=True).start()
    ports = [server.sockets[0].getsockname()[1] for server in (small, big)]
    meter.ready(",".join(map(str, [*ports, listener.getsockname()[1]])))
    await meter.until_stdin_closes()


async def main(options: Any) -> None:
    """The rows."""
    child = meter.Child(__file__, "--serve", "--loop", options.loop)
    small_port, big_port, blocking_port = map(int, child.addr.split(","))
    timer = meter.Meter(options.seconds, [child.pid])
    loop = asyncio.get_running_loop()
    _, small = await loop.create_connection(lambda: Asking(len(meter.SMALL)), "127.0.0.1", small_port)
    _, big = await loop.create_connection(lambda: Asking(meter.BIG), "127.0.0.1", big_port)
    message, block = bytes(meter.BIG), memoryview(bytearray(meter.BIG))

    async def sockets() -> meter.Metrics:
        with socket.create_connection(("127.0.0.1", blocking_port)) as link:

            def echo() -> None:
                link.sendall(message)
                receive(link, block)

            return timer.blocking(echo)

    rows = {
        "remote_seq": lambda: timer.sequential(lambda: small.ask(meter.SMALL)),
        "remote_seq_one": lambda: timer.sequential_on(1, lambda: small.ask(meter.SMALL)),
        "remote_seq_two": lambda: timer.sequential_on(2, lambda: small.ask(meter.SMALL)),
        "echo_bytes": lambda: timer.sequential(lambda: big.ask(message)),
        "echo_bytes_one": lambda: timer.sequential_on(1, lambda: big.ask(message)),
        "echo_bytes_two": lambda: timer.sequential_on(2, lambda: big.ask(message)),
        "echo_sockets": sockets,
    }
    await meter.measure(options.rows, rows, 60)
    child.stop()


if __name__ == "__main__":
    chosen = meter.options()
    meter.run(serve() if chosen.serve else main(chosen), chosen.loop)
