"""The base of every engine behind a Router.

A new engine is one class with one async generator::

    class Echo(Worker):
        async def generate(self, request):
            for word in request.last_text.split():
                yield Delta(word + " ")
            yield Delta(finish_reason="stop")

Everything else is here: the worker protocol, states, load reports, the bound on concurrent requests, errors,
cancellation and draining. ``docs/guides/workers.md`` tells the whole story.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pulsing._core import Delta, LoadReport, Usage, WorkerRequest, encode_deltas, prompt_blocks
from pulsing.core import Actor, Message
from pulsing.core._actor import cell_of
from pulsing.core._shown import shown
from pulsing.serving._blocks import HeldBlocks, TellsBlocks
from pulsing.serving._deadlines import Deadlines
from pulsing.serving._errors import RequestError
from pulsing.serving._questions import (
    Embeddings,
    EmbedRequest,
    TokenizeRequest,
    Tokens,
    answered,
)
from pulsing.serving._reports import LoadReports
from pulsing.serving._request import GenerateRequest, unsupported
from pulsing.serving._slots import Slots
from pulsing.serving._text import StopFilter
from pulsing.serving._threads import in_daemon_thread
from pulsing.serving._tracing import Spans

if TYPE_CHECKING:
    from pulsing.core._inbound import InboundCall
    from pulsing.serving.mistralrs import MistralRsWorker
    from pulsing.serving.transformers import TransformersWorker

__all__ = [
    "Delta",
    "EmbedRequest",
    "Embeddings",
    "GenerateRequest",
    "MistralRsWorker",
    "RequestError",
    "StopFilter",
    "TokenizeRequest",
    "Tokens",
    "TransformersWorker",
    "Usage",
    "Worker",
]

_log = logging.getLogger("pulsing.serving")

# Of an answer that nobody sees before it is whole, so many seconds and deltas are kept back to be sent as one message.
# A Router learns from the first one how long its worker takes to begin: what is kept back for longer would mislead it.
_GATHER = 0.025
_GATHERED = 256
# The runtime gives an actor's on_stop 60 s; closing the engine needs some of it.
_DRAIN_LIMIT = 50


def __getattr__(name: str) -> Any:
    # The engines' modules import this one; and a Worker of one's own should not import theirs.
    if name == "TransformersWorker":
        from pulsing.serving.transformers import TransformersWorker

        return TransformersWorker
    if name == "MistralRsWorker":
        from pulsing.serving.mistralrs import MistralRsWorker

        return MistralRsWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Worker(TellsBlocks, Actor):
    """An engine as an actor: override :meth:`generate`, and where needed :meth:`load` and :meth:`close`.

    Args:
        model_name: the name Routers list and accept for this worker's model.
        capacity: requests served at once; more wait in order inside the worker.
        max_waiting: requests that may wait; beyond it a request is answered 503 at once.
        preload: load at once, in the background; ``False``: be ready at once and load at the first request.
        drain_timeout: seconds, up to 50, that running requests get to finish when the worker stops.
    """

    __pulsing_protocols__: ClassVar[set[int]] = {3}

    engine: ClassVar[str] = "custom"
    """Name of the engine, published in metadata."""
    supports: ClassVar[frozenset[str]] = frozenset({"max_tokens", "temperature", "top_p", "seed", "stop"})
    """Request fields the engine honours (see ``GenerateRequest.needs``); a request that asks for another one is
    answered 400. The default is what nearly every client sends."""
    role: str = "aggregated"
    """``prefill`` or ``decode`` for a worker that does one half of requests; Routers pair it with one of the other role
    and the same ``pd``."""
    pd: str = ""
    """How the halves meet. ``sequential``: the prefill worker ends with ``Delta(handoff=...)``, which the decode worker
    finds in ``GenerateRequest.handoff``. ``concurrent``: both get the request at once, and in ``handoff`` the JSON
    object bootstrap_host, bootstrap_port, bootstrap_room: where they meet."""

    continues: ClassVar[Literal["", "greedy", "any"]] = ""
    """Whether another worker's answer can be gone on with from ``request.continue_tokens``, after that worker was lost
    in the middle of it: ``greedy`` where the best token is taken each time, ``any`` also where tokens are drawn, each
    by seed and position. Every text delta must then have its ``token_ids``, and ``fingerprint`` must be set."""

    def __init__(
        self,
        model_name: str | None = None,
        *,
        capacity: int = 64,
        max_waiting: int = 256,
        preload: bool = True,
        drain_timeout: float = 30.0,
    ) -> None:
        generate = type(self).generate
        embeds = type(self).embed is not Worker.embed
        if (generate is Worker.generate and not embeds) or inspect.iscoroutinefunction(generate):
            raise TypeError(
                f"{type(self).__qualname__} needs `async def generate(self, request)` with a `yield` in it: "
                "an async generator of pulsing.serving.Delta"
            )
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 request, not {capacity}")
        if max_waiting < 0:
            raise ValueError(f"max_waiting must be 0 or more requests, not {max_waiting}")
        if not 0 <= drain_timeout <= _DRAIN_LIMIT:
            raise ValueError(f"drain_timeout must be 0..{_DRAIN_LIMIT} seconds, not {drain_timeout}")
        self.model = model_name or type(self).__name__
        self.capacity = capacity
        self.max_waiting = max_waiting
        self.preload = preload
        self.drain_timeout = drain_timeout
        self.max_model_len = 0
        """Longest context in tokens, set by ``load``; 0 = unknown."""
        self.fingerprint = ""
        """What workers have in common that answer alike (weights, precision, template, version), up to 64 characters,
        set by ``load``; a Router lets one go on with what another has begun only where it is the same. Empty: none."""
        self._state = "loading" if preload else "ready"
        self._detail = ""
        self._loaded = False
        self._load_task: asyncio.Task[None] | None = None
        self._slots = Slots(capacity)
        self._deadlines = Deadlines()
        self._answers: frozenset[str] | None = None
        self._running = 0
        self._waiting = 0
        self._processed = 0
        self._last_token = 0.0
        # Running requests whose client does not read: the engine waits for it, and not it for the engine.
        self._held = 0
        self._reports = LoadReports()
        self._blocks = HeldBlocks()
        self._requests: set[asyncio.Task[Any]] = set()
        self._spans: Spans | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- what an engine overrides -------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer, piece by piece. The one method an engine must have; an async generator.

        Each :class:`Delta` holds new text of one choice. The last one of each choice carries ``finish_reason``
        (``"stop"`` or ``"length"``; a choice that has none when the generator returns gets ``"stop"``), the last one
        of all carries ``usage``. When the client goes away the generator is closed: stop the engine in ``finally``.

        Raises:
            RequestError: what the client gets as an HTTP error. Any other exception becomes a 500.
        """
        raise TypeError(f"{type(self).__qualname__} has no generate()")

    def embed(self, request: EmbedRequest) -> Any:
        """Return a vector for each of ``request.inputs``: :class:`Embeddings`, or the vectors alone.

        Plain or ``async def``; on the loop, so what computes for long belongs on a thread (``asyncio.to_thread``). A
        worker may have it beside ``generate`` or alone.

        Raises:
            RequestError: what the client gets as an HTTP error. Any other exception becomes a 500.
        """
        raise TypeError(f"{type(self).__qualname__} has no embed()")

    def tokenize(self, request: TokenizeRequest) -> Any:
        """Return the :class:`Tokens` of a text or conversation, or their ids alone. Optional; plain or ``async def``.

        Raises:
            RequestError: what the client gets as an HTTP error.
        """
        raise TypeError(f"{type(self).__qualname__} has no tokenize()")

    def detokenize(self, tokens: list[int]) -> Any:
        """Return the text of token ids. Optional; plain or ``async def``.

        Raises:
            RequestError: what the client gets as an HTTP error.
        """
        raise TypeError(f"{type(self).__qualname__} has no detokenize()")

    def load(self) -> Any:
        """Make the engine ready. ``async def`` runs on the loop; a plain method runs on a thread of its own.

        It may set ``self.max_model_len``. What it raises makes the worker's state ``failed``, with the reason.
        """

    def close(self) -> Any:
        """Let the engine go, after the last request. Plain or ``async def``; runs on the loop."""

    def apis(self) -> tuple[str, ...]:
        """What this worker answers, published for Routers; told from which methods its class has."""
        cls = type(self)
        has = {
            "chat.completions": cls.generate is not Worker.generate,
            "completions": cls.generate is not Worker.generate,
            "embeddings": cls.embed is not Worker.embed,
            "tokenize": cls.tokenize is not Worker.tokenize,
            "detokenize": cls.detokenize is not Worker.detokenize,
        }
        return tuple(api for api, it_has in has.items() if it_has)

    # ---- states -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``draining`` or ``failed``."""
        return self._state

    def _set_state(self, state: str, detail: str = "") -> None:
        self._state, self._detail = state, detail
        self.set_metadata(state=state, **self._likeness())
        self._load_changed()

    def set_detail(self, detail: str) -> None:
        """Say how far loading is; shown in load reports. Any thread, so that ``load`` can call it."""
        self._detail = detail
        if self._loop is not None:
            # The loop may be closed already where a load outlives its worker.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._load_changed)

    def metadata(self) -> dict[str, str]:
        """What the registry shows of this worker."""
        if not hasattr(self, "_requests"):
            raise TypeError(
                f"{type(self).__qualname__}.__init__ must call super().__init__(...) of pulsing.serving.Worker"
            )
        return {
            "kind": "worker",
            "protocol": "1..1",
            "model": self.model,
            "role": self.role,
            "state": self._state,
            "engine": self.engine,
            "apis": ",".join(self.apis()),
            **self._likeness(),
            **({"pd": self.pd} if self.pd else {}),
        }

    def _likeness(self) -> dict[str, str]:
        return {"continue": self.continues, "fingerprint": self.fingerprint[:64]} if self.continues else {}

    def on_start(self, actor_id: Any) -> None:
        """Registers at once; loading goes on in the background."""
        self._loop = asyncio.get_running_loop()
        if self.preload:
            self._start_loading()

    async def on_stop(self) -> None:
        """Takes no new request, lets the running ones finish up to ``drain_timeout`` seconds, and closes the engine."""
        if not hasattr(self, "_requests"):
            return  # it never started, see metadata
        self._set_state("draining")
        if self._load_task is not None and not self._load_task.done():
            self._load_task.cancel()
        if self._requests:
            _, late = await asyncio.wait(set(self._requests), timeout=self.drain_timeout)
            for task in late:
                task.cancel()
            if late:
                _log.warning(
                    "%s: %d requests did not finish within %g s and were cancelled",
                    self.model,
                    len(late),
                    self.drain_timeout,
                )
                await asyncio.wait(late, timeout=1)
        await self._reports.end()
        closing = self.close()
        if inspect.isawaitable(closing):
            await closing

    def _start_loading(self) -> asyncio.Task[None]:
        if self._load_task is None:
            self._load_task = asyncio.get_running_loop().create_task(self._load(), name=f"load {self.model}")
            # Its outcome is the state; nobody has to ask the task for it.
            self._load_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._load_task

    async def _load(self) -> None:
        begun = time.monotonic()
        try:
            if inspect.iscoroutinefunction(self.load):
                await self.load()
            elif type(self).load is not Worker.load:
                loading = await in_daemon_thread(self.load, f"load {self.model}")
                if inspect.isawaitable(loading):
                    await loading
        except Exception as error:
            reason = str(error) or type(error).__name__
            _log.exception("%s: loading failed", self.model)
            if self._state != "draining":
                self._set_state("failed", f"{type(error).__name__}: {reason}"[:500])
            raise
        self._loaded = True
        # A request that came first has waited for the load, not for its tokens.
        self.progressed()
        _log.info("%s: ready after %.1f s", self.model, time.monotonic() - begun)
        if self._state != "draining":
            self._set_state("ready")

    # ---- load ---------------------------------------------------------------------------------------------------

    def _load_changed(self) -> None:
        self._reports.changed()

    def progressed(self) -> None:
        """Say that the engine gets on with its requests, where it works on without a delta: between two parts of a long
        prompt. Any thread.

        Routers take requests back from a worker that has some and makes no progress for 10 s or, where it has been
        seen to take longer, three times what it took.
        """
        self._last_token = time.monotonic()

    def load_report(self) -> LoadReport:
        """How this worker is doing now."""
        idle = self._running <= self._held
        return LoadReport(
            state=self._state,
            running=self._running,
            waiting=self._waiting,
            capacity=self.capacity,
            kv_usage=self.kv_usage(),
            processed=self._processed,
            progress_age_ms=0 if idle or not self._loaded else int((time.monotonic() - self._last_token) * 1000),
            models=[self.model],
            detail=self._detail,
            max_model_len=self.max_model_len,
        )

    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0..1; 0 = unknown. For engines that know."""
        return 0.0

    def engine_version(self) -> str:
        """Version of the engine, for ``describe``; empty = unknown."""
        return ""

    # ---- plain actor messages -----------------------------------------------------------------------------------

    async def receive(self, msg: Any) -> Any:
        """Answers ``HealthCheck`` and ``GetLoad``, for people and tools that speak plain messages."""
        kind = msg.msg_type if isinstance(msg, Message) else None
        if kind == "HealthCheck":
            healthy = {"ready": "healthy", "loading": "loading", "draining": "draining"}.get(self._state, "failed")
            return Message.from_json("Ok", {"status": healthy, "is_loaded": self._loaded, "detail": self._detail})
        if kind == "GetLoad":
            return Message.from_json(
                "LoadInfo",
                {
                    "state": self._state,
                    "load": self._running + self._waiting,
                    "running": self._running,
                    "waiting": self._waiting,
                    "capacity": self.capacity,
                    "processed": self._processed,
                },
            )
        asked = kind if kind is not None else type(msg).__name__
        return Message.from_json("Error", {"error": f"a worker answers HealthCheck and GetLoad, not {shown(asked)}"})

    # ---- the worker protocol ------------------------------------------------------------------------------------

    async def on_protocol_call(self, call: InboundCall) -> None:
        """One call of the worker protocol (``proto/worker.proto``)."""
        try:
            request = WorkerRequest.decode(call.head, call.buffers)
        except ValueError as error:
            RequestError(400, f"not a request of worker protocol 1: {error}").fail(call)
            return
        kind = request.kind
        if kind in {"generate", "question"}:
            task = _current_task()
            self._requests.add(task)
            began, wrong, ended = time.time(), None, "cancelled"
            try:
                wrong = await self._serve(call, request, task)
                ended = "complete" if wrong is None else "failed"
            finally:
                self._requests.discard(task)
                spans = self._traced()
                if spans.recording:
                    spans.record(request, began, self.model, self.engine, wrong, ended=ended)
        elif kind == "subscribe_load":
            # Nobody is routed to a worker that decodes by what it has read.
            tells = request.blocks and self.reports_blocks and self.role != "decode"
            await self._reports.send(call, self.load_report, self._blocks.reader() if tells else None)
        elif kind == "describe":
            call.reply(self.load_report().describe(self.engine, self.engine_version()))
        else:
            RequestError(400, f"worker protocol 1 has no request {shown(kind)}").fail(call)

    def _traced(self) -> Spans:
        if self._spans is None:
            self._spans = Spans(cell_of(self).system, "pulsing-worker")
        return self._spans

    async def _serve(self, call: InboundCall, wire: WorkerRequest, task: asyncio.Task[Any]) -> str | None:
        """Answers one request, in `task`. Returns what went wrong, if something did."""
        failure: RequestError | None = None
        try:
            work = self._work(call, wire)
            with self._deadlines.within(wire.deadline, task):
                # A place that is free costs no coroutine.
                if not self._slots.take():
                    await self._place()
                self._begin()
                try:
                    if not self._loaded:
                        await self._loaded_first()
                    answer = await work()
                    # Also an answer without pieces is progress.
                    self._last_token = time.monotonic()
                    self._processed += 1
                finally:
                    self._running -= 1
                    self._slots.release()
                    self._reports.changed()
        except RequestError as error:
            failure = error
        except TimeoutError:
            failure = RequestError(
                504, f"the request's deadline of {wire.deadline} s has passed", code="deadline_exceeded"
            )
        except Exception as error:  # noqa: BLE001 - the client's 500, whatever an engine raises
            if call.cancelled:
                _log.debug("%s: the client of request %s has gone", self.model, wire.request_id, exc_info=error)
                return "the client has gone"
            _log.exception("%s: request %s failed", self.model, wire.request_id)
            failure = RequestError(
                500, f"the engine failed: {type(error).__name__}: {str(error)[:500]}", code="engine_error"
            )
        else:
            if answer is None:
                call.end()
            else:
                call.reply(answer)
        if failure is None:
            return None
        failure.fail(call)
        # The text may hold parts of what was asked.
        return f"{failure.status} {failure.code or ''}".strip()

    def _work(self, call: InboundCall, wire: WorkerRequest) -> Callable[[], Awaitable[bytes | None]]:
        """The request, checked: what gives its answer, or streams it and gives None.

        Raises:
            RequestError: it cannot be served.
        """
        if self._answers is None:
            self._answers = frozenset(self.apis())
        if wire.api not in self._answers:
            raise RequestError(
                400,
                f"the {self.engine} engine does not answer {shown(wire.api)}; it answers {', '.join(self.apis())}",
                "model",
                "unsupported_endpoint",
            )
        if wire.kind == "question":
            self._check_state()
            return lambda: answered(self, wire)
        surroundings = wire.surroundings()
        if self.reports_blocks:
            blocks, surroundings["prompt_bytes"] = prompt_blocks(wire.api, wire.body)
            surroundings["blocks"] = tuple(blocks)
        request = GenerateRequest.within(surroundings, wire.body)
        self._check(request)
        gathered: list[Delta] | None = [] if wire.whole else None
        return lambda: self._stream(call, request, gathered)

    def _check(self, request: GenerateRequest) -> None:
        if not request.needs <= self.supports:
            raise unsupported(self.engine, request.needs - self.supports)
        if (request.continue_text or request.continue_tokens) and not self.continues:
            raise RequestError(
                400, f"the {self.engine} engine cannot go on with another worker's answer", code="cannot_continue"
            )
        self._check_state()

    def _check_state(self) -> None:
        if self._state == "draining":
            raise RequestError(503, f"the worker of {self.model} is shutting down", code="worker_draining")
        if self._state == "loading":
            raise RequestError(
                503, f"{self.model} is still loading: {self._detail or 'try again soon'}", code="worker_loading"
            )
        if self._state == "failed":
            raise RequestError(503, f"{self.model} could not be loaded: {self._detail}", code="worker_failed")

    async def _place(self) -> None:
        """Waits for a slot.

        Raises:
            RequestError: Too many wait already.
        """
        if self._waiting >= self.max_waiting:
            raise RequestError(
                503,
                f"{self.model} is full: {self._running} requests run and {self._waiting} wait",
                code="worker_full",
            )
        self._waiting += 1
        self._load_changed()
        try:
            await self._slots.wait()
        finally:
            self._waiting -= 1

    def _begin(self) -> None:
        """One more request has a slot."""
        if self._running <= self._held:
            self.progressed()
        self._running += 1
        self._reports.changed()

    async def _loaded_first(self) -> None:
        try:
            # Shielded: the first client going away must not stop the load the second one waits for.
            await asyncio.shield(self._start_loading())
        except Exception as error:
            raise RequestError(
                503, f"{self.model} could not be loaded: {self._detail}", code="worker_failed"
            ) from error

    async def _stream(self, call: InboundCall, request: GenerateRequest, gathered: list[Delta] | None) -> bytes | None:
        """Streams the answer; one that comes soon is given back instead, where there is something to gather it in."""
        open_choices = set(range(request.choices))
        # `generate` is annotated wider than it is, so that engines may write either; a generator is what they write.
        generated = cast("AsyncGenerator[Delta, None]", self.generate(request))
        until = 0.0
        try:
            async for delta in generated:
                if delta.finish_reason is not None:
                    open_choices.discard(delta.index)
                self._last_token = now = time.monotonic()
                if gathered is None:
                    item = encode_deltas([delta])
                    if not call.try_send(item):
                        await self._send(call, item)
                    continue
                gathered.append(delta)
                if len(gathered) == 1:
                    until = now + _GATHER
                elif now > until or len(gathered) >= _GATHERED:
                    await self._send(call, encode_deltas(gathered))
                    gathered = None
        finally:
            await generated.aclose()
        ends = [Delta(index=index, finish_reason="stop") for index in sorted(open_choices)]
        if gathered is not None:
            return encode_deltas([*gathered, *ends])
        if ends:
            await self._send(call, encode_deltas(ends))
        return None

    async def _send(self, call: InboundCall, item: bytes) -> None:
        """Sends one stream item, waiting for credit."""
        self._held += 1
        try:
            await call.send(item)
        finally:
            self._held -= 1
            self._last_token = time.monotonic()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None  # protocol calls always run in a task
    return task
