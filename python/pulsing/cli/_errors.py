"""The ways a command fails."""

import difflib
from collections.abc import Iterable


class CliError(Exception):
    """Ends the command: the text goes to stderr, nothing to stdout."""

    exit_code = 1


class MisuseError(CliError):
    """The command line cannot be meant as written."""

    exit_code = 2


class FailureError(CliError):
    """The command was understood and could not be carried out."""

    exit_code = 1


class UnreachableError(CliError):
    """Nobody is there who could be asked."""

    exit_code = 2


def nearest(word: str, known: Iterable[str]) -> str:
    """` - did you mean X?` with the most similar of `known`, or nothing when none is similar."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        lowered = {name.lower(): name for name in names}
        close = [lowered[hit] for hit in difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)]
    return f" - did you mean {close[0]}?" if close else ""
