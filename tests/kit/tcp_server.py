"""A TCP server for as long as a block lasts, of which no connection is left to the collector."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves one connection after the other, each in a task of its own, until the block ends; then all are cut.

    Args:
        serve: What is done with a connection. It may return or fail with what a client that leaves makes it fail with;
            the connection is closed then.
        port: On loopback; 0: any.
        tls: The server's certificate, where it has one.

    Yields:
        Its address, host:port.
    """
    connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
    over = False

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    # No coroutine: asyncio makes a task of one, and a task that is cancelled before its first step closes nothing.
    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if over:
            writer.transport.abort()
        else:
            connections[writer] = asyncio.create_task(served(reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", port, ssl=tls)
    host, bound = server.sockets[0].getsockname()[:2]
    try:
        yield f"{host}:{bound}"
    finally:
        over = True
        # asyncio loses the socket of a client that it accepted in the turn before `close`: its transport meets a closed
        # server. So nobody is accepted any more, and who was has the three turns that it takes to be here and gone.
        asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        server.close()
        for writer, task in connections.items():
            # One that has closed, and has nothing left to send, may have lost its loop.
            if not writer.is_closing() or writer.transport.get_write_buffer_size():
                writer.transport.abort()
            task.cancel()
        for failure in await asyncio.gather(*connections.values(), return_exceptions=True):
            if isinstance(failure, Exception):
                raise failure
