"""Brings what people type into the one spelling typer knows.

Options may be written in kebab or snake case, and a flag may carry a value (`--flag`, `--flag True`, `--flag=false`).
Typer takes one spelling and no value, so both are settled here, where an unknown option can also be told where it
belongs.
"""

from collections.abc import Sequence
from typing import Any

from pulsing.cli._errors import MisuseError, nearest
from pulsing.core._convert import FALSE_WORDS, TRUE_WORDS
from pulsing.core._shown import shown


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Parts a command line at its first `--`; the second part is None when there is no `--`."""
    tokens = list(argv)
    if "--" not in tokens:
        return tokens, None
    at = tokens.index("--")
    return tokens[:at], tokens[at + 1 :]


def canonical(option: str) -> str:
    """The snake case spelling of an option's name, without its dashes."""
    return option.lstrip("-").replace("-", "_")


def normalise(argv: Sequence[str], command: Any) -> list[str]:
    """Rewrites `argv` for `command`, a typer group or command.

    Raises:
        MisuseError: an option that the command does not have, or a flag whose value is neither true nor false.
    """
    out: list[str] = []
    tokens = list(argv)
    path = ["pulsing"]
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not token.startswith("--"):
            subcommands = getattr(command, "commands", None)
            if subcommands and not token.startswith("-"):
                if token not in subcommands:
                    raise MisuseError(
                        f"{' '.join(path)} has no command {shown(token)}{nearest(token, subcommands)}"
                        f"\nCommands: {', '.join(subcommands)}."
                    )
                command = subcommands[token]
                path.append(token)
            out.append(token)
            # A short option's value is not a subcommand and never an option.
            if token in _short_options_with_value(command) and at < len(tokens):
                out.append(tokens[at])
                at += 1
            continue
        name, equals, value = token.partition("=")
        option = _find(command, name)
        if option is None:
            raise MisuseError(_unknown(name, command, path))
        spelling, negative, is_flag = option
        if not is_flag:
            if equals:
                out.append(f"{spelling}={value}")
            else:
                out.append(spelling)
                if at < len(tokens):
                    out.append(tokens[at])
                    at += 1
            continue
        wanted = True
        if equals:
            wanted = _truth(name, value)
        elif at < len(tokens) and tokens[at].lower() in TRUE_WORDS | FALSE_WORDS:
            wanted = _truth(name, tokens[at])
            at += 1
        if wanted:
            out.append(spelling)
        elif negative:
            out.append(negative)
    return out


def _truth(name: str, value: str) -> bool:
    if value.lower() in TRUE_WORDS:
        return True
    if value.lower() in FALSE_WORDS:
        return False
    raise MisuseError(f"{name} is a flag: it takes true or false, not {shown(value)}.")


def _options(command: Any) -> list[Any]:
    return [param for param in command.params if getattr(param, "param_type_name", "") == "option"]


def _find(command: Any, name: str) -> tuple[str, str | None, bool] | None:
    """(typer's spelling, its opposite if it has one, whether it is a flag)."""
    wanted = canonical(name)
    if wanted == "help":
        return "--help", None, True
    for option in _options(command):
        for names, others in ((option.opts, option.secondary_opts), (option.secondary_opts, option.opts)):
            for spelling in names:
                if spelling.startswith("--") and canonical(spelling) == wanted:
                    return spelling, next(iter(others), None), bool(option.is_flag)
    return None


def _short_options_with_value(command: Any) -> set[str]:
    return {
        name for option in _options(command) if not option.is_flag for name in option.opts if not name.startswith("--")
    }


def _unknown(name: str, command: Any, path: Sequence[str]) -> str:
    known = [spelling for option in _options(command) for spelling in option.opts if spelling.startswith("--")]
    where = " ".join(path)
    text = f"{where} has no option {name}{nearest('--' + canonical(name), known)}\nOptions: {', '.join(known)}."
    if path[-1] == "actor":
        text += (
            f"\nIf {name} is for the actor's constructor, put it after --, as in: {where} CLASS --addr HOST:PORT -- "
            f"{name} VALUE"
        )
    return text
