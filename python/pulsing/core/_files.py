"""Files that users name: read whole, and never more of them than such a file can hold."""

from __future__ import annotations

import os


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """What stands in a file of text; a pipe will do.

    Args:
        path: Where it is.
        most: Bytes at most: what is longer is another file, or a device that never ends.

    Raises:
        OSError: It cannot be read.
        ValueError: It is longer, or not UTF-8; the text says which.
    """
    with open(os.fspath(path), "rb") as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it is longer than {most} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from None
