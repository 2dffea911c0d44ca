"""Calls that may run twice: sent again when the connection broke under them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from pulsing.exceptions import ConnectFailedError, ConnectionLostError, NodeNotFoundError

_FIRST_PAUSE = 0.05
"""Seconds before the second attempt; each further pause is twice as long, up to `_LONGEST_PAUSE`, less up to half."""
_LONGEST_PAUSE = 1.0


async def repeated(attempt: Callable[[float | None], Coroutine[Any, Any, Any]], limit: float | None) -> Any:
    """The outcome of the first attempt that does not lose its connection.

    Args:
        attempt: Makes the call, given the seconds that are left; None for ever.
        limit: Seconds for all attempts together.

    Raises:
        ConnectionLostError: Every attempt was lost until the time was over, or until the node was no member any more.
        Exception: What the attempt that was answered raised.
    """
    loop = asyncio.get_running_loop()
    deadline = None if limit is None else loop.time() + limit
    pause = _FIRST_PAUSE
    lost: ConnectionLostError | ConnectFailedError | None = None
    while True:
        left = None if deadline is None else deadline - loop.time()
        try:
            return await attempt(left)
        except (ConnectionLostError, ConnectFailedError) as error:
            # That one which was sent may have run, whatever becomes of the others.
            if lost is None or isinstance(lost, ConnectFailedError):
                lost = error
        except NodeNotFoundError as error:
            if lost is None:
                raise
            raise lost from error
        wait = pause * random.uniform(0.5, 1.0)
        if deadline is not None and loop.time() + wait >= deadline:
            raise lost
        await asyncio.sleep(wait)
        pause = min(_LONGEST_PAUSE, 2 * pause)
