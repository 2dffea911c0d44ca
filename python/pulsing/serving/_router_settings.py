"""The settings of a Router, once: what arguments, flags, ``PULSING_ROUTER_*`` and files give, and the docs list.

One value comes from the first of these that gives it: the argument or flag, the variable, the file (``--config``,
``PULSING_ROUTER_CONFIG``), the default. `docs/reference/router.md` is this table for people; a test keeps
the two aligned.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pulsing import _core
from pulsing.core._settings import (
    MOST_BYTES,
    MOST_COUNT,
    Setting,
    Size,
    file_given,
    nearest,
    number,
    of_kubernetes,
    read_file,
    text,
)
from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError
from pulsing.serving._served import Served, parse_models

CONFIG = "PULSING_ROUTER_CONFIG"
_FAMILY = "PULSING_ROUTER_"
# A hundred years in seconds: no process lives as long, and every clock can count as far.
_FAR = 100 * 365 * 24 * 3600.0
API_KEY = "PULSING_API_KEY"
"""The one API key of a Router, for those who need no file. No flag and no key of a file: others could read those."""


@dataclasses.dataclass(frozen=True)
class RouterSetting(Setting):
    """One row: argument, key and flag `name`, variable ``PULSING_ROUTER_NAME``.

    Args:
        variable: Its variable, where it is another one.
        of_the_gateway: Whether the native server takes it.
    """

    variable: str = ""
    of_the_gateway: bool = True

    @property
    def env(self) -> str:
        """Its variable."""
        return self.variable or f"{_FAMILY}{self.name.upper()}"

    def check(self, value: Any, source: str | None = None) -> Any:
        """See `Setting.check`; a time beyond any clock is as good as for ever."""
        found = super().check(value, source)
        return min(found, _FAR) if self.unit == "s" and found is not None else found


@dataclasses.dataclass(frozen=True)
class _Models(RouterSetting):
    """The row of the public model names, which have a form of their own."""

    def read(self, raw: Any, source: str) -> list[Served]:
        """See `Setting.read`."""
        return list(self.check(parse_models(raw, source), source))


class RouterSettings(TypedDict, total=False):
    """What `Router` and `start_router` take by name, beside their first five arguments. None: as if not given."""

    models: str | dict[str, str] | list[str] | None
    session_headers: Sequence[str] | str | None
    balance_absolute: int | None
    balance_relative: float | None
    cache_index: int | str | None
    debug_routing: bool | None
    max_requests: int | None
    max_receiving: int | None
    max_bodies: int | str | None
    max_body: int | str | None
    request_timeout: float | None
    header_timeout: float | None
    body_timeout: float | None
    ping_interval: float | None
    worker_wait: float | None
    take_back: float | None
    worker_silence: float | None
    worker_standstill: float | None
    silence_wait: float | None
    max_attempts: int | None
    drain_timeout: float | None
    api_keys_file: str | None
    metrics_open: bool | None
    max_queue: int | None
    queue_timeout: float | None
    max_headers: int | None
    max_header_bytes: int | str | None
    cors_origins: Sequence[str] | str | None
    tls_cert: str | None
    tls_key: str | None
    engine_ca_file: str | None
    access_log: str | None
    access_log_content: int | str | None
    otlp_endpoint: str | None
    otlp_headers_file: str | None
    otlp_sample: float | None


def _scheduler_type(value: Any) -> bool:
    try:
        _core.check_scheduler_type(value)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return True


def _header_names(value: Any) -> bool:
    return all(re.fullmatch(r"[\w-]+", name, re.ASCII) for name in value)


def _seconds(name: str, default: float, doc: str, *, zero: bool = False, **more: Any) -> RouterSetting:
    expects = "seconds, 0 or more" if zero else "seconds, more than 0"
    return RouterSetting(name, float, default, "s", doc, expects, number(0, above=not zero), **more)


def _count(name: str, default: int, unit: str, doc: str) -> RouterSetting:
    return RouterSetting(name, int, default, unit, doc, f"1 to {MOST_COUNT}", number(1, MOST_COUNT, whole=True))


def _flag(name: str, default: bool, doc: str) -> RouterSetting:
    return RouterSetting(name, bool, default, "", doc, "True or False", lambda value: isinstance(value, bool))


def _file(name: str, doc: str) -> RouterSetting:
    return RouterSetting(name, str | None, None, "", doc, "a path", text)


def _size(name: str, default: int, doc: str) -> RouterSetting:
    doc = f"{doc}; `64MiB` and the like are understood"
    return RouterSetting(
        name, Size, default, "bytes", doc, f"1 to {MOST_BYTES} bytes", number(1, MOST_BYTES, whole=True)
    )


SETTINGS: tuple[RouterSetting, ...] = (
    RouterSetting(
        "http_host", str, "0.0.0.0", "", "address to listen on; `0.0.0.0` is every interface", "a host name", text
    ),
    RouterSetting(
        "http_port",
        int,
        8080,
        "",
        "port to listen on; 0 takes a free one",
        "a port from 0 (any free one) to 65535",
        number(0, 65535, whole=True),
    ),
    RouterSetting(
        "model_name",
        str,
        "pulsing-model",
        "",
        "public name of whatever the workers serve; their own model names are accepted too",
        "a name; it must not be empty",
        text,
    ),
    RouterSetting(
        "worker_name",
        str,
        "worker",
        "",
        "name the workers are registered under",
        "a name; it must not be empty",
        text,
    ),
    _Models(
        "models",
        Any,
        None,
        "",
        "further public names, `PUBLIC=WORKER_NAME[:WORKER_MODEL],...` or a table of PUBLIC to "
        "WORKER_NAME[:WORKER_MODEL]; with it, model_name and worker_name count only where one of them is given",
    ),
    RouterSetting(
        "scheduler_type",
        str,
        "stream_load",
        "",
        "how a worker is chosen: `stream_load` (least pushed load), `round_robin`, `random`, `power_of_two`, "
        "`consistent_hash` (a conversation stays where it is), `cache_aware` (the longest prefix of the prompt)",
        "the name of a policy",
        _scheduler_type,
    ),
    RouterSetting(
        "session_headers",
        list[str],
        ("x-session-id", "x-conversation-id", "x-user-id"),
        "",
        "headers that name a conversation, separated by commas, the most telling first, for `consistent_hash`; after "
        "them the body's `session_params.session_id`, `user`, `session_id` and `user_id` count",
        "names of headers",
        _header_names,
    ),
    RouterSetting(
        "balance_absolute",
        int,
        4,
        "requests",
        "what a worker may have above its share before `consistent_hash` and `cache_aware` look for another; both "
        "bounds must be passed",
        f"0 to {MOST_COUNT}",
        number(0, MOST_COUNT, whole=True),
    ),
    RouterSetting(
        "balance_relative",
        float,
        1.5,
        "shares",
        "how many times its share a worker may have before `consistent_hash` and `cache_aware` look for another",
        "1 or more",
        number(1),
    ),
    _size("cache_index", 32 << 20, "memory for what `cache_aware` knows of prompts"),
    _flag(
        "debug_routing",
        False,
        "tell clients that send `x-pulsing-debug: routing` which worker they got and why, and serve `GET /v1/_routing`",
    ),
    _count(
        "max_requests", 4096, "requests", "requests in the house at once, running or waiting; more are answered 503"
    ),
    _count(
        "max_receiving",
        4096,
        "requests",
        "requests whose bodies are being received, beside those in the house; more are answered 503",
    ),
    _size(
        "max_bodies",
        4 << 30,
        "all request bodies that are held at once; beyond it one of more than 64 KiB is answered 503",
    ),
    _size("max_body", 64 << 20, "largest request body; a larger one is answered 413"),
    _seconds("request_timeout", 600.0, "how long one request may take from arrival to its last byte"),
    _seconds(
        "header_timeout",
        120.0,
        "how long a connection may take to send a request's head, and may stay idle between requests",
    ),
    _seconds("body_timeout", 30.0, "how long a request's body may pause while it is read"),
    _seconds("ping_interval", 15.0, "silence on a stream after which a comment line keeps proxies from cutting it"),
    _seconds(
        "worker_wait", 1.0, "how long a request waits for another worker when the one it was on is lost", zero=True
    ),
    _seconds(
        "take_back",
        10.0,
        "how long an engine server must have been gone or silent before what it has not begun to answer is sent "
        "elsewhere, at most; three times its longest time to a first byte, where that is less",
    ),
    _seconds(
        "worker_silence",
        1.5,
        "silence of a worker, which reports every 0.2 s, after which it is not chosen, what it has not begun to "
        "answer is sent elsewhere, and another one is asked for the rest of what it has",
    ),
    _seconds(
        "worker_standstill",
        10.0,
        "the same for a worker that reports requests and no progress; three times what it was seen to need, where that "
        "is more",
    ),
    _seconds("silence_wait", 10.0, "how long a request waits for a worker where all have fallen silent", zero=True),
    _count("max_attempts", 5, "workers", "workers that one request is tried on at most"),
    _seconds(
        "drain_timeout",
        30.0,
        "what running requests get to finish when the Router stops",
        zero=True,
        of_the_gateway=False,
    ),
    _file("api_keys_file", "file of API keys, one `name:key` a line; none: anybody may ask"),
    _flag("metrics_open", False, "answer `/metrics` without a key"),
    RouterSetting(
        "max_queue",
        int,
        1024,
        "requests",
        "requests that may wait here while all workers are full; more are answered 503; 0: none waits here, workers "
        "queue for themselves",
        f"0 to {MOST_COUNT}",
        number(0, MOST_COUNT, whole=True),
    ),
    _seconds("queue_timeout", 60.0, "how long a request may wait there"),
    _count("max_headers", 100, "headers", "headers of one request; more are answered 431"),
    _size("max_header_bytes", 64 << 10, "size of one request's headers; more is answered 431"),
    RouterSetting(
        "cors_origins",
        list[str],
        (),
        "",
        "origins whose browsers are let in (CORS), separated by commas, as in `https://chat.example`; `*`: any; none: "
        "no browser of another origin",
        "origins",
        lambda value: all(one == "*" or "://" in one for one in value),
    ),
    _file("tls_cert", "PEM file of a certificate chain: the API is served over TLS; read again when it changes"),
    _file("tls_key", "PEM file of its private key"),
    _file(
        "engine_ca_file", "PEM file of the authorities that https engines are believed by; none: those of the system"
    ),
    _file("access_log", "where one JSON line a request goes: a path, or `-` for standard output; none: nowhere"),
    RouterSetting(
        "access_log_content",
        Size,
        0,
        "bytes",
        "how much of each request's body and of its answer a line has; 0: nothing of what is said is logged; `4KiB` "
        "and the like are understood",
        f"0 to {1 << 20} bytes",
        number(0, 1 << 20, whole=True),
    ),
    RouterSetting(
        "otlp_endpoint",
        str | None,
        None,
        "",
        "collector of OpenTelemetry traces (OTLP/HTTP), as in `http://collector:4318`; none: no traces",
        "a URL",
        text,
        variable="PULSING_OTLP_ENDPOINT",
    ),
    RouterSetting(
        "otlp_headers_file",
        str | None,
        None,
        "",
        "file of headers that the collector wants, such as a key: one `Name: value` a line, mode 600; none: those of "
        "the variable `OTEL_EXPORTER_OTLP_HEADERS`",
        "a path",
        text,
        variable="PULSING_OTLP_HEADERS_FILE",
    ),
    RouterSetting(
        "otlp_sample",
        float,
        1.0,
        "",
        "share of the traces begun here that are kept; of those begun elsewhere their own choice counts",
        "0 to 1",
        number(0, 1),
    ),
)

BY_NAME: dict[str, RouterSetting] = {setting.name: setting for setting in SETTINGS}


def resolve(
    arguments: Mapping[str, Any],
    config: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The value of every setting.

    Args:
        arguments: What was given by name; None counts as not given. Text is read as a flag's.
        config: Path of a TOML file; None: ``PULSING_ROUTER_CONFIG``, or no file.
        environ: Where variables are looked up. One that is set and empty counts as not set.

    Raises:
        ConfigError: A value that cannot be read or does not fit, an unknown name, key or variable.
    """
    for name in arguments:
        if name not in BY_NAME:
            raise ConfigError(
                f"a Router has no setting {shown(name)}{nearest(name, BY_NAME)}\nSettings: {', '.join(BY_NAME)}"
            )
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    path = file_given(config, environ.get(CONFIG))
    if path:
        for key, raw in read_file(path, BY_NAME).items():
            values[key] = BY_NAME[key].read(raw, f"{path}: {key}")
    known = {setting.env: setting for setting in SETTINGS}
    for variable, raw in environ.items():
        setting = known.get(variable)
        if not raw and setting is not None and setting.name == "api_keys_file":
            # A script whose file went missing: going on without keys would open the door to everybody.
            raise ConfigError(f"{variable} is set but empty: name a file, or unset it")
        if setting is not None and raw:
            values[setting.name] = setting.read(raw, variable)
        elif setting is None and variable.startswith(_FAMILY) and variable != CONFIG and not of_kubernetes(variable):
            raise ConfigError(f"{variable} is no setting of a Router{nearest(variable, known)}")
    for name, raw in arguments.items():
        if raw is not None:
            values[name] = BY_NAME[name].read(raw, name)
    return values


def served(values: Mapping[str, Any]) -> list[Served]:
    """The public names of `resolve`, the one that a client means that names no model first.

    Raises:
        ConfigError: One is given twice.
    """
    table: list[Served] = values["models"] or []
    pair = Served(values["model_name"], values["worker_name"])
    if table and pair == (BY_NAME["model_name"].default, BY_NAME["worker_name"].default, None):
        return table
    if any(one.name == pair.name for one in table):
        raise ConfigError(f"models: the name {shown(pair.name)} is given twice, here and as model_name")
    return [pair, *table]


def of_the_gateway(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What the native server takes: those of `resolve` that are its own, and the secrets of the environment.

    Args:
        values: What `resolve` returned.
        environ: Where ``PULSING_API_KEY`` and `otlp_headers` are looked up.

    Raises:
        ConfigError: The key is set and empty, or there is a file of keys too.
    """
    first, *more = served(values)
    taken = {setting.name: values[setting.name] for setting in SETTINGS if setting.of_the_gateway}
    taken |= {"model_name": first.name, "worker_name": first.worker_name, "models": [first, *more]}
    key = environ.get(API_KEY)
    if key is not None:
        # Set and empty is a script whose secret went missing: going on without one would open the door to everybody.
        if not key.strip():
            raise ConfigError(f"{API_KEY} is set but empty: write the key into it, or unset it")
        if values["api_keys_file"] is not None:
            raise ConfigError(f"{API_KEY} and api_keys_file exclude each other: unset the one, or leave out the other")
        taken["api_key"] = key.strip()
    if values["otlp_endpoint"]:
        taken["otlp_headers"] = otlp_headers(environ)
    return taken


def otlp_headers(environ: Mapping[str, str]) -> str | None:
    """The headers of every request to a collector of traces, as OpenTelemetry's own variables give them.

    Args:
        environ: Where they are looked up.
    """
    # No flag and no key of a file: others could read a key there.
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environ.get("OTEL_EXPORTER_OTLP_HEADERS") or None
