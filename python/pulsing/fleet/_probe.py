"""Asks an engine whether it is ready. No client library: it is one status line."""

import asyncio
import contextlib

from pulsing.fleet._model import HostAndPort


async def answers(addr: HostAndPort, path: str | None, timeout: float) -> str | None:
    """None when it answers, else why it does not.

    Args:
        addr: where to ask.
        path: HTTP path that must answer 2xx; None: a connection suffices.
        timeout: seconds for the whole answer.
    """
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(addr.host, addr.port)
            try:
                if path is None:
                    return None
                request = f"GET {path} HTTP/1.1\r\nHost: {addr.addr}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode("ascii", "replace"))
                await writer.drain()
                line = (await reader.readline()).decode("latin-1").split()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"no answer from {addr.addr} in {timeout:g} s"
    except (OSError, ValueError) as error:
        return f"{addr.addr}: {error}"
    if len(line) < 2 or not line[0].startswith("HTTP/") or not line[1].isdigit():
        return f"{addr.addr} does not speak HTTP"
    return None if line[1].startswith("2") else f"{addr.url}{path} answers {line[1]}"
