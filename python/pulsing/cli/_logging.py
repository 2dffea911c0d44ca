"""Log lines of Python in the form of the runtime's own, so that one stderr reads as one log."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable

from pulsing.core._shown import legible

_LEVELS = {"error": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
# Python has no level below debug.
_LEVELS["trace"] = logging.DEBUG
_WORDS = {"WARNING": "WARN", "CRITICAL": "ERROR"}


def configure(level: str, form: str) -> None:
    """Sets up both halves: `logging` of Python, and the runtime's.

    Args:
        level: error, warn, info, debug or trace; libraries other than Pulsing log from warn up.
        form: text or json.
    """
    from pulsing.core._lifecycle import start_logging

    start_logging(level, form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(logging.WARNING, _LEVELS[level]))
    logging.getLogger("pulsing").setLevel(_LEVELS[level])
    logging.captureWarnings(capture=True)


def speaker(form: str) -> Callable[[str], None]:
    """Says what a person at the terminal waits for, at any log level; as JSON where every line must be."""
    formatter = JsonFormatter()

    def say(text: str) -> None:
        if form == "json":
            text = formatter.format(logging.LogRecord("pulsing.cli", logging.INFO, "", 0, text, None, None))
        to_stderr(text)

    return say


def to_stderr(text: str) -> None:
    """Writes a line for whoever reads it. Once nobody does (`2>&1 | head`), work goes on: a signal still stops it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def trace_of(error: BaseException) -> None:
    """Logs where an error came from, at debug level."""
    logging.getLogger("pulsing.cli").debug("%s", error, exc_info=error)


def _stamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.created % 1 * 1e6):06d}Z"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = formatter.formatException(record.exc_info) if record.exc_info else ""
    return "\n".join(part for part in (text, record.stack_info) if part)


class TextFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000000Z  INFO pulsing.serving: text`."""

    def format(self, record: logging.LogRecord) -> str:
        word = _WORDS.get(record.levelname, record.levelname)
        line = f"{_stamp(record)} {word:>5} {record.name}: {legible(record.getMessage())}"
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One object a line: timestamp, level, fields.message, target."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"message": record.getMessage()}
        trace = _trace(self, record)
        if trace:
            fields["traceback"] = trace
        return json.dumps(
            {
                "timestamp": _stamp(record),
                "level": _WORDS.get(record.levelname, record.levelname),
                "fields": fields,
                "target": record.name,
            },
            ensure_ascii=False,
        )
