"""An engine server that already runs, as a worker: looked at from here, served by the Routers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pulsing._core import LoadReport, WorkerRequest
from pulsing.core._files import read_text
from pulsing.core._shown import shown
from pulsing.serving._errors import RequestError
from pulsing.serving._fingerprint import fingerprint_of
from pulsing.serving._probe import EngineLoad, Models, ProbeError, Url, engine_load, engine_of, get, version_in
from pulsing.serving._relay import relay
from pulsing.serving.worker import Delta, Worker

if TYPE_CHECKING:
    import ssl

    from pulsing.core._inbound import InboundCall
    from pulsing.serving._request import GenerateRequest

__all__ = ["EngineWorker"]

_log = logging.getLogger("pulsing.serving")

# A refused connection is certain. One late answer is not: the engine's process may just be busy.
_LATE_ANSWERS = 2
# Between two small questions to a server that serves, in seconds: Routers stop choosing one that is silent for 1.5 s.
_BEAT = 0.2
# Of an API key, in bytes.
_MOST_KEY = 65536
# Longest pause between two looks at a server that is not there or not ready.
_AWAY_LOOK = 0.25
# Seconds that relayed requests have to end when this worker stops, if `drain_timeout` is not longer; others go on.
_RELAY_DRAIN = 30.0
# While draining, seconds between two looks at the load. An engine's counts may trail what it does by a step.
_IDLE_LOOK = 0.25
_IDLE_LOOKS = 2
_ROLES = ("aggregated", "prefill", "decode")
_PAIRINGS = ("sequential", "concurrent")
# What a server without such an endpoint answers.
_ABSENT = frozenset({404, 405, 501})


# Engines whose streams strict clients accept as they are.
_WELL_FORMED = frozenset({"vllm", "sglang"})

# Engines that go on with an unfinished message of the assistant, and where they say which version they are.
_CONTINUE = {"vllm": "/version", "sglang": "/server_info"}

Normalize = Literal["off", "on", "auto"]
ContinueStreams = Literal["off", "auto", "vllm", "sglang"]


class _NotReadyError(Exception):
    """The engine answers that it cannot serve yet."""


def _trust(ca_file: str | None) -> ssl.SSLContext:
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"ca_file {ca_file}: {error}") from None


class EngineWorker(Worker):
    """Stands for an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) in the cluster.

    It asks the server for its models, health and load, and publishes its address: Routers send requests there
    themselves, over HTTP. Through this process pass only those of Routers on other hosts to a server on loopback. A
    server that is not there yet is waited for; one that stops answering leaves routing, and comes back when it answers
    again.

    Args:
        url: where the server listens, ``http://HOST:PORT`` or ``https://HOST:PORT``; every Router must be able to reach
            it under this address. That of a loopback address only Routers on this host dial; for others its requests
            are relayed here.
        engine: name of the engine shown to people; ``auto`` takes it from the server's metrics.
        api_key_file: file that holds the server's API key; the client's own key is passed on when not given.
        capacity: requests the server takes before Routers prefer others.
        probe_interval: seconds between two looks at the server; while it is away or not ready, 0.25 at most.
        probe_timeout: seconds it may take to answer; twice in a row longer means it is gone.
        normalize: ``on``: Routers bring what the server streams into the form that strict clients accept (a role, a
            finish reason of OpenAI's by itself, usage where it was asked for, numbered tool calls, one ``[DONE]``), at
            the price of fields of its own; ``off``: every byte passes; ``auto``: on unless the engine is known to keep
            that form (vLLM, SGLang).
        continue_streams: the engine by whose rules Routers let this server go on with another one's stream, and another
            one with its own, when a server is lost in the middle: ``vllm`` or ``sglang``; ``auto``: the one that the
            server's metrics name, if it is one of the two; ``off``: such a stream ends with an error.
        drain_timeout: seconds this worker, when it is stopped, stays until the server has no more requests, told by
            the server's metrics: for whoever stops the server next. 0: it leaves at once.
        ca_file: PEM file of the authorities that an https server is believed by; the system's when not given. Routers
            have their own (``engine_ca_file``).
        role: ``prefill`` or ``decode`` for a server that does one half of requests; Routers pair it with one of the
            other role. ``aggregated``: it does all.
        pd: how the halves meet: ``sequential`` (vLLM's kv_transfer_params) or ``concurrent`` (SGLang's bootstrap
            server).
        bootstrap_port: of a concurrent prefill server, the port of its bootstrap server.
        bootstrap_host: its host, where that is not the one of ``url``.
    """

    engine = "openai"

    def __init__(
        self,
        url: str,
        engine: str = "auto",
        api_key_file: str | None = None,
        capacity: int = 256,
        probe_interval: float = 1.0,
        probe_timeout: float = 1.0,
        drain_timeout: float = 0.0,
        normalize: Normalize = "off",
        continue_streams: ContinueStreams = "auto",
        ca_file: str | None = None,
        role: Literal["aggregated", "prefill", "decode"] = "aggregated",
        pd: Literal["", "sequential", "concurrent"] = "",
        bootstrap_port: int = 8998,
        bootstrap_host: str = "",
    ) -> None:
        if normalize not in ("off", "on", "auto"):
            raise ValueError(f"normalize {shown(normalize)} is none of off, on, auto")
        if continue_streams not in ("off", "auto", *_CONTINUE):
            raise ValueError(f"continue_streams {shown(continue_streams)} is none of off, auto, vllm, sglang")
        for name, value in (("probe_interval", probe_interval), ("probe_timeout", probe_timeout)):
            if not 0.01 <= value <= 60:
                raise ValueError(f"{name} must be 0.01..60 seconds, not {value}")
        if not engine or len(engine) > 40:
            raise ValueError(f"engine must be a short name, or auto, not {shown(engine)}")
        self._half = _half(role, pd, bootstrap_port, bootstrap_host)
        self.role, self.pd = role, pd
        self._url = Url.parse(url)
        self._tls = _trust(ca_file) if self._url.secure else None
        self._named_engine = "" if engine == "auto" else engine
        self._engine = self._named_engine or "openai"
        self._api_key_file = None if api_key_file is None else Path(api_key_file)
        self._authorization = self._read_key()
        super().__init__(str(self._url), capacity=capacity, drain_timeout=drain_timeout)
        self._normalize = normalize
        self._continue = continue_streams
        # What tells this server's answers from those of other versions and weights, once it is known.
        self._identity: str | None = None
        self._interval = probe_interval
        self._timeout = probe_timeout
        self._models: tuple[str, ...] = ()
        self._load_now = EngineLoad()
        # When its metrics were first as they are, and when they were last looked at.
        self._moved = self._looked = 0.0
        # Endpoints that not every server has; asked again after each absence of the server, which may be another then.
        self._absent: set[str] = set()
        self._late = 0
        self._probing: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._relays: set[asyncio.Task[Any]] = set()
        # When the first question was asked that the server has not answered.
        self._unanswered: float | None = None
        self._detail = f"{self._url}: not asked yet"

    # ---- the actor ----------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, str]:
        """What the registry shows: as for every worker, and the address that Routers dial."""
        own = {name: value for name, value in super().metadata().items() if name != "apis"}
        return {**own, **self._half, **self._learnt(), "url": str(self._url), "relay": "1"}

    def _learnt(self) -> dict[str, str]:
        """The part of the metadata that the server's answers may change."""
        learnt = {"model": self._shown_model(), "engine": self._engine}
        if self._normalize != "off":
            normalizes = self._normalize == "on" or self._engine not in _WELL_FORMED
            learnt["normalize"] = self._engine if normalizes else ""
        if self._continue != "off":
            # Empty rather than absent: what was published before is not to stand.
            continues = self._continues()
            learnt |= {"continue": continues, "fingerprint": (self._identity or "") if continues else ""}
        return learnt

    def _continues(self) -> str:
        """The engine by whose rules streams go on; empty if they do not, or not yet."""
        named = self._engine if self._continue == "auto" else self._continue
        return named if named in _CONTINUE and self._identity is not None else ""

    def apis(self) -> tuple[str, ...]:
        """What the server answers is the server's to say."""
        return ()

    def _shown_model(self) -> str:
        # Metadata is 1 KB in all; load reports have every name whole.
        model = self._models[0] if self._models else ""
        return model if len(model.encode()) <= 256 else ""

    def on_start(self, actor_id: Any) -> None:
        """Registers at once and starts to look at the server."""
        self._loop = asyncio.get_running_loop()
        self._probing = self._loop.create_task(self._probe_for_ever(), name=f"probe {self._url}")
        self._beating = self._loop.create_task(self._beat_for_ever(), name=f"beat {self._url}")

    async def on_stop(self) -> None:
        """Leaves routing. Requests that Routers have on the server go on: they do not depend on this process."""
        for task in (self._probing, self._beating):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._relays:
            self._set_state("draining")
            _, late = await asyncio.wait(set(self._relays), timeout=max(self.drain_timeout, _RELAY_DRAIN))
            for task in late:
                task.cancel()
        if self.drain_timeout:
            # Routers choose it no more; what they have there still runs.
            self._set_state("draining")
            await self._idle_server()
        await super().on_stop()

    async def _idle_server(self) -> None:
        """Waits until the server has no more requests, or does not say, or `drain_timeout` is over."""
        idle = 0
        try:
            async with asyncio.timeout(self.drain_timeout):
                while idle < _IDLE_LOOKS:
                    await asyncio.sleep(_IDLE_LOOK)
                    try:
                        status, body = await self._get("/metrics")
                    except TimeoutError:
                        # Busy, not idle.
                        continue
                    load = engine_load(body.decode("utf-8", "replace")) if status == 200 else EngineLoad()
                    if not load.engine:
                        return
                    idle = idle + 1 if load.running + load.waiting == 0 else 0
        except TimeoutError:
            _log.warning("%s: it still has requests after %g s", self._url, self.drain_timeout)
        except (OSError, ProbeError) as error:
            _log.info("%s: it does not say whether it still has requests: %s", self._url, error)

    # ---- the worker protocol ------------------------------------------------------------------------------------

    def load_report(self) -> LoadReport:
        """How the server is doing, as far as it says."""
        return LoadReport(
            state=self._state,
            running=self._load_now.running,
            waiting=self._load_now.waiting,
            capacity=self.capacity,
            kv_usage=self._load_now.kv_usage,
            progress_age_ms=int((self._looked - self._moved) * 1000),
            models=list(self._models),
            detail=self._detail,
            max_model_len=self.max_model_len,
            answer_age_ms=0 if self._unanswered is None else int((time.monotonic() - self._unanswered) * 1000),
        )

    async def on_protocol_call(self, call: InboundCall) -> None:
        """As every worker; ``describe`` also tells Routers the server's key, and ``relay`` is for those elsewhere."""
        try:
            request = WorkerRequest.decode(call.head, call.buffers)
            kind = request.kind
        except ValueError:
            kind = None
        if kind == "describe":
            call.reply(self.load_report().describe(self._engine, "", self._authorization))
        elif kind == "relay":
            await self._relay(call, request.body)
        else:
            await super().on_protocol_call(call)

    async def _relay(self, call: InboundCall, request: bytes) -> None:
        """One connection to the server, for a Router that cannot reach it."""
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            await relay(call, request, self._url, self._tls)
        finally:
            self._relays.discard(task)

    def _work(self, call: InboundCall, wire: WorkerRequest) -> NoReturn:
        raise self._elsewhere()

    def _elsewhere(self) -> RequestError:
        return RequestError(
            503,
            f"requests for this engine go to {self._url} over HTTP; this Router does not know how: use the same "
            "version of Pulsing on all machines",
            code="wrong_version",
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Routers do not ask here."""
        raise self._elsewhere()
        yield Delta()

    # ---- looking at the server ----------------------------------------------------------------------------------

    def _read_key(self) -> str:
        """The header that carries the key.

        Raises:
            ValueError: the file does not hold one.
        """
        if self._api_key_file is None:
            return ""
        try:
            key = read_text(self._api_key_file, _MOST_KEY).strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"api_key_file {self._api_key_file}: {error}") from None
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError(f"api_key_file {self._api_key_file}: expected one line with the key")
        return f"Bearer {key}"

    async def _probe_for_ever(self) -> None:
        while True:
            again_at_once = False
            try:
                await self._probe()
            except TimeoutError:
                self._late += 1
                again_at_once = self._late < _LATE_ANSWERS
                if not again_at_once:
                    self._gone(f"no answer within {self._timeout:g} s, {_LATE_ANSWERS} times in a row")
            except _NotReadyError as error:
                self._change("loading", f"{self._url}: {error}")
            except ConnectionError as error:
                self._gone(f"cannot connect: {error}")
            except (ProbeError, ValueError) as error:
                self._gone(str(error))
            except Exception as error:  # noqa: BLE001 - the loop is what brings a server back: nothing may end it
                _log.exception("%s: looking at it failed", self._url)
                self._gone(f"looking at it failed: {type(error).__name__}: {error}")
            else:
                self._late = 0
                self._loaded = True
                self._change("ready", "")
            # Whoever is waited for is wanted: a server that is back is to be used within a second.
            interval = self._interval if self._state == "ready" else min(self._interval, _AWAY_LOOK)
            await asyncio.sleep(0 if again_at_once else interval)

    async def _beat_for_ever(self) -> None:
        """Asks the least there is, often: a server that hangs is to be seen before its clients see it."""
        while True:
            await asyncio.sleep(_BEAT)
            if self._state != "ready":
                self._unanswered = None
                continue
            if self._unanswered is None:
                self._unanswered = time.monotonic()
            try:
                await self._get("/v1/models" if "/health" in self._absent else "/health")
            except TimeoutError:
                continue
            except (OSError, ProbeError, ValueError):
                # Some answer it is; what it means is for the probe to say.
                pass
            self._unanswered = None

    async def _probe(self) -> None:
        self._authorization = self._read_key()
        listed, healthy = await asyncio.gather(self._get("/v1/models"), self._get("/health"), return_exceptions=True)
        if isinstance(listed, BaseException):
            raise listed
        if isinstance(healthy, BaseException):
            raise healthy
        (status, body), (code, text) = listed, healthy
        if status in (401, 403):
            raise ProbeError(f"it wants an API key ({status}): put it into a file and start with --api_key_file FILE")
        if code == 503:
            raise _NotReadyError(f"GET /health is answered 503: {_said(text)}")
        if status == 503:
            raise _NotReadyError(f"GET /v1/models is answered 503: {_said(body)}")
        if status != 200:
            raise ProbeError(f"GET /v1/models is answered {status}: {_said(body)}")
        if code >= 500:
            raise ProbeError(f"GET /health is answered {code}: {_said(text)}")
        models = Models.parse(body)
        if not models.names:
            raise _NotReadyError("it lists no model yet")
        await self._read_load()
        self._learn(models, await self._identify(models))

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body; of an endpoint that the server does not have, as if it had answered with nothing."""
        if path in self._absent:
            return 200, b""
        headers = {"authorization": self._authorization} if self._authorization else {}
        status, body = await get(self._url, path, headers, self._timeout, self._tls)
        if path != "/v1/models" and status in _ABSENT:
            self._absent.add(path)
            return 200, b""
        return status, body

    async def _read_load(self) -> None:
        before = self._load_now
        try:
            status, body = await self._get("/metrics")
        except (OSError, ProbeError):
            # It serves all the same; old numbers would mislead.
            self._load_now = EngineLoad()
        else:
            self._load_now = engine_load(body.decode("utf-8", "replace")) if status == 200 else EngineLoad()
        self._looked = time.monotonic()
        signs = self._load_now.signs
        # Also where it says that it runs nothing: a Router knows what it has handed to it, and when.
        if not signs or signs != before.signs:
            self._moved = self._looked

    async def _identify(self, models: Models) -> str | None:
        """A short name for the version and the weights of a server whose streams may go on elsewhere."""
        engine = self._named_engine or engine_of(self._load_now, models.owner)
        path = _CONTINUE.get(engine if self._continue == "auto" else self._continue)
        if path is None or self._identity is not None:
            return self._identity
        status, body = await self._get(path)
        version = version_in(body) if status == 200 else ""
        return fingerprint_of(engine, version, models.root, models.max_model_len)

    def _learn(self, models: Models, identity: str | None) -> None:
        before = self._models, self._learnt()
        self._models = models.names
        self.max_model_len = models.max_model_len
        self.model = models.names[0]
        self._engine = self._named_engine or engine_of(self._load_now, models.owner)
        self._identity = identity
        if (self._models, self._learnt()) != before:
            self.set_metadata(**self._learnt())
        self._load_changed()

    def _gone(self, why: str) -> None:
        self._absent.clear()
        # What comes back may be another version.
        self._identity = None
        self._load_now = EngineLoad()
        # Before its first answer it is being waited for.
        self._change("failed" if self._loaded else "loading", f"{self._url}: {why}")

    def _change(self, state: str, detail: str) -> None:
        detail = detail[:500]
        if (state, detail) == (self._state, self._detail):
            return
        if state != self._state:
            told = detail or f"{self._url} serves {', '.join(self._models[:4])}"
            _log.log(logging.WARNING if state == "failed" else logging.INFO, "%s: %s", state, told)
        self._set_state(state, detail)


def _half(role: str, pd: str, bootstrap_port: int, bootstrap_host: str) -> dict[str, str]:
    """What Routers must know of a server that does one half.

    Raises:
        ValueError: An argument makes no sense.
    """
    if role not in _ROLES:
        raise ValueError(f"role must be one of {', '.join(_ROLES)}, not {shown(role)}")
    if role == "aggregated":
        if pd:
            raise ValueError(f"pd={shown(pd)} is for a server with role=prefill or role=decode; this one does all")
        return {}
    if pd not in _PAIRINGS:
        raise ValueError(f"role={role} needs pd=sequential (vLLM) or pd=concurrent (SGLang), not {shown(pd)}")
    if not 1 <= bootstrap_port <= 65535:
        raise ValueError(f"bootstrap_port must be a port from 1 to 65535, not {bootstrap_port}")
    if role == "decode" or pd == "sequential":
        return {}
    return {"bootstrap_port": str(bootstrap_port)} | ({"bootstrap_host": bootstrap_host} if bootstrap_host else {})


def _said(body: bytes) -> str:
    return shown(body[:200].decode("utf-8", "replace").strip())
