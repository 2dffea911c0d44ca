"""Stop strings in an answer whose beginning another engine gave, found as vLLM finds them in an answer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.v1.engine.detokenizer import check_stop_strings

from pulsing.serving._errors import RequestError
from pulsing.serving._text import WindowDetokenizer

__all__ = ["StopsAcross"]

# Tokens of the prompt that decide how the first ones behind it are written.
_CONTEXT = 8


class StopsAcross:
    """The text of an answer from where the client has it, cut at the first stop string, wherever that begins.

    vLLM holds text back that may become a stop string, but not its tokens: who goes on has tokens whose text the client
    has not got, and vLLM itself would look for stop strings in what it generates alone.

    Args:
        stops: the stop strings, none of them empty.
        decode: text of a list of token ids.
        prompt: ids before the answer.
        done: ids of the answer that were generated elsewhere.
        has: text of it that the client has; ``None``: all of it.

    Raises:
        RequestError: the client has something else than the text of those ids.
    """

    def __init__(
        self,
        stops: Sequence[str],
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        done: Sequence[int],
        has: str | None,
    ) -> None:
        self._stops = list(stops)
        self._held = max(map(len, self._stops)) - 1
        self._detokenizer = WindowDetokenizer(decode, prompt[-_CONTEXT:])
        self._text = "".join(self._detokenizer.feed(token) for token in done)
        if not self._text.startswith(has or ""):
            raise RequestError(
                400, "the tokens to go on from are not those of the text to go on from", code="cannot_continue"
            )
        self._given = len(self._text if has is None else has)
        self.stopped = False
        """Whether a stop string was met."""

    def feed(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the one that completes a stop string.

        Returns:
            How many were taken.
        """
        for count, token in enumerate(tokens, 1):
            grown = self._detokenizer.feed(token)
            self._text += grown
            found = check_stop_strings(self._text, len(grown), self._stops, False)
            if found is not None:
                self._text = self._text[: found[1]]
                self.stopped = True
                return count
        return len(tokens)

    def take(self, *, ended: bool) -> str:
        """Text that can be given out: it is no part of a stop string, nor what may become one unless it has ended."""
        end = len(self._text) - (0 if ended or self.stopped else self._held)
        out = self._text[self._given : max(end, self._given)]
        self._given += len(out)
        return out
