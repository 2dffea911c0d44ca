"""A request that a Router elsewhere sends to a server of this host's loopback, and the bytes of its answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pulsing.exceptions import PulsingRuntimeError
from pulsing.serving._errors import RequestError

if TYPE_CHECKING:
    import ssl

    from pulsing.core._inbound import InboundCall
    from pulsing.serving._probe import Url

# Seconds until the server must have taken a connection; Routers give one that they dial as long.
_DIAL = 2.0
# Most bytes of one item: a message of this size still goes by the lane of small ones.
_PIECE = 32768


async def relay(call: InboundCall, request: bytes, url: Url, tls: ssl.SSLContext | None) -> None:
    """Answers a ``relay`` of the worker protocol, see ``proto/worker.proto``.

    Args:
        call: Gets what the server answers, as it comes.
        request: The bytes of a whole HTTP request; empty: the server only has to let itself be connected to.
        url: The server.
        tls: Whose certificates are believed under https.
    """
    try:
        async with asyncio.timeout(_DIAL):
            reader, writer = await asyncio.open_connection(url.host, url.port, ssl=tls)
    except (OSError, TimeoutError) as error:
        RequestError(503, f"{url}: cannot connect: {error or 'no answer'}").fail(call)
        return
    try:
        if not request:
            call.reply(b"")
            return
        # It may answer before it has read everything: nobody waits for that here.
        writer.write(request)
        while piece := await reader.read(_PIECE):
            if not call.try_send(piece):
                await call.send(piece)
        call.end()
    except PulsingRuntimeError:
        # The Router has what it wants, or its client has left.
        pass
    except OSError as error:
        RequestError(502, f"{url}: {error}").fail(call)
    finally:
        writer.transport.abort()
