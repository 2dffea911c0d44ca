"""The node settings of the command line: the table of `pulsing.core._settings` as flags, and what they come to."""

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import typer

from pulsing.cli._errors import CliError, FailureError, MisuseError
from pulsing.core import _settings as table
from pulsing.core._config import NodeSettings
from pulsing.core._settings import BY_NAME, PASSPHRASE, SETTINGS, Setting
from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError

__all__ = [
    "PASSPHRASE",
    "SETTINGS",
    "check_security",
    "default_text",
    "of_the_node",
    "option",
    "passphrase",
    "resolve",
    "with_flags",
]


def default_text(setting: Setting, serving: bool) -> str:
    """A default as flags, variables and files say it."""
    value = setting.default_for(serving)
    if value is None or value == ():
        return "0" if setting.endless else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def option(name: str, help_text: str | None = None, *, from_env: bool = False) -> Any:
    """The option of one setting, for `Annotated`.

    Args:
        name: Of the setting.
        help_text: What it means where it is another thing than for a node.
        from_env: Whether typer looks at its variable; for commands that do not `resolve`.
    """
    setting = BY_NAME[name]
    help_text = help_text or f"{setting.doc[0].upper()}{setting.doc[1:]}. Default: {default_text(setting, True)}."
    help_text = help_text.replace("`", "")
    if setting.annotation is bool:
        return typer.Option(f"--{name}/--no_{name}", help=help_text)
    last = name.rpartition("_")[2].upper()
    metavar = {"s": "SECONDS", "": last}.get(setting.unit, setting.unit.upper())
    return typer.Option(f"--{name}", metavar=metavar, help=help_text, envvar=setting.env if from_env else None)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each setting, in place of its ``**flags``."""
    signature = inspect.signature(command)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[(bool if setting.annotation is bool else str) | None, option(setting.name)],
        )
        for setting in SETTINGS
    ]
    changed: Any = command
    changed.__signature__ = signature.replace(parameters=[*own, *options])
    changed.__annotations__ = {
        **{one.name: one.annotation for one in (*own, *options)},
        "return": signature.return_annotation,
    }
    return command


def resolve(flags: Mapping[str, Any], config: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The value of every setting, for `pulsing actor`.

    Args:
        flags: what the command line gave; None for what it did not.
        config: path of a TOML file, or None for `PULSING_CONFIG`, or for no file.
        environ: where `PULSING_*` variables are looked up.

    Raises:
        MisuseError: a value that cannot be read, or an unknown key or variable.
        FailureError: the file cannot be opened.
    """
    values: dict[str, Any] = {setting.name: setting.default_for(serving=True) for setting in SETTINGS}
    try:
        values.update(table.given(config, environ))
        values.update({name: BY_NAME[name].read(raw, f"--{name}") for name, raw in flags.items() if raw is not None})
    except ConfigError as error:
        raise _of_the_cli(error) from None
    secret = "--passphrase_file" if values["passphrase_file"] else PASSPHRASE if PASSPHRASE in environ else None
    check_security(secret, values["cert"], values["key"], values["ca"], values["insecure"])
    values["seeds"] = [seed for seed in values["seeds"] if seed]
    # An unset variable in a script must not start a second cluster in silence.
    if flags.get("seeds") is not None and not values["seeds"]:
        raise MisuseError(
            f"--seeds {shown(flags['seeds'])} names no node: give host:port, or leave --seeds out for a first node."
        )
    return values


def check_security(secret: str | None, cert: Any, key: Any, ca: Any, insecure: bool = False) -> None:
    """Whether what says who may join contradicts itself. `secret` is how errors name what holds the passphrase, if
    something does.

    Raises:
        MisuseError: it does.
    """
    try:
        table.check_security(secret, cert, key, ca, insecure)
    except ConfigError as error:
        words = str(error).replace("insecure=True", "--insecure").replace("cert, key and ca", "--cert, --key and --ca")
        if secret is not None:
            words = words.replace("passphrase and", f"{secret} and")
        raise MisuseError(f"{words.replace('and cert exclude', 'and --cert exclude')}.") from None


def of_the_node(values: Mapping[str, Any]) -> NodeSettings:
    """Those of `resolve` that `pul.init` takes by name."""
    kept = {name: values[name] for name in NodeSettings.__optional_keys__}
    return cast("NodeSettings", kept)


def passphrase(file: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The cluster's secret: what stands in `file`, else in `PULSING_PASSPHRASE`; None where there is neither.

    Raises:
        FailureError: the file cannot be read.
        MisuseError: there is nothing in it.
    """
    try:
        return table.passphrase(file, environ, "--passphrase_file")
    except ConfigError as error:
        raise _of_the_cli(error) from None


def _of_the_cli(error: ConfigError) -> CliError:
    kind = FailureError if isinstance(error.__cause__, OSError) else MisuseError
    return kind(f"{error}.")
