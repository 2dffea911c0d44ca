"""Rows as columns on a terminal."""

import unicodedata
from collections.abc import Sequence

from pulsing.core._shown import legible


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row, the columns below each other.

    Args:
        rows: The heading first. What moves or hides text is escaped: names and reasons are what others said.
    """
    lines = [[legible(cell, keep="") for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _width(text: str) -> int:
    """Columns that a terminal gives to a text: two to a Chinese character, none to an accent on the one before."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
