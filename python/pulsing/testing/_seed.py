"""Which seed a run has, and how a failure tells it."""

from __future__ import annotations

import os
import random

VARIABLE = "PULSING_TEST_SEED"
_LIMIT = 2**64


def from_environment() -> int | None:
    """The seed that the environment asks for.

    Raises:
        ValueError: It is no seed.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return checked(int(text, 0))
    except ValueError:
        raise ValueError(f"{VARIABLE}={text!r}: expected an integer from 0 to 2**64-1") from None


def checked(seed: int) -> int:
    """`seed`, if it is one.

    Raises:
        ValueError: It is not.
    """
    if not 0 <= seed < _LIMIT:
        raise ValueError(f"seed={seed}: expected an integer from 0 to 2**64-1")
    return seed


def choose(seed: int | None) -> int:
    """The seed of a run: the given one, the environment's, or a random one."""
    if seed is not None:
        return checked(seed)
    asked = from_environment()
    return random.SystemRandom().randrange(2**32) if asked is None else asked


def note(error: BaseException, seed: int) -> None:
    """Adds to an exception how to meet it again."""
    error.add_note(f"pulsing.testing: this run had seed {seed}; run it again with {VARIABLE}={seed}")
