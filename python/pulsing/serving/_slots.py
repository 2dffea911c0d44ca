"""Places for requests that run at once."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Slots"]


class Slots:
    """So many places; who waits for one is served in order. While there are free ones it costs no coroutine.

    Args:
        count: Places there are.
    """

    __slots__ = ("_free", "_waiting")

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Takes a place if one is free."""
        # A place that is given back goes to who waits: a free one is nobody's.
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def wait(self) -> None:
        """Takes a place as soon as it is this one's turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # Its turn came in the very moment in which it left.
                self.release()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        """Gives a place back."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
