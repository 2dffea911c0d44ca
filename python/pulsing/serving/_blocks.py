"""Which blocks of prompts a worker's cache holds, by the names that Routers have for them, and who was told what."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from pulsing.core._shown import shown

__all__ = ["BlockNews", "BlockReader", "HeldBlocks", "TellsBlocks"]

# Most blocks in one report: 32 KiB.
_IN_ONE = 4096
# Most blocks that are remembered; those stored first are given up first. 32 MiB of prompts.
_HELD = 131_072

BlockNews = tuple[int, bool, list[int], list[int]]
"""Number, reset, stored and dropped: see ``BlockNews`` of ``proto/worker.proto``."""


class HeldBlocks:
    """The blocks that a cache holds.

    Args:
        limit: most of them.
        in_one: most blocks in one report.
    """

    def __init__(self, limit: int = _HELD, in_one: int = _IN_ONE) -> None:
        self._limit = limit
        self._in_one = in_one
        # As an ordered set: the oldest first.
        self._held: dict[int, None] = {}
        self._readers: set[BlockReader] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def stored(self, blocks: Iterable[int]) -> None:
        """The cache holds these."""
        # Not one by one: to find the oldest, a dict passes over all that were removed before it.
        most = self._limit + max(1, min(self._in_one, self._limit // 2))
        for block in blocks:
            self._held.pop(block, None)
            self._held[block] = None
            self._tell(block, True)
            if len(self._held) >= most:
                self._give_up()
        self._give_up()

    def _give_up(self) -> None:
        excess = len(self._held) - self._limit
        if excess > 0:
            self.dropped(list(islice(self._held, excess)))

    def dropped(self, blocks: Iterable[int]) -> None:
        """The cache does not hold these, whether it did or not."""
        for block in blocks:
            self._held.pop(block, None)
            self._tell(block, False)

    def cleared(self) -> None:
        """The cache is empty."""
        self._held.clear()
        for reader in self._readers:
            reader.begin_anew()

    def _tell(self, block: int, held: bool) -> None:
        for reader in self._readers:
            reader.told(block, held)

    def reader(self) -> BlockReader:
        """Somebody who is to be told; to be closed."""
        reader = BlockReader(self)
        self._readers.add(reader)
        return reader

    def forget(self, reader: BlockReader) -> None:
        """Nobody is to be told any more."""
        self._readers.discard(reader)


class BlockReader:
    """One who is told, in reports of limited size. What changes back before it is told is not told; who falls behind by
    more than the cache can hold is told all of it anew."""

    def __init__(self, blocks: HeldBlocks) -> None:
        self._blocks = blocks
        self._sequence = 0
        self._reset = True
        self._pending: dict[int, bool] = dict.fromkeys(blocks._held, True)

    def told(self, block: int, held: bool) -> None:
        """A block is held, or is not."""
        self._pending[block] = held
        if len(self._pending) > 2 * self._blocks._limit:
            self.begin_anew()

    def begin_anew(self) -> None:
        """All that was told is void."""
        self._reset = True
        self._pending = dict.fromkeys(self._blocks._held, True)

    @property
    def behind(self) -> bool:
        """There is something to tell."""
        return self._reset or bool(self._pending)

    def take(self) -> BlockNews | None:
        """The next news; ``None``: there is none."""
        if not self.behind:
            return None
        taken = list(islice(self._pending.items(), self._blocks._in_one))
        for block, _ in taken:
            del self._pending[block]
        self._sequence += 1
        stored = [block for block, held in taken if held]
        dropped = [block for block, held in taken if not held]
        reset, self._reset = self._reset, False
        return self._sequence, reset, stored, dropped

    def close(self) -> None:
        """It is told no more."""
        self._blocks.forget(self)


def _checked(blocks: Iterable[int]) -> list[int]:
    checked = list(blocks)
    for block in checked:
        if not isinstance(block, int) or not 0 <= block < 2**64:
            raise ValueError(
                f"a block is one of GenerateRequest.blocks, an integer of 64 bits without a sign; not {shown(block)}"
            )
    return checked


class TellsBlocks:
    """The part of a Worker that tells Routers of its prompt cache."""

    reports_blocks: bool = False
    """Whether this worker tells what its prompt cache holds (:meth:`blocks_stored`, :meth:`blocks_dropped`,
    :meth:`blocks_cleared`), so that ``cache_aware`` Routers need not guess. Requests then have ``blocks``."""

    _blocks: HeldBlocks

    def blocks_stored(self, blocks: Iterable[int]) -> None:
        """Say that the prompt cache holds these blocks, for Routers to send what begins with them here. On the loop.

        Args:
            blocks: of ``GenerateRequest.blocks``. The latest 131,072 are remembered, which is 32 MiB of prompts.

        Raises:
            ValueError: one of them is no block.
        """
        self._blocks.stored(_checked(blocks))

    def blocks_dropped(self, blocks: Iterable[int]) -> None:
        """Say that the prompt cache does not hold these blocks: they were evicted, or never stored. On the loop.

        Routers take it that a request's blocks are stored where it was sent, until they are told otherwise.

        Args:
            blocks: of ``GenerateRequest.blocks``.

        Raises:
            ValueError: one of them is no block.
        """
        self._blocks.dropped(_checked(blocks))

    def blocks_cleared(self) -> None:
        """Say that the prompt cache is empty. On the loop."""
        self._blocks.cleared()
