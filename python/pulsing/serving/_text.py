"""Text that grows token by token: whole characters only, and stop strings cut out before anyone sees them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

__all__ = ["ByteDetokenizer", "StopFilter", "WindowDetokenizer"]

_REPLACEMENT = "\ufffd"
# A window that only ever ends in replacement characters holds bytes that are no text at all: give it out, or each
# further token would decode an ever longer window.
_MAX_HELD_TOKENS = 32


class ByteDetokenizer:
    """Detokenizer for vocabularies whose tokens are byte strings (byte-level BPE): exact, and O(1) a token.

    Args:
        token_bytes: the bytes of a token id; ``b""`` for tokens that are not text (special tokens).
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that became whole with this token; ``""`` while a character is incomplete."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """What is left of an incomplete character at the end, as replacement characters. Call once."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any tokenizer that can decode a list of ids (SentencePiece and the like).

    It decodes a short window, because the text of a token may depend on its neighbours (leading spaces, bytes), and
    gives out the difference.

    Args:
        decode: text of a list of token ids.
        context: ids that precede the first fed token; their text is never given out, but decides its spacing.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._start = 0
        self._read = len(self._ids)
        self._base = decode(self._ids) if self._ids else ""
        self._given = ""  # text after _base already given out while the window waits for a character to end

    def feed(self, token: int) -> str:
        """Text that became whole with this token; ``""`` while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        whole = text.rstrip(_REPLACEMENT)
        known = self._base + self._given
        if len(whole) == len(text) or len(self._ids) - self._read > _MAX_HELD_TOKENS:
            self._start, self._read = self._read, len(self._ids)
            self._base = self._decode(self._ids[self._start :])
            self._given = ""
            return text[len(known) :]
        if len(whole) > len(known) and whole.startswith(known):
            self._given += whole[len(known) :]
            return whole[len(known) :]
        return ""

    def flush(self) -> str:
        """What was held back at the end, as replacement characters. Call once."""
        text = self._decode(self._ids[self._start :])
        return text[len(self._base) + len(self._given) :]


class StopFilter:
    """Cuts a growing text at the first stop string, which is never part of the output.

    The stop string that is complete first wins (of two that end together, the longer): so the output does not depend
    on how the text was split into pieces, and a streamed answer equals a plain one.

    Args:
        stops: the stop strings; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string was met; what is fed afterwards is dropped."""

    def feed(self, text: str) -> str:
        """Text that is safe to give out: it is no part, and no beginning, of a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        first: tuple[int, int] | None = None
        for stop in self._stops:
            at = self._held.find(stop)
            if at >= 0 and (first is None or (at + len(stop), at) < first):
                first = (at + len(stop), at)
        if first is not None:
            self.stopped = True
            out, self._held = self._held[: first[1]], ""
            return out
        keep = self._beginning()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def _beginning(self) -> int:
        """Length of the longest tail that could still become a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[len(self._held) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def flush(self) -> str:
        """What was held back when the text ended without a stop string. Call once."""
        out, self._held = self._held, ""
        return out
