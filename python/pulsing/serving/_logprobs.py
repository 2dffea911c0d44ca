"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from pulsing.serving._sampling import Picked

__all__ = ["chat_logprobs", "completion_logprobs"]

TokenBytes = Callable[[int], bytes]


def chat_logprobs(picked: Iterable[Picked], token_bytes: TokenBytes) -> str:
    """``choices[].logprobs`` of a chat piece, as JSON."""
    content = [
        {
            **_entry(token_bytes(one.token), one.logprob),
            "top_logprobs": [_entry(token_bytes(token), logprob) for token, logprob in one.top],
        }
        for one in picked
    ]
    return json.dumps({"content": content, "refusal": None}, ensure_ascii=False)


def _entry(raw: bytes, logprob: float | None) -> dict[str, Any]:
    # A token need not be whole characters: the bytes tell the truth, the text shows what can be shown.
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(picked: Iterable[Picked], token_bytes: TokenBytes, offset: int) -> str:
    """``choices[].logprobs`` of a completion piece, as JSON.

    Args:
        picked: the piece's tokens.
        token_bytes: bytes of a token.
        offset: characters of the answer before this piece.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for one in picked:
        text = token_bytes(one.token).decode("utf-8", "replace")
        tokens.append(text)
        values.append(one.logprob)
        tops.append({token_bytes(token).decode("utf-8", "replace"): logprob for token, logprob in one.top})
        offsets.append(offset)
        offset += len(text)
    return json.dumps(
        {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, ensure_ascii=False
    )
