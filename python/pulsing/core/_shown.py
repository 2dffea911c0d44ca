"""Values in messages: enough of each to recognise it, on one line, however large it is."""

from __future__ import annotations

import re
import unicodedata

# What hides or moves text on a terminal: controls, surrogates, and formats such as those that turn a line around.
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
_LONGEST_WORD = 512
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


def shown(value: object, limit: int = 80) -> str:
    """A value for an error message, as `repr` has it.

    Args:
        value: What was given.
        limit: Characters at most; of text, bytes and lists that are longer the beginning and an ellipsis.
    """
    # Cut before repr, so that a 100 MB string is not repeated only to be thrown away.
    cut = isinstance(value, str | bytes | list) and len(value) > limit
    text = repr(value[:limit]) if isinstance(value, str | bytes | list) else repr(value)
    return f"{text[:limit]}\u2026" if cut or len(text) > limit else text


def is_utf8(value: object) -> bool:
    """Whether all text in a value can be sent. Python keeps what a shell gives it in other bytes, as surrogates."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(map(is_utf8, value)) and all(map(is_utf8, value.values()))
    return not isinstance(value, list | tuple) or all(map(is_utf8, value))


def legible(text: str, keep: str = "\n\t") -> str:
    """A message as a terminal may have it, whatever was put into it: what moves or hides text there is escaped.

    Args:
        text: The message.
        keep: Control characters that stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in keep and unicodedata.category(char) in _INVISIBLE
        else char
        for char in text
    )


def brief(text: str) -> str:
    """`text`, with only the beginning and the end of words of over 512 characters: those are values."""

    def cut(match: re.Match[str]) -> str:
        word = match[0]
        return f"{word[: _LONGEST_WORD // 4]}\u2026 ({len(word)} characters) \u2026{word[-_LONGEST_WORD // 4 :]}"

    return _LONG_WORD.sub(cut, text)
