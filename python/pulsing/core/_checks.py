"""Checks of what users pass: each error names the argument, the value and what was expected."""

from __future__ import annotations

import math

from pulsing.core._shown import shown
from pulsing.exceptions import InvalidNameError


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless `value` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}={shown(value)}: expected True or False")


def check_count(name: str, value: object, least: int, most: int | None = None, unit: str = "") -> None:
    """Checks a whole number.

    Args:
        name: What it is called.
        value: The number.
        least: The smallest allowed.
        most: The largest allowed; None: any.
        unit: What is counted, for the message.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is out of bounds.
    """
    expected = f"{least} or more" if most is None else f"{least} to {most}"
    expected += f" {unit}" if unit else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={shown(value)}: expected a whole number, {expected}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: expected {expected}")


def check_seconds(name: str, value: object, *, above: bool = False, or_none: str = "") -> None:
    """Checks a time in seconds: 0 or more, and finite.

    Args:
        name: What it is called.
        value: The time.
        above: 0 is too small.
        or_none: What None would mean, where None is allowed; it has been dealt with before.

    Raises:
        TypeError: It is no number.
        ValueError: It is out of bounds.
    """
    or_none = f", or None {or_none}" if or_none else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={shown(value)}: expected seconds as a number{or_none}")
    if not (value > 0 if above else value >= 0) or math.isinf(value):
        raise ValueError(f"{name}={value}: expected {'seconds above 0' if above else 'seconds, 0 or more'}{or_none}")


def clean_name(name: str) -> str:
    """The name as it is stored: verbatim, but for the prefix that old programs put before it.

    Raises:
        TypeError: It is no string.
        InvalidNameError: It holds half of a surrogate pair, which no other node could be told.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is a string, not {shown(name)}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"{shown(name)} is no actor name: {error.reason}") from None
    return name.removeprefix("actors/")
