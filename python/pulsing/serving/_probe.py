"""Looking at an OpenAI-compatible server: a small HTTP GET on the event loop, and what its answers mean."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

__all__ = ["EngineLoad", "Models", "ProbeError", "Url", "engine_load", "engine_of", "get", "version_in"]

# A server with a thousand models lists them in a few hundred KB; vLLM's metrics are about as large.
_MAX_BODY = 8 << 20
# Load reports carry every name five times a second.
_MAX_MODELS = 256


class ProbeError(Exception):
    """A server did not answer, or not with what it should; the text says so."""


def shown(url: str) -> str:
    """``url`` as errors and logs may show it: what may be a password or a key in it is left out."""
    begin = url.find("://") + 3 if "://" in url else 0
    _, at, rest = url[begin:].rpartition("@")
    rest, *query = re.split("[?#]", rest, maxsplit=1)
    return f"{url[:begin]}{'…@' if at else ''}{rest}{'?…' if query else ''}"


@dataclass(frozen=True)
class Url:
    """Where an engine listens."""

    host: str
    port: int
    prefix: str
    """What stands before ``/v1``."""
    secure: bool = False
    """Under https."""

    @classmethod
    def parse(cls, text: str) -> Url:
        """Reads ``http(s)://host[:port][/prefix][/v1]``.

        Raises:
            ValueError: it is something else; the text says what.
        """
        seen = shown(text)
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            # The words for what is wrong repeat parts of it.
            why = error if seen == text else "it cannot be read; a key goes into --api_key_file"
            raise ValueError(f"url {seen!r}: {why}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {seen!r}: expected http://HOST:PORT, such as http://127.0.0.1:9001")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"url {seen!r}: expected no password, query or fragment; a key goes into --api_key_file")
        if not re.fullmatch(r"[!-~]*", parts.path) or len(text) > 512:
            raise ValueError(f"url {seen[:80]!r}: expected at most 512 plain characters")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        secure = parts.scheme == "https"
        usual = 443 if secure else 80
        return cls(parts.hostname, usual if port is None else port, prefix, secure)

    @property
    def authority(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.prefix}"


async def get(
    url: Url, path: str, headers: Mapping[str, str], timeout: float, tls: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    """Status and body of one GET on a connection of its own, within ``timeout`` seconds in all.

    Args:
        url: Where the server listens.
        path: What is asked for.
        headers: Beside those that every request has.
        timeout: Seconds.
        tls: Whose certificates are believed under https.

    Raises:
        ConnectionError: nobody listens, the connection broke, or the certificate is not believed.
        TimeoutError: no whole answer in time.
        ProbeError: what came is not HTTP.
    """
    async with asyncio.timeout(timeout):
        try:
            reader, writer = await asyncio.open_connection(url.host, url.port, ssl=tls)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            # A name that means nothing, no route.
            raise ConnectionError(str(error)) from error
        try:
            lines = [f"GET {url.prefix}{path} HTTP/1.1", f"host: {url.authority}", "connection: close", "accept: */*"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
            return await _response(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            if isinstance(error, asyncio.IncompleteReadError) and not error.partial:
                raise ConnectionResetError("the connection was closed without an answer") from error
            raise ProbeError(f"GET {path} was not answered in HTTP: {error}") from error
        finally:
            writer.transport.abort()


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = head[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"it begins with {head[0][:40]!r}")
    status = int(rest[:3])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            _small(len(body) + size)
            body += (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        body = await reader.readexactly(_small(int(headers["content-length"])))
    else:
        body = b""
        while piece := await reader.read(1 << 16):
            body += piece
            _small(len(body))
    return status, body


def _small(size: int) -> int:
    """The size, if it is one that is read."""
    if not 0 <= size <= _MAX_BODY:
        raise ValueError(f"a body of {size} bytes")
    return size


@dataclass(frozen=True)
class Models:
    """What ``/v1/models`` says."""

    names: tuple[str, ...]
    max_model_len: int
    """Of the first model, in tokens; 0 = unknown."""
    owner: str
    root: str = ""
    """What the server has loaded as its first model."""

    @classmethod
    def parse(cls, body: bytes) -> Models:
        """Reads the list.

        Raises:
            ProbeError: it is none.
        """
        try:
            data = json.loads(body)["data"]
            entries = [entry for entry in data if isinstance(entry["id"], str)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProbeError("GET /v1/models is not answered with a list of models as OpenAI has it") from error
        names = tuple(dict.fromkeys(entry["id"] for entry in entries))[:_MAX_MODELS]
        first: dict[str, Any] = entries[0] if entries else {}
        meta = first.get("meta")
        # llama.cpp says it in `meta`: the context it runs with, else the one the model was trained for.
        lengths = [first.get("max_model_len")]
        lengths += [meta.get("n_ctx"), meta.get("n_ctx_train")] if isinstance(meta, dict) else []
        length = next((value for value in lengths if type(value) is int and 0 < value < 2**63), 0)
        return cls(names, length, str(first.get("owned_by", "")), str(first.get("root") or ""))


@dataclass(frozen=True)
class EngineLoad:
    """What an engine says of its load in ``/metrics``."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    engine: str = ""
    """Whose names the metrics have; empty = nobody's that is known."""
    signs: tuple[float, ...] = ()
    """Numbers that stand still only where the engine does; none of an engine that does not count every step."""


# engine: its metrics of running requests, waiting ones and KV cache use, the newest name first.
_METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "vllm": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", ("sglang:token_usage",)),
    "llama_cpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred", ("llamacpp:kv_cache_usage_ratio",)),
    "tgi": ("tgi_batch_current_size", "tgi_queue_size", ()),
}
# Counted with every step. SGLang counts tokens when a request ends, and llama.cpp does not answer while it hangs.
_STEPS: dict[str, tuple[str, ...]] = {"vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")}
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


def engine_load(text: str) -> EngineLoad:
    """Reads Prometheus text. Request counts of several replicas are added, of their cache uses the largest counts.

    A proxy may have written ``_`` for the ``:`` of a name, which Prometheus keeps for rules.
    """
    values: dict[str, list[float]] = {}
    wanted = {name for running, waiting, caches in _METRICS.values() for name in (running, waiting, *caches)}
    wanted.update(name for names in _STEPS.values() for name in names)
    spelt = {name.replace(":", "_"): name for name in wanted}
    for name, value in _samples(text):
        if known := spelt.get(name.replace(":", "_")):
            values.setdefault(known, []).append(value)
    for engine, (running, waiting, caches) in _METRICS.items():
        # TGI shows a number from when it is first set.
        if running in values or waiting in values:
            cache = next((max(values[name]) for name in caches if name in values), 0.0)
            now, later = _count(values.get(running, [])), _count(values.get(waiting, []))
            steps = [sum(values[name]) for name in _STEPS.get(engine, ()) if name in values]
            # While a long prompt is read, the cache fills.
            signs = (*steps, now, later, cache) if steps else ()
            return EngineLoad(now, later, min(max(cache, 0.0), 1.0), engine, signs)
    return EngineLoad()


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            yield name, number


def _count(values: list[float]) -> int:
    return int(min(max(sum(values), 0.0), 2**31))


def version_in(body: bytes) -> str:
    """The ``version`` that a server says it is, in an object of JSON; empty if it does not say."""
    try:
        said = json.loads(body)["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return said if isinstance(said, str) else ""


def engine_of(load: EngineLoad, owner: str) -> str:
    """Name of the engine, from its metrics or else from who owns its models."""
    if load.engine:
        return load.engine
    # Ollama's owner is a model's namespace, and this one that of its own models.
    known = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama_cpp", "llama.cpp": "llama_cpp", "library": "ollama"}
    return known.get(owner.lower(), "openai")
