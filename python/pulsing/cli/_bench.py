"""`pulsing bench`: tells the load generator what to do, shows how it goes, and prints what it measured.

The load generator is `pulsing._bench`, a wheel of its own. Nothing here measures anything.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from typer import echo

from pulsing.cli._errors import CliError, FailureError, MisuseError, nearest
from pulsing.core._shown import shown

BUILD_COMMAND = "maturin develop --manifest-path crates/pulsing-bench-py/Cargo.toml"
KINDS = ("throughput", "rate", "sweep", "csweep")
KEY_VARIABLE = "PULSING_BENCH_API_KEY"
# Often enough to look alive, seldom enough to cost nothing.
_TICK = 0.2
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# Of any number on the command line; beyond it JSON and counters begin to disagree.
_MOST = 1e9


class InterruptedCommandError(CliError):
    """Ctrl-C: what was measured has been printed."""

    exit_code = 130


class _Run(Protocol):
    def wait(self, timeout: float) -> bool: ...
    def progress(self) -> str: ...
    def stop(self) -> None: ...
    def report(self, count_tokens: Callable[[str], int] | None = None) -> str: ...
    def requests(self) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line as typed; None means the default of docs/guides/bench.md."""

    model: str | None
    url: str | None
    api_key: str | None = None
    tokenizer_name: str | None = None
    hf_token: str | None = None
    benchmark_kind: str = "throughput"
    max_vus: int = 128
    duration: str = "120s"
    warmup: str = "30s"
    drain: str = "30s"
    rates: str | None = None
    num_rates: int = 10
    concurrency: str | None = None
    num_workers: int = 4
    arrival: str = "poisson"
    on_full: str = "queue"
    input_tokens: str = "200"
    output_tokens: str = "128"
    endpoint: str = "auto"
    connection: str = "reuse"
    timeout: str | None = None
    slo: str | None = None
    seed: int | None = None
    extra_body: str | None = None
    output: Path | None = None
    requests_output: Path | None = None
    json_output: bool = False


def run(options: Options) -> None:
    """Measures, and prints the result.

    Raises:
        MisuseError: the module is missing, or an option cannot be meant.
        FailureError: the server cannot be measured, or not one request succeeded.
        InterruptedCommandError: Ctrl-C; the partial result has been written.
    """
    module = _module()
    settings = config(options)
    count = _tokenizer(options.tokenizer_name, options.hf_token) if options.tokenizer_name else None
    for path in (options.output, options.requests_output):
        if path is not None and not os.path.isdir(path.absolute().parent):
            raise MisuseError(f"cannot write {path}: the folder {path.absolute().parent} does not exist.")
        if path is not None and os.path.isdir(path):
            raise MisuseError(f"cannot write {path}: it is a folder; name a file in it.")
    try:
        running: _Run = module.Run(json.dumps(settings))
    except ValueError as error:
        raise MisuseError(str(error)) from None
    _watch(running, Display(sys.stderr))
    try:
        text = running.report(count)
    except ValueError as error:
        raise MisuseError(str(error)) from None
    except ConnectionError as error:
        raise FailureError(str(error)) from None
    report = json.loads(text)
    unwritten: list[str] = []
    if options.output is not None:
        unwritten += _write(options.output, json.dumps(report, indent=2) + "\n")
    if options.requests_output is not None:
        unwritten += _write(options.requests_output, "".join(line + "\n" for line in running.requests()))
    echo(json.dumps(report) if options.json_output else table(report))
    if unwritten:
        raise FailureError("\n".join(unwritten))
    if report["interrupted"]:
        raise InterruptedCommandError("interrupted: the result holds what was measured until then.")
    if not any(point["counts"]["ok"] for point in report["points"]):
        raise FailureError("not one request succeeded.")


def config(options: Options) -> dict[str, Any]:
    """The load generator's JSON for a command line.

    Raises:
        MisuseError: naming the option, its value and what is expected.
    """
    if not options.model:
        raise MisuseError("MODEL is missing, as in: pulsing bench gpt2 --url http://localhost:8080")
    if not options.url:
        raise MisuseError(f"--url is missing, as in: pulsing bench {options.model} --url http://localhost:8080")
    kind = options.benchmark_kind.lower()
    if kind not in KINDS:
        raise MisuseError(
            f"--benchmark_kind {shown(options.benchmark_kind)}: expected {', '.join(KINDS)}{nearest(kind, KINDS)}"
        )
    for name in ("max_vus", "num_rates", "num_workers"):
        count = getattr(options, name)
        _bounded(f"--{name}", str(count), min(abs(count), 10**12))
    settings: dict[str, Any] = {
        "model": options.model,
        "url": options.url,
        "kind": kind,
        "max_vus": options.max_vus,
        "duration": seconds("--duration", options.duration),
        "warmup": seconds("--warmup", options.warmup),
        "drain": seconds("--drain", options.drain),
        "num_rates": options.num_rates,
        "num_workers": options.num_workers,
        "arrival": _one_of("--arrival", options.arrival, ("constant", "poisson")),
        "on_full": _one_of("--on_full", options.on_full, ("queue", "drop")),
        "endpoint": _one_of("--endpoint", options.endpoint, ("auto", "chat", "completions")),
        "connection": _one_of("--connection", options.connection, ("reuse", "new")),
        "input_tokens": _length("--input_tokens", options.input_tokens),
        "output_tokens": _length("--output_tokens", options.output_tokens),
        "keep_text": options.tokenizer_name is not None,
    }
    key = options.api_key or os.environ.get(KEY_VARIABLE)
    if key:
        settings["api_key"] = key
    if options.rates:
        settings["rates"] = [_number("--rates", part, float) for part in options.rates.split(",")]
    if options.concurrency:
        settings["concurrency"] = [_number("--concurrency", part, int) for part in options.concurrency.split(",")]
    if options.seed is not None:
        if not 0 <= options.seed < 2**64:
            raise MisuseError(f"--seed {options.seed}: expected 0 to 2^64 - 1")
        settings["seed"] = options.seed
    if options.timeout:
        settings["timeouts"] = _pairs("--timeout", options.timeout, ("connect", "first", "idle", "total"), 1.0)
    if options.slo:
        settings["slo"] = _pairs("--slo", options.slo, ("ttft", "tpot", "e2e"), 1000.0)
    if options.extra_body:
        try:
            body = json.loads(options.extra_body)
        except ValueError as error:
            raise MisuseError(f"--extra_body is no JSON: {error}") from None
        except RecursionError:
            raise MisuseError("--extra_body is nested too deeply") from None
        if not isinstance(body, dict):
            raise MisuseError("--extra_body must be a JSON object, as in: --extra_body '{\"temperature\": 0}'")
        settings["extra_body"] = body
    return settings


def seconds(option: str, text: str) -> float:
    """`120s`, `2m`, `500ms`; a bare number is seconds.

    Raises:
        MisuseError: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    unit = match and (_UNITS.get(match[2]) if match[2] else 1.0)
    if not match or unit is None:
        raise MisuseError(f"{option} {shown(text)}: expected a duration such as 120s, 2m or 500ms")
    return _bounded(option, text, float(match[1]) * unit)


def _bounded(option: str, text: str, value: float) -> float:
    """What the load generator can be told of; where its own bounds are, it says better itself."""
    if not abs(value) <= _MOST:
        raise MisuseError(f"{option} {shown(text)}: expected {_MOST:g} at most")
    return value


def _number(option: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise MisuseError(
            f"{option} {shown(text)}: expected {word} separated by commas, as in {option} 1,2,4"
        ) from None
    _bounded(option, text, value)
    return value


def _one_of(option: str, value: str, known: Sequence[str]) -> str:
    if value.lower() not in known:
        raise MisuseError(f"{option} {shown(value)}: expected {', '.join(known)}{nearest(value, known)}")
    return value.lower()


def _length(option: str, text: str) -> dict[str, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match:
        raise MisuseError(f"{option} {shown(text)}: expected a number of tokens, or LOW-HIGH to draw from")
    low, high = (number if len(number) < 12 else "9" * 12 for number in (match[1], match[2] or match[1]))
    _bounded(option, text, int(low))
    _bounded(option, text, int(high))
    return {"low": int(low), "high": int(high)}


def _pairs(option: str, text: str, known: Sequence[str], scale: float) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in known or not equals:
            raise MisuseError(
                f"{option} {shown(part)}: expected NAME=DURATION with {', '.join(known)}{nearest(name, known)}"
            )
        if scale != 1.0 and value.strip().replace(".", "").isdigit():
            # Milliseconds to one reader and seconds to the next: the unit has to be said.
            raise MisuseError(f"{option} {shown(part)}: the unit is missing, as in {name}={value}ms")
        values[name] = seconds(f"{option} {name}", value) * scale
    return values


def _module() -> Any:
    try:
        return importlib.import_module("pulsing._bench")
    except ModuleNotFoundError as error:
        if error.name != "pulsing._bench":
            raise
        raise MisuseError(f"pulsing._bench module not found. This builds it:\n  {BUILD_COMMAND}") from None


def _tokenizer(name: str, token: str | None) -> Callable[[str], int]:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise MisuseError(
            "--tokenizer_name needs the tokenizers package: pip install tokenizers. "
            "Without the option the server's own usage numbers are used."
        ) from None
    path = Path(name)
    path = path / "tokenizer.json" if os.path.isdir(path) else path
    if not os.path.exists(path) and (path.suffix == ".json" or path.is_absolute()):
        raise MisuseError(f"--tokenizer_name {name}: there is no file {path}.")
    try:
        if os.path.exists(path):
            loaded = tokenizers.Tokenizer.from_file(str(path))
        else:
            loaded = tokenizers.Tokenizer.from_pretrained(name, token=token)
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        why = str(error).replace(token, "[token]") if token else str(error)
        raise MisuseError(
            f"--tokenizer_name {name}: {why}\nGive the path of a tokenizer.json, or leave the option out: "
            "then the server's own usage numbers are used."
        ) from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _watch(running: _Run, display: "Display") -> None:
    """Shows progress until the run is over; Ctrl-C ends the run, a second one the wait."""
    asked = False
    while True:
        try:
            while not running.wait(_TICK):
                display.show(json.loads(running.progress()))
            break
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            running.stop()
    display.clear()


class Display:
    """Progress on a stream: one line redrawn on a terminal, one line a point elsewhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._tty = bool(stream.isatty())
        self._last: tuple[str, int] | None = None
        self._tokens = (0.0, 0)
        self._speed = 0.0

    def show(self, progress: Mapping[str, Any]) -> None:
        """Draws `progress`, as the load generator tells it."""
        if not self._tty:
            point = (progress["label"], progress["points_done"])
            if point != self._last:
                self._last = point
                self._stream.write(_headline(progress) + "\n")
                self._stream.flush()
            return
        width = _columns() - 1
        self._stream.write("\r\x1b[2K" + self._line(progress)[:width])
        self._stream.flush()

    def clear(self) -> None:
        """Leaves the terminal as it was."""
        if self._tty:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _line(self, progress: Mapping[str, Any]) -> str:
        now, (then, tokens) = time.monotonic(), self._tokens
        if progress["tokens"] < tokens or then == 0.0:
            self._tokens, self._speed = (now, progress["tokens"]), 0.0
        elif now - then >= 1.0:
            self._speed = (progress["tokens"] - tokens) / (now - then)
            self._tokens = (now, progress["tokens"])
        parts = [
            _headline(progress),
            f"{progress['elapsed']:.0f}/{progress['duration']:.0f} s",
            f"in flight {progress['in_flight']}",
            f"ok {progress['ok']}",
        ]
        parts += [f"{name} {count}" for name, count in progress["failed"].items()]
        parts.append(f"{self._speed:.0f} tok/s")
        if progress["ttft_p50"] is not None:
            parts.append(f"TTFT {_ms(progress['ttft_p50'])}/{_ms(progress['ttft_p99'])}")
        if progress["tpot_p50"] is not None:
            parts.append(f"TPOT {_ms(progress['tpot_p50'])}")
        if progress["lag_p99"] is not None:
            parts.append(f"lag {_ms(progress['lag_p99'])}")
        return "  ".join(parts)


def _headline(progress: Mapping[str, Any]) -> str:
    label = str(progress["label"])
    if label in {"probe", "warm-up"}:
        return label
    points = progress["points"]
    return f"[{progress['points_done'] + 1}/{points}] {label}" if points else label


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 80


def _write(path: Path, text: str) -> list[str]:
    """Whole or not at all: a reader never sees half a report. Why not, if not: what was measured is still told."""
    draft = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.absolute().parent, delete=False, encoding="utf-8") as file:
            draft = file.name
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)
        return [f"cannot write {path}: {error.strerror}"]
    return []


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


_POINT_COLUMNS = ("point", "ok", "failed", "other", "in flight", "req/s", "tok/s", "TTFT p50", "TTFT p99", "TPOT p50")
_LATENCIES = ("ttft", "ttft_sched", "ttfo", "tpot", "itl", "icl", "e2e", "e2e_sched", "queue")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def table(report: Mapping[str, Any]) -> str:
    """The result for people: a row per point, the latencies of each, what failed, and what to know about it."""
    server = report["server"]
    lines = [
        f"{report['config']['model']} at {server['authority']}{server['path']}, {report['config']['kind']}, "
        f"seed {report['seed']}",
        "",
    ]
    rows: list[tuple[str, ...]] = [_POINT_COLUMNS]
    for point in report["points"]:
        counts, latency = point["counts"], point["latency_ms"]
        rows.append(
            (
                point["label"],
                str(counts["ok"]),
                str(counts["failed"]),
                str(counts["cut"] + counts["dropped"] + counts["unsent"]),
                f"{point['achieved']['in_flight_mean']:.1f}",
                f"{point['throughput']['requests_per_s']:.2f}",
                f"{point['throughput']['output_tokens_per_s']:.1f}",
                _ms((latency["ttft"] or {}).get("p50")),
                _ms((latency["ttft"] or {}).get("p99")),
                _ms((latency["tpot"] or {}).get("p50")),
            )
        )
    lines += _aligned(rows)
    for point in report["points"]:
        known = [name for name in _LATENCIES if point["latency_ms"][name] is not None]
        if known:
            rows = [(f"{point['label']}, ms", "n", *_STATISTICS)]
            for name in known:
                summary = point["latency_ms"][name]
                rows.append((name, str(summary["n"]), *(f"{summary[word]:.1f}" for word in _STATISTICS)))
            lines += ["", *_aligned(rows)]
        if point["goodput"] is not None:
            good = point["goodput"]
            share = "-" if good["share"] is None else f"{good['share'] * 100:.1f} %"
            lines.append(f"goodput: {good['good']} requests, {share}, {good['requests_per_s']:.2f}/s")
        for name, error in point["errors"].items():
            lines.append(f"failed: {error['count']} {name}: {error['reason']}")
        reasons = f" ({'; '.join(point['verdict']['reasons'])})" if point["verdict"]["reasons"] else ""
        lines.append(f"verdict: {point['verdict']['state'].replace('_', '-')}{reasons}")
        lines += [f"note: {warning}" for warning in point["warnings"] if not warning.startswith("client-limited")]
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
