"""Blocks of tokens, as engines cache them, mapped back to the blocks of the prompts that made them.

An engine tells of its cache by hashes of its own over blocks of tokens. Which of a prompt's blocks of bytes such a one
covers is told by the request: its tokens spread evenly over its bytes. That is inexact by the few tokens that a chat
template adds and by how dense the text is here and there, which decides nothing where a Router compares how much two
workers have.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["Claim", "TokenBlocks"]

# Bytes of a prompt's block: what Routers hash.
_BLOCK = 256
# Most token blocks that are remembered; an engine that has more begins anew.
_NODES = 1 << 20


@dataclass(eq=False, slots=True)
class Claim:
    """One request's claim that its prompt's blocks will be in the cache."""

    blocks: tuple[int, ...]
    """Hashes of the prompt's blocks of bytes."""
    length: int
    """Bytes of the prompt."""
    tokens: bytes
    """Ids of the prompt, 4 bytes each."""
    confirmed: int = 0
    """Token blocks that are in the cache."""
    told: int = 0
    """Blocks of bytes that are."""
    parent: Hashable = None
    """The engine's hash of the last token block confirmed."""
    awaits: int | None = None
    """Key of the next one, while it is not there."""
    complete: bool = field(default=False)
    """All whole token blocks are there."""

    def tokens_for(self, block: int) -> int:
        """Tokens that cover the prompt up to the end of a block of bytes."""
        return -(-(block + 1) * _BLOCK * (len(self.tokens) // 4) // self.length)


class TokenBlocks:
    """The token blocks in an engine's cache, as a tree, and the prompts that they are part of.

    Args:
        stored: told of blocks of prompts that are in the cache.
        dropped: told of those that are not, or no longer.
        cleared: told that all are gone.
    """

    def __init__(
        self,
        stored: Callable[[Sequence[int]], None],
        dropped: Callable[[Sequence[int]], None],
        cleared: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._dropped = dropped
        self._cleared = cleared
        self._size: int | None = None
        # Key (of parent and tokens) by the engine's hash, and the other way round.
        self._nodes: dict[Hashable, int] = {}
        self._children: dict[int, Hashable] = {}
        self._awaiting: dict[int, list[Claim]] = {}
        # Before the engine has said how large its blocks are.
        self._unsized: list[Claim] = []
        # Blocks of prompts by the token block that covers them to the end, and the other way round.
        self._covered: dict[Hashable, list[int]] = {}
        self._covers: dict[int, Hashable] = {}

    # ---- what requests say --------------------------------------------------------------------------------------

    def begin(self, blocks: tuple[int, ...], length: int, tokens: Sequence[int]) -> Claim:
        """A request is about to be given to the engine.

        Args:
            blocks: hashes of its prompt's blocks of bytes.
            length: bytes of its prompt.
            tokens: ids of its prompt.
        """
        claim = Claim(blocks, max(length, 1), array("I", tokens).tobytes())
        if self._size is None:
            self._unsized.append(claim)
        else:
            self._advance(claim)
        return claim

    def settle(self, claim: Claim) -> None:
        """A request is over, and the engine has said what it had to say of it: what is not in the cache will not be."""
        self._let_go(claim)
        missing = [block for block in claim.blocks if block not in self._covers]
        if missing:
            self._dropped(missing)

    # ---- what the engine says -----------------------------------------------------------------------------------

    def stored(self, parent: Hashable, hashes: Sequence[Hashable], tokens: Sequence[int], size: int) -> None:
        """Token blocks are in the cache.

        Args:
            parent: hash of the block before the first; ``None``: there is none.
            hashes: their own hashes.
            tokens: all of their token ids.
            size: tokens a block.
        """
        if self._size is None:
            self._size = size
            for claim in self._unsized:
                self._advance(claim)
            self._unsized.clear()
        if (
            size != self._size
            or len(tokens) != size * len(hashes)
            or (parent is not None and parent not in self._nodes)
        ):
            # Blocks of another kind, or behind ones that were never told of.
            return
        if len(self._nodes) + len(hashes) > _NODES:
            self.cleared()
            return
        ids, width = array("I", tokens).tobytes(), 4 * size
        woken: list[Claim] = []
        for at, block in enumerate(hashes):
            key = hash((parent, ids[at * width : (at + 1) * width]))
            self._nodes[block] = key
            self._children[key] = block
            woken += self._awaiting.pop(key, ())
            parent = block
        for claim in woken:
            claim.awaits = None
            self._advance(claim)

    def removed(self, hashes: Sequence[Hashable]) -> None:
        """Token blocks are no longer in the cache."""
        dropped: list[int] = []
        for block in hashes:
            key = self._nodes.pop(block, None)
            if key is not None:
                self._children.pop(key, None)
            for covered in self._covered.pop(block, ()):
                del self._covers[covered]
                dropped.append(covered)
        if dropped:
            self._dropped(dropped)

    def cleared(self) -> None:
        """The cache is empty, or what was told of it was lost."""
        self._nodes.clear()
        self._children.clear()
        self._covered.clear()
        self._covers.clear()
        self._cleared()

    # ---- both ---------------------------------------------------------------------------------------------------

    def _advance(self, claim: Claim) -> None:
        """Goes on along the tree, as far as the claim's blocks are there."""
        if self._size is None:
            return
        width = 4 * self._size
        fresh: list[int] = []
        while (end := (claim.confirmed + 1) * width) <= len(claim.tokens):
            key = hash((claim.parent, claim.tokens[end - width : end]))
            block = self._children.get(key)
            if block is None:
                claim.awaits = key
                self._awaiting.setdefault(key, []).append(claim)
                break
            claim.confirmed += 1
            claim.parent = block
            while claim.told < len(claim.blocks) and claim.tokens_for(claim.told) <= claim.confirmed * self._size:
                covered = claim.blocks[claim.told]
                claim.told += 1
                # Another request may have found it to end sooner; what it shares with this one counts.
                if covered not in self._covers:
                    self._covers[covered] = block
                    self._covered.setdefault(block, []).append(covered)
                fresh.append(covered)
        else:
            claim.complete = True
        if fresh:
            self._stored(fresh)

    def _let_go(self, claim: Claim) -> None:
        if claim in self._unsized:
            self._unsized.remove(claim)
        if claim.awaits is not None:
            others = self._awaiting.get(claim.awaits, [])
            if claim in others:
                others.remove(claim)
            if not others:
                self._awaiting.pop(claim.awaits, None)
            claim.awaits = None
