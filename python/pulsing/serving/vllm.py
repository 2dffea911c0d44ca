"""A worker around vLLM: any model vLLM serves, with continuous batching, on whatever vLLM runs on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pulsing._core import LoadReport
from pulsing.serving._errors import RequestError
from pulsing.serving._fingerprint import fingerprint_of
from pulsing.serving._model_files import ModelSource
from pulsing.serving._request import GenerateRequest
from pulsing.serving._threads import in_daemon_thread
from pulsing.serving._token_blocks import TokenBlocks
from pulsing.serving._vllm_args import check, check_half, engine_arguments
from pulsing.serving.worker import Delta, TokenizeRequest, Tokens, Worker

if TYPE_CHECKING:
    from pulsing.serving._vllm_engine import Engine, EngineStart

__all__ = ["VllmWorker"]

_log = logging.getLogger("pulsing.serving")

# How often an idle worker looks whether its engine still lives; a running request learns it at once.
_LOOK_EVERY = 0.5

Role = Literal["aggregated", "prefill", "decode"]


class VllmWorker(Worker):
    """Serves a model with vLLM's engine, which runs in processes of its own and batches the requests that run at once.

    Every vLLM engine argument is taken by its own name: ``gpu_memory_utilization``, ``tensor_parallel_size``,
    ``max_model_len``, ``quantization`` and so on, as ``vllm serve`` takes them. trust_remote_code is off unless given.

    Args:
        model: a hub id or a local directory.
        role: ``prefill`` or ``decode`` for a worker that does one half of requests; Routers pair it with one of the
            other role, and vLLM's KV connector (``kv_transfer_config``) moves what has been read from one to the other.
            ``aggregated``: it does all.
        max_new_tokens: tokens a chat answer may have when the request sets no limit.
        capacity: requests handed to the engine at once; it runs max_num_seqs of them and queues the others.
        preload: load at once, in the background; ``False``: at the first request.
        chat_template: Jinja text, or a file that holds it; the model's own when not given.
        served_model_name: the name clients use; the hub id, or the last part of the path, when not given.
        tool_call_parser: name of the vLLM parser of this model's tool calls (``hermes``, ``llama3_json``, ...); without
            it, requests with tools are refused.
        max_waiting: requests that may wait inside the worker, beyond those handed to the engine.
        drain_timeout: seconds that running requests get at shutdown.
        engine_args: vLLM's engine arguments.
    """

    engine = "vllm"
    continues = "greedy"
    reports_blocks = True
    supports = frozenset(
        {
            "bad_words",
            "continue_final_message",
            "frequency_penalty",
            "ignore_eos",
            "logit_bias",
            "logprobs",
            "max_tokens",
            "min_p",
            "min_tokens",
            "n",
            "presence_penalty",
            "prompt",
            "prompt_tokens",
            "repetition_penalty",
            "response_format",
            "seed",
            "stop",
            "stop_token_ids",
            "structured_outputs",
            "temperature",
            "tools",
            "top_k",
            "top_p",
        }
    )

    def __init__(
        self,
        model: str,
        role: Role = "aggregated",
        max_new_tokens: int = 512,
        capacity: int = 1024,
        preload: bool = True,
        chat_template: str | None = None,
        served_model_name: str | None = None,
        tool_call_parser: str | None = None,
        max_waiting: int = 256,
        drain_timeout: float = 30.0,
        **engine_args: Any,
    ) -> None:
        if role not in ("aggregated", "prefill", "decode"):
            raise ValueError(f"role {role!r} is none of aggregated, prefill, decode")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        own = [name for name in VllmWorker.__init__.__annotations__ if name not in ("return", "engine_args")]
        check(engine_args, own)
        if role != "aggregated":
            check_half(role, engine_args.get("kv_transfer_config"))
        self.role, self.pd = role, "" if role == "aggregated" else "sequential"
        # s3://... and the like are vLLM's to read; a path is looked at now, to be told of a typing error at once.
        name = model.rstrip("/").rpartition("/")[2] if "://" in model else ModelSource.of(model).name
        super().__init__(
            served_model_name or name,
            capacity=capacity,
            max_waiting=max_waiting,
            preload=preload,
            drain_timeout=drain_timeout,
        )
        self._model = model
        self._max_new_tokens = max_new_tokens
        self._chat_template = chat_template
        self._tool_call_parser = tool_call_parser
        self._engine_args = engine_args
        self._start: EngineStart | None = None
        self._engine: Engine | None = None
        self._closed = False
        self._watch: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._tokens = TokenBlocks(self.blocks_stored, self.blocks_dropped, self.blocks_cleared)

    @classmethod
    def __pulsing_keywords__(cls) -> Mapping[str, Any]:
        """vLLM's engine arguments, for the command line."""
        return engine_arguments()

    def engine_version(self) -> str:
        """Version of vLLM, once it is loaded."""
        return "" if self._engine is None else self._engine.version

    # ---- loading ------------------------------------------------------------------------------------------------

    def load(self) -> Awaitable[None]:
        """Import vLLM and start its engine; on a thread of its own."""
        self.set_detail("importing vLLM")
        try:
            from pulsing.serving._vllm_engine import EngineStart
        except ImportError as error:
            raise ImportError(
                f"the installed vLLM does not fit this version of Pulsing, or lacks a package of its own: {error}; "
                "pip install -U 'pulsing[vllm]'"
            ) from error
        self._start = EngineStart(
            self._model,
            self.model,
            {"shutdown_timeout": int(self.drain_timeout), **self._engine_args},
            self._chat_template,
            self._tool_call_parser,
            self._load_changed,
            self.progressed,
        )
        if self._closed:
            self._start.call_off()
        self.set_detail("starting vLLM's engine and loading the weights")
        engine = self._start.run()
        self.max_model_len = engine.max_model_len
        self.fingerprint = engine.fingerprint and fingerprint_of(engine.fingerprint, self._max_new_tokens)
        self._engine = engine
        return self._begin_watch(engine)

    async def _begin_watch(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watch_over(engine), name=f"watch {self.model}")
        if engine.event_endpoints:
            from pulsing.serving._vllm_events import follow

            listening = follow(engine.event_endpoints, self._tokens, self.model)
            self._listening = loop.create_task(listening, name=f"cache of {self.model}")
        else:
            self.reports_blocks = False

    async def _watch_over(self, engine: Engine) -> None:
        """A worker whose engine has died must not look ready."""
        while not engine.dead:  # noqa: ASYNC110 - vLLM tells it only when asked
            await asyncio.sleep(_LOOK_EVERY)
        if self.state != "draining":
            _log.error("%s: vLLM's engine process has ended by itself; its last words are in the log above", self.model)
            self._set_state("failed", "vLLM's engine process has ended by itself; see this worker's log")

    async def close(self) -> None:
        """End the engine's processes, also while they start."""
        self._closed = True
        for task in (self._watch, self._listening):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._engine is not None:
            self._engine.stop_reading()
            await in_daemon_thread(self._engine.close, f"close {self.model}")
        elif self._start is not None:
            await in_daemon_thread(self._start.call_off, f"call off {self.model}")

    # ---- load ---------------------------------------------------------------------------------------------------

    def load_report(self) -> LoadReport:
        """How this worker is doing now, with the engine's own queue and KV cache."""
        base = super().load_report()
        if self._engine is None:
            return base
        # The engine tells its numbers a step late and counts sequences; the requests in hand are known exactly.
        queued = min(self._engine.load.waiting, base.running)
        return LoadReport(
            state=base.state,
            running=base.running - queued,
            waiting=base.waiting + queued,
            capacity=min(self.capacity, self._engine.max_running),
            kv_usage=self.kv_usage(),
            processed=base.processed,
            progress_age_ms=base.progress_age_ms,
            models=[self.model],
            detail=base.detail,
            max_model_len=base.max_model_len,
        )

    def kv_usage(self) -> float:
        """Share of the KV cache that running requests hold."""
        # An idle engine makes no step to say that it has let go.
        return 0.0 if self._engine is None or self._running == 0 else self._engine.load.kv_usage

    # ---- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """The answer, as the engine gives it; closing the generator takes the request out of the engine's batch."""
        engine = self._running_engine()
        from pulsing.serving._vllm_request import answer, read

        blocks = self._tokens if self.reports_blocks else None
        if self.role == "prefill":
            answering = read(engine, request, blocks)
        elif self.role == "decode" and not request.handoff:
            raise RequestError(
                400,
                "this worker goes on from what a prefill worker has read, and was told of nothing; ask a Router, which "
                "pairs the two",
                code="no_handoff",
            )
        else:
            answering = answer(engine, request, self._max_new_tokens, blocks)
        async with contextlib.aclosing(answering) as deltas:
            async for delta in deltas:
                yield delta

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Ids of a text or a conversation, as the engine would read it."""
        from pulsing.serving._vllm_request import tokenized

        return await tokenized(self._running_engine(), request)

    def detokenize(self, tokens: list[int]) -> str:
        """The text of ids, special ones by name."""
        tokenizer = self._running_engine().tokenizer
        bad = [token for token in tokens if token >= len(tokenizer)]
        if bad:
            raise RequestError(400, f"tokens holds {bad[0]}; the vocabulary has {len(tokenizer)} tokens", "tokens")
        return str(tokenizer.decode(tokens))

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise RequestError(503, f"{self.model} is not loaded", code="worker_loading")
        return self._engine
