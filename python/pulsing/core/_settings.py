"""The settings of a node, once: what `SystemConfig` checks, the environment, files and flags give, and the docs list.

One value comes from the first of these that gives it: the argument or flag, ``PULSING_*``, the file (``--config``,
``PULSING_CONFIG``), the default. `docs/reference/settings.md` is this table for people; a test keeps the two aligned.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from pulsing.core._files import read_text
from pulsing.core._shown import is_utf8, shown
from pulsing.exceptions import ConfigError

Preset = Literal["auto", "local", "lan", "wan"]
LogLevel = Literal["error", "warn", "info", "debug", "trace"]
LogFormat = Literal["text", "json"]

PASSPHRASE = "PULSING_PASSPHRASE"
"""The secret itself, for those who cannot hand over a file. No flag and no key: others could read those."""
CONFIG = "PULSING_CONFIG"
_WHO_MAY = frozenset({"passphrase_file", "cert", "key", "ca"})
"""Settings that say who may join: of these an empty variable is an error."""
DEBUG_COPY = "PULSING_DEBUG_COPY"
NET_THREADS = "PULSING_NET_THREADS"
"""Of the process, which has one runtime for all its nodes: no setting of one of them."""
MAX_MESSAGE = 4 << 30
MOST_COUNT = 2**31 - 1
"""The largest number of things that a setting may ask for: no machine holds as many."""
MOST_BYTES = 2**62
"""The largest size: what the native side can still count with."""

_OTHER_VARIABLES = frozenset(
    {
        PASSPHRASE,
        CONFIG,
        "PULSING_API_KEY",
        "PULSING_OTLP_ENDPOINT",
        "PULSING_LOG",
        DEBUG_COPY,
        "PULSING_BRIDGE_PIPE",
        "PULSING_FLEET_DIR",
        NET_THREADS,
    }
)
_OTHER_FAMILIES = (
    "PULSING_BENCH_",
    "PULSING_FLEET_",
    "PULSING_ROUTER_",
    "PULSING_TEST_",
    "PULSING_SIM_",
    "PULSING_CHAOS_",
)
# What Kubernetes sets in every container for a service whose name begins with "pulsing".
_KUBERNETES = re.compile(r"(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
# In bytes. What is longer is another file, or a device that never ends.
_MOST_SECRET = 65536
_MOST_CONFIG = 1 << 20
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*(\d+)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row: argument and key `name`, flag ``--name``, variable ``PULSING_NAME``.

    Args:
        name: What it is called everywhere.
        annotation: What text is read as.
        default: Its value where nobody says otherwise.
        unit: What a number counts.
        doc: What it means.
        expects: Which values fit, in words.
        fits: Whether a value does.
        endless: None is a value and means for ever, or off; text and files say 0.
        serving: Default of `pulsing actor`, where it is another one.
        field: Whether `SystemConfig` holds it.
    """

    name: str
    annotation: Any
    default: Any
    unit: str
    doc: str
    expects: str = ""
    fits: Callable[[Any], bool] = lambda _: True
    endless: bool = False
    serving: Any = ...
    field: bool = True

    @property
    def env(self) -> str:
        """Its variable."""
        return f"PULSING_{self.name.upper()}"

    def default_for(self, serving: bool) -> Any:
        """Its default, in a program or (`serving`) of `pulsing actor`."""
        return self.default if self.serving is ... or not serving else self.serving

    def check(self, value: Any, source: str | None = None) -> Any:
        """Returns `value` if it fits.

        Raises:
            ConfigError: It does not; the message names `source` (default: the setting), the value and what would.
        """
        if value is not None and not (self.fits is path_like or is_utf8(value)):
            raise ConfigError(f"{source or self.name}={shown(value)}: expected text in UTF-8")
        if (value is None and (self.endless or self.default is None)) or self.fits(value):
            return value
        raise ConfigError(f"{source or self.name}={shown(value)}: expected {self.expects}")

    def read(self, raw: Any, source: str) -> Any:
        """The value that a flag, a variable or a file gives.

        Args:
            raw: Text, or what stands in a TOML file.
            source: How errors name where it comes from.

        Raises:
            ConfigError: It cannot be read or does not fit.
        """
        from pulsing.core import _convert

        try:
            if self.annotation is Size:
                value = _size(raw)
            elif isinstance(raw, str):
                value = _convert.from_text(self.annotation, raw)
            else:
                value = _convert.from_json(self.annotation, raw)
        except _convert.ConvertError as error:
            raise ConfigError(f"{source}: {error}") from None
        if self.endless and value == 0:
            return None
        return self.check(value, source)


class Size:
    """Annotation of a number of bytes: ``1048576`` or ``1MiB``."""


def _size(raw: Any) -> int:
    from pulsing.core._convert import ConvertError

    match = _SIZE.fullmatch(str(raw)) if isinstance(raw, str | int) and not isinstance(raw, bool) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConvertError(f"{shown(raw)} is not a size, such as 1048576, 64MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2].lower()]


def number(low: float, high: float = math.inf, *, above: bool = False, whole: bool = False) -> Callable[[Any], bool]:
    kinds = (int,) if whole else (int, float)

    def fits(value: Any) -> bool:
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return (low < value if above else low <= value) and value <= high and not math.isinf(value)

    return fits


def text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def path_like(value: Any) -> bool:
    return isinstance(value, os.PathLike) or text(value)


def _seconds(name: str, default: float, doc: str, **more: Any) -> Setting:
    """A limit that may be none."""
    return Setting(
        name,
        float | None,
        default,
        "s",
        f"{doc}; 0 (None): for ever",
        "seconds above 0, or None for ever",
        number(0, above=True),
        endless=True,
        **more,
    )


def _file_of_pki(name: str, doc: str) -> Setting:
    return Setting(name, str | None, None, "", doc, "a path", path_like)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "addr",
        str | None,
        None,
        "host:port",
        "where to listen; none: a free port on the interface that reaches the first seed",
        "host:port",
        text,
    ),
    Setting(
        "advertise",
        str | None,
        None,
        "host:port",
        "where others reach this node, if not at `addr` (NAT, containers); port 0: the one it listens on",
        "host:port",
        text,
    ),
    Setting(
        "seeds",
        list[str],
        (),
        "host:port",
        "nodes to join, separated by commas: `host:port`, `k8s://service.namespace:port`, `file:///path`; none: this "
        "is the first node",
    ),
    Setting("cluster", str, "default", "", "name of the cluster; nodes of another name are refused", "a name", text),
    Setting(
        "passphrase_file",
        str | None,
        None,
        "",
        "file with the cluster's secret: mutual TLS between all who know it; the same on every node",
        "a path",
        path_like,
        field=False,
    ),
    _file_of_pki("cert", "PEM file of this node's certificate: mutual TLS; it names the node's address or the cluster"),
    _file_of_pki("key", "PEM file of the certificate's private key"),
    _file_of_pki("ca", "PEM file of the authorities whose nodes, and observers, are let in"),
    Setting(
        "secret_file",
        str | None,
        None,
        "",
        "file of the per-user secret that peers on one host prove; none: the default place",
        "a path",
        path_like,
    ),
    Setting(
        "insecure",
        bool,
        False,
        "",
        "take unauthenticated plaintext peers from other hosts; needed on both sides; excludes a secret",
        "True or False",
        lambda value: isinstance(value, bool),
    ),
    _seconds("join_timeout", 10.0, "how long to wait for the seeds", serving=None),
    Setting(
        "observe",
        bool,
        True,
        "",
        "answer observers (`/health`, `/ready`, `/cluster/members`, `/actors`, `/metrics`, `/events`) on the node's "
        "port",
        "True or False",
        lambda value: isinstance(value, bool),
    ),
    Setting(
        "observe_addr",
        str | None,
        None,
        "host:port",
        "where observers are answered besides, in plain HTTP whatever the cluster's security; with `--no_observe` "
        "there only",
        "host:port",
        text,
    ),
    Setting(
        "handshake_timeout",
        float,
        5.0,
        "s",
        "how long a connection may take to say what it is, and to prove it",
        "seconds above 0",
        number(0, above=True),
    ),
    Setting(
        "max_handshakes",
        int,
        512,
        "connections",
        "how many may be doing so; beyond, the oldest of the address that holds the most is closed",
        f"1 to {MOST_COUNT}",
        number(1, MOST_COUNT, whole=True),
    ),
    Setting(
        "max_observers",
        int,
        256,
        "connections",
        "how many observers are served at once at each of the two places; others get a 503",
        f"1 to {MOST_COUNT}",
        number(1, MOST_COUNT, whole=True),
    ),
    Setting(
        "preset",
        Preset,
        "auto",
        "",
        "how patient failure detection is: `local`, `lan`, `wan`; `auto`: local without a secret, else lan",
        "'auto', 'local', 'lan' or 'wan'",
        lambda value: value in ("auto", "local", "lan", "wan"),
    ),
    _seconds("default_timeout", 30.0, "how long a call waits for its first answer unless it says otherwise"),
    _seconds("start_timeout", 600.0, "how long an actor's constructor may take, and then its `on_start`"),
    Setting(
        "stop_timeout",
        float,
        60.0,
        "s",
        "how long an actor's `on_stop` may take",
        "seconds above 0",
        number(0, above=True),
    ),
    Setting(
        "stop_grace",
        float,
        5.0,
        "s",
        "what running handlers get to finish when their actor or the node stops",
        "seconds, 0 or more",
        number(0),
        serving=30.0,
    ),
    _seconds("process_start_timeout", 30.0, "how long the process of an actor (`new_process=True`) takes to join"),
    Setting(
        "mailbox",
        int,
        256,
        "messages",
        "how many may wait in front of an actor",
        "16 to 1000000 messages",
        number(16, 1_000_000, whole=True),
    ),
    Setting(
        "max_concurrency",
        int,
        256,
        "handlers",
        "how many of one actor may interleave",
        f"1 to {MOST_COUNT}",
        number(1, MOST_COUNT, whole=True),
    ),
    Setting(
        "max_message",
        Size,
        MAX_MESSAGE,
        "bytes",
        "largest message sent, or accepted from a peer; `64MiB` and the like are understood",
        f"1024 to {MOST_BYTES} bytes",
        number(1024, MOST_BYTES, whole=True),
    ),
    _seconds("stream_idle", 300.0, "how long a stream may bring its consumer nothing before it fails"),
    Setting(
        "max_restarts",
        int,
        3,
        "restarts",
        "how many an actor with a restart policy gets within `restart_window`",
        f"0 to {MOST_COUNT}",
        number(0, MOST_COUNT, whole=True),
    ),
    Setting(
        "min_backoff", float, 0.1, "s", "wait before the first restart of a series", "seconds, 0 or more", number(0)
    ),
    Setting("max_backoff", float, 30.0, "s", "longest wait before a restart", "seconds, 0 or more", number(0)),
    Setting(
        "restart_window",
        float,
        300.0,
        "s",
        "over which restarts are counted",
        "seconds above 0",
        number(0, above=True),
    ),
    Setting(
        "watchdog",
        float | None,
        0.1,
        "s",
        "how long the event loop may be blocked before what blocks it is logged; 0 (None): off",
        "seconds above 0, or None for off",
        number(0, above=True),
        endless=True,
    ),
    Setting(
        "log_level",
        LogLevel,
        "warn",
        "",
        "how much to log on stderr: `error`, `warn`, `info`, `debug` or `trace`",
        "'error', 'warn', 'info', 'debug' or 'trace'",
        lambda value: value in get_args(LogLevel),
        serving="info",
        field=False,
    ),
    Setting(
        "log_format",
        LogFormat,
        "text",
        "",
        "how log lines are written, one an event: `text` or `json`",
        "'text' or 'json'",
        lambda value: value in get_args(LogFormat),
        field=False,
    ),
)

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`` - did you mean X?`` with the most similar of `known`, or nothing when none is similar."""
    # Only who errs pays for loading it.
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" - did you mean {close[0]}?" if close else ""


def given(config: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment and the file say, by name of the setting.

    Args:
        config: Path of a TOML file; None: ``PULSING_CONFIG``, or no file.
        environ: Where ``PULSING_*`` is looked up. One that is set and empty counts as not set.

    Raises:
        ConfigError: A value that cannot be read or does not fit, an unknown key, a variable that is none but resembles
            one. Its cause is an OSError when the file cannot be opened.
    """
    path = file_given(config, environ.get(CONFIG))
    values: dict[str, Any] = {}
    if path:
        for key, raw in read_file(path, BY_NAME).items():
            values[key] = BY_NAME[key].read(raw, f"{path}: {key}")
    for setting in SETTINGS:
        if setting.name in _WHO_MAY and environ.get(setting.env) == "":
            # A script whose file went missing: going on without it would let others in than were meant.
            raise ConfigError(f"{setting.env} is set but empty: name a file, or unset it")
        if environ.get(setting.env):
            values[setting.name] = setting.read(environ[setting.env], setting.env)
    check_variables(environ)
    return values


def net_threads(environ: Mapping[str, str]) -> int:
    """How many threads the process's network gets: ``PULSING_NET_THREADS``, else one on up to two cores, else two.

    On two cores the loop's thread, and the process that is talked to, need the other one: with two of its own the
    runtime wakes one for most of what the other does (`docs/benchmarks/runtime.md`).

    Raises:
        ConfigError: The variable is no whole number from 1 to 64.
    """
    raw = environ.get(NET_THREADS)
    if raw:
        row = Setting("", int, 0, "threads", "", "a whole number from 1 to 64", number(1, 64, whole=True))
        return int(row.read(raw, NET_THREADS))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if cores <= 2 else 2


def file_given(config: str | os.PathLike[str] | None, variable: str | None) -> str | os.PathLike[str] | None:
    """The file of settings: what was named, else what a variable names, else none.

    Raises:
        ConfigError: It was named, and is no path. A variable that is set and empty counts as not set.
    """
    if config is None:
        return variable or None
    if not path_like(config):
        raise ConfigError(f"config={shown(config)}: expected a path")
    return config


def check_variables(environ: Mapping[str, str]) -> None:
    """Finds misspelt variables.

    Raises:
        ConfigError: One is no setting and resembles one. Others are left alone: schedulers and programs have their own.
    """
    known = {setting.env for setting in SETTINGS} | _OTHER_VARIABLES
    for name in environ:
        if not name.startswith("PULSING_") or name in known or name.startswith(_OTHER_FAMILIES):
            continue
        if of_kubernetes(name):
            continue
        # What all of them begin with makes none of them alike.
        hint = nearest(name.removeprefix("PULSING_"), (one.removeprefix("PULSING_") for one in known), cutoff=0.75)
        if hint:
            meant = hint.replace("did you mean ", "did you mean PULSING_")
            raise ConfigError(f"{name} is no setting{meant} If it is not meant for Pulsing, rename it")


def flag_of(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable that is true or false is true; unset or empty is false.

    Raises:
        ConfigError: It is neither.
    """
    from pulsing.core import _convert

    raw = environ.get(name, "")
    try:
        return bool(raw) and bool(_convert.from_text(bool, raw))
    except _convert.ConvertError as error:
        raise ConfigError(f"{name}: {error}") from None


def of_kubernetes(name: str) -> bool:
    """Whether a variable is one that Kubernetes sets for a service, whatever the service is called."""
    return _KUBERNETES.search(name) is not None


def check_security(passphrase: object, cert: object, key: object, ca: object, insecure: bool) -> None:
    """Finds contradictions between the ways to say who may join.

    Args:
        passphrase: the cluster's secret, or how errors name what holds it; None: none.
        cert: file of the node's certificate.
        key: file of its key.
        ca: file of the authorities.
        insecure: whether anybody may.

    Raises:
        ConfigError: Two of them are given, or a part of one.
    """
    pki = {"cert": cert, "key": key, "ca": ca}
    missing = [name for name, file in pki.items() if not file]
    if 0 < len(missing) < len(pki):
        raise ConfigError(f"cert, key and ca belong together: {' and '.join(missing)} missing")
    ways = {"passphrase": passphrase is not None, "cert": not missing, "insecure=True": insecure}
    given = [way for way, on in ways.items() if on]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other: a cluster has one secret, or it has none")


def read_file(path: str | os.PathLike[str], known: Iterable[str]) -> dict[str, Any]:
    """What stands in a TOML file.

    Args:
        path: Where it is.
        known: The keys that may stand there.

    Raises:
        ConfigError: It cannot be read (the cause is an OSError if it cannot be opened), is no TOML, has another key.
    """
    import tomllib

    try:
        found = tomllib.loads(read_text(path, _MOST_CONFIG))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not TOML: it is nested too deeply") from None
    keys = list(known)
    for key in found:
        if key not in keys:
            raise ConfigError(f"{path}: unknown key {shown(key)}{nearest(key, keys)}\nKeys: {', '.join(keys)}")
    return found


def passphrase(
    file: str | os.PathLike[str] | None, environ: Mapping[str, str], name: str = "passphrase_file"
) -> str | None:
    """The cluster's secret: what stands in `file`, else in ``PULSING_PASSPHRASE``; None where there is neither.

    Args:
        file: Path; the white space around what stands in it does not count.
        environ: Where the variable is looked up.
        name: How errors name the file.

    Raises:
        ConfigError: There is nothing in it, or it is no text; its cause is an OSError when it cannot be read.
    """
    if file is not None and not path_like(file):
        raise ConfigError(f"{name}={shown(file)}: expected a path")
    if file is None:
        secret = environ.get(PASSPHRASE)
        if secret is None:
            return None
        # Set and empty is a script whose secret went missing: going on without one would be a silent downgrade.
        if not secret.strip():
            raise ConfigError(f"{PASSPHRASE} is set but empty: write the secret into it, or unset it")
        return secret.strip()
    try:
        text = read_text(file, _MOST_SECRET).strip()
    except OSError as error:
        raise ConfigError(f"cannot read {name} {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{name} {file} is no secret: {error}") from None
    if not text:
        raise ConfigError(f"{name} {file} is empty: write the secret into it")
    return text
