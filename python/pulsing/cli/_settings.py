"""The table of node settings of the command line: flag > environment > file > default.

`docs/reference/settings.md` is this table for people; a test keeps the two aligned.
"""

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from pulsing.cli import _convert
from pulsing.cli._errors import FailureError, MisuseError, nearest


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row: its flag is `--name`, its key in the file `name`, its variable `PULSING_NAME`."""

    name: str
    annotation: Any
    default: Any
    doc: str

    @property
    def env(self) -> str:
        return f"PULSING_{self.name.upper()}"


PASSPHRASE = "PULSING_PASSPHRASE"
# In bytes. What is longer is another file, or a device that never ends.
_MOST_SECRET = 65536
"""The secret itself, for those who cannot hand over a file. No flag and no key: others could read those."""

LogLevel = Literal["error", "warn", "info", "debug", "trace"]
LogFormat = Literal["text", "json"]

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "addr",
        str | None,
        None,
        "host:port to listen on; none: a free port on the interface that reaches the first seed",
    ),
    Setting("seeds", list[str], [], "host:port of nodes to join, separated by commas; none: this is the first node"),
    Setting("cluster", str, "default", "name of the cluster; nodes of another name are refused"),
    Setting("passphrase_file", str | None, None, "file with the cluster's secret: mutual TLS between all who know it"),
    Setting("join_timeout", float, 0.0, "seconds to wait for the seeds; 0: for ever"),
    Setting("insecure", bool, False, "take unauthenticated plaintext peers from other hosts; needed on both sides"),
    Setting("observe", bool, True, "answer observers (/health, /actors, /metrics) on the node's port"),
    Setting("log_level", LogLevel, "info", "how much to log on stderr"),
    Setting("log_format", LogFormat, "text", "how log lines are written"),
)


def resolve(
    flags: Mapping[str, str | bool | float | None], config: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The value of every setting.

    Args:
        flags: what the command line gave; None for what it did not.
        config: path of a TOML file, or None for `PULSING_CONFIG`, or for no file.
        environ: where `PULSING_*` variables are looked up.

    Raises:
        MisuseError: a value that cannot be read, or an unknown key in the file.
        FailureError: the file cannot be opened.
    """
    config = config or environ.get("PULSING_CONFIG") or None
    file = _read(pathlib.Path(config)) if config else {}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        flag = flags.get(setting.name)
        if flag is not None:
            source, raw = f"--{setting.name}", flag
        elif environ.get(setting.env):
            source, raw = setting.env, environ[setting.env]
        elif setting.name in file:
            source, raw = f"{config}: {setting.name}", file[setting.name]
        else:
            values[setting.name] = list(setting.default) if isinstance(setting.default, list) else setting.default
            continue
        try:
            if isinstance(raw, str):
                values[setting.name] = _convert.from_text(setting.annotation, raw)
            else:
                values[setting.name] = _convert.from_json(setting.annotation, raw)
        except _convert.ConvertError as error:
            raise MisuseError(f"{source}: {error}.") from None
    if values["join_timeout"] < 0:
        raise MisuseError(
            f"join_timeout is a number of seconds, 0 or more (0: for ever), not {values['join_timeout']:g}."
        )
    secret = "--passphrase_file" if values["passphrase_file"] else PASSPHRASE if PASSPHRASE in environ else None
    if values["insecure"] and secret:
        raise MisuseError(f"{secret} and --insecure exclude each other: a cluster has a secret, or it has none.")
    given = values["seeds"]
    values["seeds"] = [seed for seed in given if seed]
    # An unset variable in a script must not start a second cluster in silence.
    if flags.get("seeds") is not None and not values["seeds"]:
        raise MisuseError(
            f"--seeds {flags['seeds']!r} names no node: give host:port, or leave --seeds out for a first node."
        )
    if not values["cluster"].strip():
        raise MisuseError("--cluster is empty: give the cluster's name, or leave it out for 'default'.")
    return values


def passphrase(file: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The cluster's secret: what stands in `file`, else in `PULSING_PASSPHRASE`; None where there is neither.

    Raises:
        FailureError: the file cannot be read.
        MisuseError: there is nothing in it.
    """
    if file:
        return read_passphrase(file)
    secret = environ.get(PASSPHRASE)
    if secret is None:
        return None
    # Set and empty is a script whose secret went missing: going on without one would be a silent downgrade.
    if not secret.strip():
        raise MisuseError(f"{PASSPHRASE} is set but empty: write the secret into it, or unset it.")
    return secret.strip()


def read_passphrase(path: str) -> str:
    """The secret in a file; the white space around it does not count.

    Raises:
        FailureError: the file cannot be read.
        MisuseError: there is nothing in it.
    """
    try:
        with pathlib.Path(path).open("rb") as file:
            raw = file.read(_MOST_SECRET + 1)
        if len(raw) > _MOST_SECRET:
            raise MisuseError(f"--passphrase_file {path} is longer than {_MOST_SECRET} bytes: that is no secret.")
        text = raw.decode().strip()
    except OSError as error:
        raise FailureError(f"cannot read --passphrase_file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise MisuseError(f"--passphrase_file {path} is not text.") from None
    if not text:
        raise MisuseError(f"--passphrase_file {path} is empty: write the secret into it.")
    return text


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        file = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FailureError(f"cannot read --config {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MisuseError(f"--config {path} is not TOML: {error}.") from None
    known = [setting.name for setting in SETTINGS]
    for key in file:
        if key not in known:
            raise MisuseError(f"--config {path}: unknown key {key!r}{nearest(key, known)}\nKeys: {', '.join(known)}.")
    return file
