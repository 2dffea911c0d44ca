"""Identifiers: 128 random bits, printed as 32 hexadecimal digits everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError

if TYPE_CHECKING:
    import uuid

_SIZE = 16

_draw: Callable[[int], bytes] = os.urandom


def draw_from(source: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Has fresh ids drawn from `source`, which gives as many random bytes as it is asked for; returns the former one.

    Ids order what is done for many actors, so that a run that is to be repeated needs the same ones.
    """
    global _draw
    former, _draw = _draw, source
    return former


class _Id:
    __slots__ = ("raw",)
    raw: bytes
    """The 16 bytes, big-endian, as they travel in frames."""

    def __init__(self, value: int | str | bytes) -> None:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < 1 << 128:
                raise ConfigError(f"{value} is no {type(self).__name__}: 0 <= id < 2**128")
            raw = value.to_bytes(_SIZE, "big")
        elif isinstance(value, str):
            digits = value.replace("-", "")
            if len(digits) == 2 * _SIZE:
                try:
                    raw = bytes.fromhex(digits)
                except ValueError:
                    raw = b""
            elif digits.isdecimal() and int(digits) < 1 << 128:
                raw = int(digits).to_bytes(_SIZE, "big")
            else:
                raw = b""
            if len(raw) != _SIZE:
                raise ConfigError(
                    f"{shown(value)} is no {type(self).__name__}: expected 32 hexadecimal digits, or a decimal number"
                )
        elif isinstance(value, (bytes, bytearray, memoryview)):
            raw = bytes(value)
            if len(raw) != _SIZE:
                raise ConfigError(f"{shown(value)} is no {type(self).__name__}: it has {len(raw)} bytes, not {_SIZE}")
        else:
            raise TypeError(f"{shown(value)} is no {type(self).__name__}: expected its text, its number or its bytes")
        object.__setattr__(self, "raw", raw)

    @classmethod
    def from_str(cls, text: str) -> Self:
        """The id that `str` of it printed; 32 hexadecimal digits, dashes allowed, or a decimal number.

        Raises:
            ConfigError: The text is no id. (It is a ValueError.)
        """
        return cls(text)

    @classmethod
    def generate(cls) -> Self:
        """A fresh random id."""
        return cls(_draw(_SIZE))

    @property
    def id(self) -> int:
        """The id as a number."""
        return int.from_bytes(self.raw, "big")

    def uuid(self) -> uuid.UUID:
        """The id as a UUID."""
        import uuid

        return uuid.UUID(bytes=self.raw)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed")

    def __str__(self) -> str:
        return self.raw.hex()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.raw.hex()})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __reduce__(self) -> tuple[type[Self], tuple[bytes]]:
        return type(self), (self.raw,)


class ActorId(_Id):
    """One incarnation of one actor: a respawned actor has a new id."""

    __slots__ = ()


class NodeId(_Id):
    """One run of one process: a restarted node has a new id."""

    __slots__ = ()

    @classmethod
    def local(cls) -> Self:
        """The id that stands for "this node", whichever that is; `str` of it is 32 zeros."""
        return cls(0)

    def is_local(self) -> bool:
        """True for the id that stands for this node."""
        return not any(self.raw)
