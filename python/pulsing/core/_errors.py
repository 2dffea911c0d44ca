"""Rust errors as exceptions, and exceptions as what travels in their place."""

from __future__ import annotations

from typing import Any

from pulsing import exceptions as ex

_SIMPLE: dict[str, type[ex.PulsingRuntimeError]] = {
    "actor_not_found": ex.ActorNotFoundError,
    "mailbox_full": ex.MailboxFull,
    "name_taken": ex.NameTakenError,
    "invalid_name": ex.InvalidNameError,
    "name_not_found": ex.NameNotFoundError,
    "node_not_found": ex.NodeNotFoundError,
    "connect_failed": ex.ConnectFailedError,
    "connection_lost": ex.ConnectionLostError,
    "refused": ex.RefusedError,
    "cancelled": ex.CallCancelledError,
    "deadlock": ex.DeadlockError,
    "reply_too_large": ex.ReplyTooLargeError,
    "too_large": ex.TooLargeError,
    "bind": ex.BindError,
    "join_failed": ex.JoinError,
    "invalid_address": ex.ConfigError,
    "invalid_id": ex.ConfigError,
    "config": ex.ConfigError,
    "protocol": ex.ProtocolError,
    "shut_down": ex.SystemShutDownError,
}

_PICKLE_5 = b"\x80\x05"
_LONGEST_TRACEBACK = 16 << 10
"""Characters. Of an error that passes 64 KiB the core cuts the texts' ends and leaves out the exception itself, and the
notes of one cause alone may be megabytes: CPython 3.14 adds one for each level of what cannot be pickled."""


def from_core(error: tuple[str, str, dict[str, Any], str]) -> BaseException:
    """The exception for `_core`'s ``(kind, message, fields, state)``."""
    kind, message, fields, state = error
    if kind == "app":
        return _rebuild(fields)
    result: ex.PulsingError
    if kind == "actor_stopped":
        result = ex.ActorStoppedError(message, fields.get("actor"))
    elif kind == "timeout":
        result = ex.PulsingTimeoutError(fields["what"], round(fields["after"] * 1000))
    else:
        result = _SIMPLE.get(kind, ex.PulsingRuntimeError)(message)
        if isinstance(result, ex.TooLargeError):
            result.size, result.limit = fields["size"], fields["limit"]
    result.state_changed = state
    return result


def to_refusal(error: BaseException) -> tuple[str, str, float] | None:
    """Arguments for `InboundCall.refuse` if `error` is the runtime's own and not a handler's."""
    detail = getattr(error, "pulsing_refusal", None)
    return detail if isinstance(detail, tuple) else None


def refuse_as(error: ex.PulsingError, kind: str, detail: str = "", number: float = 0.0) -> ex.PulsingError:
    """Marks `error` as the runtime's own, to travel as Rust's variant `kind`."""
    marked: Any = error
    marked.pulsing_refusal = (kind, detail, number)
    return error


def as_raised(error: BaseException) -> BaseException:
    """`error` as a handler's own: a refusal that it got from another actor is not its actor's."""
    if to_refusal(error) is not None:
        vars(error).pop("pulsing_refusal", None)
    return error


def text_of(error: BaseException) -> str:
    """`str` of an exception, whatever its class makes of that: the error itself must not be lost over its text."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - whatever the user's __str__ raises
        return f"<its __str__ failed with {type(second).__name__}>"


def encode(error: BaseException) -> tuple[str, str, int, bytes, str]:
    """``(type_name, message, code, data, traceback)`` of a handler's exception; data is empty if it cannot be
    pickled.
    """
    from pulsing.core._pickle import dumps_whole
    from pulsing.core._tracebacks import text_of_traceback

    kind = type(error)
    text = _within(text_of_traceback(error), _LONGEST_TRACEBACK)
    try:
        data = dumps_whole(error)
    except Exception:  # noqa: BLE001 - whatever the object's own pickling raises
        data = b""
    code = error.code if isinstance(error, ex.PulsingBusinessError) else 0
    return f"{kind.__module__}.{kind.__qualname__}", text_of(error), code, data, text


def _within(text: str, limit: int) -> str:
    """`text`, or its beginning and its end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n  ... {len(text) - limit} characters are left out ...\n{text[-(limit // 2) :]}"


def _rebuild(fields: dict[str, Any]) -> BaseException:
    from pulsing.core._pickle import loads

    error: BaseException | None = None
    data: bytes = fields["data"]
    if data.startswith(_PICKLE_5):
        try:
            loaded = loads(data)
        except Exception:  # noqa: BLE001 - a class that is unknown here, or whose constructor wants other arguments
            loaded = None
        # A foreign SystemExit or KeyboardInterrupt must not end this process.
        if isinstance(loaded, Exception):
            error = loaded
    if error is None:
        error = unknown = ex.PulsingActorError(f"{fields['type_name']}: {fields['message']}")
        unknown.type_name = fields["type_name"]
        unknown.code = fields["code"]
        unknown.data = data
    if isinstance(error, ex.PulsingActorError):
        error.remote_traceback = fields["traceback"]
    if fields["traceback"]:
        error.__cause__ = ex.RemoteTraceback(fields["traceback"])
    return error
