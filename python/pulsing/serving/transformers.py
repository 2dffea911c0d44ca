"""A worker around Hugging Face transformers and torch: any causal language model, on CUDA, MPS or a CPU."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import re
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any, Literal

from pulsing.serving._decode_loop import DecodeLoop, Piece, SequenceJob
from pulsing.serving._errors import RequestError
from pulsing.serving._fingerprint import fingerprint_of, weights_of
from pulsing.serving._hf_text import TextCodec
from pulsing.serving._logprobs import chat_logprobs, completion_logprobs
from pulsing.serving._model_files import ModelSource
from pulsing.serving._request import GenerateRequest
from pulsing.serving._sampling import Sampler, SamplingDefaults
from pulsing.serving._text import StopFilter
from pulsing.serving._threads import usable_cores
from pulsing.serving.worker import Delta, TokenizeRequest, Tokens, Usage, Worker

__all__ = ["TransformersWorker"]

_log = logging.getLogger("pulsing.serving")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class TransformersWorker(Worker):
    """Serves a causal language model with transformers.

    Requests run at once, a token of each in turn, each with its own KV cache and random numbers.

    Args:
        model_name: a hub id, a local directory, or ``DIR/FILE.gguf``.
        device: ``auto`` (CUDA, else MPS, else CPU), ``cpu``, ``mps``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (float32 on a CPU, else the checkpoint's own, for GGUF bfloat16), ``float32``, ``bfloat16``
            or ``float16``.
        preload: load at once, in the background; ``False``: at the first request.
        max_new_tokens: tokens a chat answer may have when the request sets no limit.
        capacity: requests served at once; more wait.
        chat_template: Jinja text, or a file that holds it; the model's own when not given.
        served_model_name: the name clients use; the hub id, or the last part of the path, when not given.
        max_model_len: longest context in tokens; the model's own when not given.
        threads: torch threads; all cores but one when not given and on a CPU.
        trust_remote_code: let the model's repository run its own Python code here.
        max_waiting: requests that may wait inside the worker.
        drain_timeout: seconds that running requests get at shutdown.
    """

    engine = "transformers"
    continues = "any"
    supports = frozenset(
        {
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "max_tokens",
            "min_p",
            "n",
            "presence_penalty",
            "prompt",
            "prompt_tokens",
            "repetition_penalty",
            "seed",
            "stop",
            "temperature",
            "top_k",
            "top_p",
        }
    )

    def __init__(
        self,
        model_name: str,
        device: str = "auto",
        dtype: Dtype = "auto",
        preload: bool = True,
        max_new_tokens: int = 512,
        capacity: int = 16,
        chat_template: str | None = None,
        served_model_name: str | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
        max_waiting: int = 256,
        drain_timeout: float = 30.0,
    ) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
            raise ValueError(f"device {device!r} is none of auto, cpu, mps, cuda, cuda:N")
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {dtype!r} is none of auto, float32, bfloat16, float16")
        for name, value in (("max_new_tokens", max_new_tokens), ("max_model_len", max_model_len), ("threads", threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._source = ModelSource.of(model_name)
        super().__init__(
            served_model_name or self._source.name,
            capacity=capacity,
            max_waiting=max_waiting,
            preload=preload,
            drain_timeout=drain_timeout,
        )
        self._device = device
        self._dtype = dtype
        self._max_new_tokens = max_new_tokens
        self._chat_template = chat_template
        self._wanted_len = max_model_len
        self._threads = threads
        self._trust = trust_remote_code
        self._codec: TextCodec | None = None
        self._loop_thread: DecodeLoop | None = None
        self._defaults = SamplingDefaults()
        self._end_tokens: frozenset[int] = frozenset()
        self._vocabulary = 0
        self._torch_device = ""

    def engine_version(self) -> str:
        """Version of transformers."""
        return importlib.metadata.version("transformers")

    # ---- loading ------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Import torch, then load tokenizer and weights; on a thread of its own."""
        self.set_detail("importing torch and transformers")
        # A server's log is no place for progress bars; those of GGUF files have no switch but this variable.
        os.environ.setdefault("TQDM_DISABLE", "1")
        # Any, so that the types are the same where torch is not installed.
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        device = self._torch_device = _pick_device(torch, self._device)
        threads = self._threads
        if threads is None and device == "cpu":
            # One core stays free for the event loop, the network and a Router on the same machine.
            threads = max(1, usable_cores() - 1)
        if threads is not None:
            torch.set_num_threads(threads)

        source = self._source
        files: dict[str, Any] = {"trust_remote_code": self._trust}
        if source.gguf is not None:
            files["gguf_file"] = source.gguf
        self.set_detail("loading the tokenizer")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.repo, **files)
        codec = TextCodec(tokenizer, self._chat_template, self.model)
        dtype = _pick_dtype(torch, self._dtype, device, gguf=source.gguf is not None)
        self.set_detail(f"loading the weights ({dtype}) to {device}")
        _log.info("%s: loading %s on %s", self.model, dtype, device)
        model = transformers.AutoModelForCausalLM.from_pretrained(source.repo, dtype=dtype, **files)
        if model.config.is_encoder_decoder:
            raise ValueError(f"{source.repo} is an encoder-decoder model; this worker serves decoder-only models")
        model = model.to(device).eval()

        config = model.config.get_text_config(decoder=True)
        own_len = int(getattr(config, "max_position_embeddings", 0) or 0)
        if self._wanted_len is not None and own_len and self._wanted_len > own_len:
            raise ValueError(f"max_model_len {self._wanted_len} is more than the model's own {own_len} tokens")
        self.max_model_len = self._wanted_len or own_len
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        generation = model.generation_config
        self._defaults = SamplingDefaults.of(generation)
        self._end_tokens = _ids(generation.eos_token_id) | _ids(tokenizer.eos_token_id)
        self.fingerprint = fingerprint_of(
            *(self.engine, transformers.__version__, torch.__version__, device.partition(":")[0], str(dtype)),
            *(config.to_json_string(), len(tokenizer), self._chat_template or tokenizer.chat_template),
            *(self._defaults, self._max_new_tokens, self.max_model_len, weights_of(model.parameters())),
        )
        self._codec = codec
        self._loop_thread = DecodeLoop(model, f"decode {self.model}", threads, self.progressed)

    async def close(self) -> None:
        """End the engine's thread."""
        if self._loop_thread is not None:
            await asyncio.to_thread(self._loop_thread.close)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """The answer, token by token; closing the generator stops the engine at the next token."""
        codec, engine = self._codec, self._loop_thread
        if codec is None or engine is None:
            raise RequestError(503, f"{self.model} is not loaded", code="worker_loading")
        prompts = [self._checked(ids) for ids in self._prompt_ids(codec, request)]
        bad = [token for token in request.logit_bias if token >= self._vocabulary]
        if bad:
            raise RequestError(
                400, f"logit_bias names token {bad[0]}; the vocabulary has {self._vocabulary} tokens", "logit_bias"
            )
        done_ids = list(request.continue_tokens)
        if not done_ids and request.continue_text:
            done_ids = codec.encode(request.continue_text, special=False)
        prompt_tokens = sum(len(ids) for ids in prompts)

        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece] = asyncio.Queue()

        def emit(piece: Piece) -> bool:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except RuntimeError:
                return False  # the loop is closed: nobody reads
            return True

        jobs: dict[int, SequenceJob] = {}
        # Of an answer begun elsewhere: text that its tokens hold and the client has not got; and how it has ended.
        owed: dict[int, str] = {}
        ended: dict[int, str] = {}
        for at, ids in enumerate(prompts):
            # What the client already has counts towards its limit, and is not generated again.
            limit = self._limit(request, len(ids)) - len(done_ids)
            for choice in range(request.n):
                index = at * request.n + choice
                detokenizer = codec.detokenizer(ids)
                stops = StopFilter((*request.stop, *(codec.implied_stops if request.messages else ())))
                given = "".join(stops.feed(detokenizer.feed(token)) for token in done_ids)
                # A text can be cut into tokens in more than one way: only tokens tell what is owed.
                owed[index] = _owed(request.continue_text, given) if request.continue_tokens else ""
                if stops.stopped or limit <= 0:
                    ended[index] = "stop" if stops.stopped else "length"
                    continue
                jobs[index] = SequenceJob(
                    index=index,
                    ids=[*ids, *done_ids],
                    max_new=limit,
                    end_tokens=self._end_tokens,
                    sampler=Sampler(request, self._defaults, self._torch_device, ids, index, done_ids),
                    detokenizer=detokenizer,
                    stops=stops,
                    emit=emit,
                )
        counts = dict.fromkeys(jobs, 0)
        offsets = dict.fromkeys(jobs, 0)
        unfinished = set(jobs)
        try:
            for job in jobs.values():
                engine.submit(job)
            for index, reason in ended.items():
                last = not unfinished and index == [*ended][-1]
                yield Delta(
                    owed[index], index=index, finish_reason=reason, usage=Usage(prompt_tokens, 0) if last else None
                )
            while unfinished:
                piece = await pieces.get()
                job = jobs[piece.index]
                job.consumed += 1
                engine.wake()
                if piece.error is not None:
                    raise piece.error
                counts[piece.index] = piece.generated
                if piece.finish_reason is not None:
                    unfinished.discard(piece.index)
                logprobs = None
                if request.logprobs and piece.picked:
                    if request.messages:
                        logprobs = chat_logprobs(piece.picked, codec.token_bytes)
                    else:
                        logprobs = completion_logprobs(piece.picked, codec.token_bytes, offsets[piece.index])
                offsets[piece.index] += len(piece.text)
                yield Delta(
                    owed.pop(piece.index, "") + piece.text,
                    index=piece.index,
                    token_ids=piece.token_ids,
                    finish_reason=piece.finish_reason,
                    usage=Usage(prompt_tokens, sum(counts.values())) if not unfinished else None,
                    logprobs=logprobs,
                )
        finally:
            for job in jobs.values():
                job.cancelled = True
            engine.wake()

    def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Ids of a text or a conversation."""
        codec = self._tokenizer_of()
        if request.prompt is not None:
            ids = codec.encode(request.prompt, special=request.add_special_tokens)
        else:
            ids = codec.render(
                request.messages,
                request.template_args,
                answer=request.add_generation_prompt,
                special=request.add_special_tokens,
            )
        return Tokens(ids, codec.texts(ids) if request.texts else None)

    def detokenize(self, tokens: list[int]) -> str:
        """The text of ids."""
        codec = self._tokenizer_of()
        bad = [token for token in tokens if token >= self._vocabulary]
        if bad:
            raise RequestError(400, f"tokens holds {bad[0]}; the vocabulary has {self._vocabulary} tokens", "tokens")
        return codec.decode(tokens)

    def _tokenizer_of(self) -> TextCodec:
        if self._codec is None:
            raise RequestError(503, f"{self.model} is not loaded", code="worker_loading")
        return self._codec

    def _prompt_ids(self, codec: TextCodec, request: GenerateRequest) -> list[list[int]]:
        if request.messages:
            return [codec.render(request.messages, request.template_args)]
        prompts: list[list[int]] = []
        for at, prompt in enumerate(request.prompts):
            if isinstance(prompt, str):
                ids = codec.encode(prompt, special=True)
            else:
                ids = list(prompt)
                bad = [token for token in ids if token >= self._vocabulary]
                if bad:
                    raise RequestError(
                        400,
                        f"prompt {at} holds token id {bad[0]}; the vocabulary has {self._vocabulary} tokens",
                        "prompt",
                    )
            prompts.append(ids or codec.first_ids())
        return prompts

    def _checked(self, ids: list[int]) -> list[int]:
        # A prompt that fills the context leaves no room for an answer.
        if self.max_model_len and len(ids) >= self.max_model_len:
            raise RequestError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{len(ids)} tokens; shorten it.",
                "messages",
                "context_length_exceeded",
            )
        return ids

    def _limit(self, request: GenerateRequest, prompt_tokens: int) -> int:
        limit = self._max_new_tokens if request.max_tokens is None else request.max_tokens
        return min(limit, self.max_model_len - prompt_tokens) if self.max_model_len else limit


def _owed(has: str, given: str) -> str:
    """What of `given`, the text of the tokens that another worker sent, the client has not got.

    Raises:
        RequestError: the client has something else.
    """
    if has and not given.startswith(has):
        raise RequestError(
            400, "the tokens to go on from are not those of the text to go on from", code="cannot_continue"
        )
    return given[len(has) :] if has else ""


def _pick_device(torch: Any, wanted: str) -> str:
    mps = getattr(torch.backends, "mps", None)
    has_mps = mps is not None and mps.is_available()
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    if wanted.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(f"device {wanted!r} was asked for, but torch sees no CUDA here; use --device cpu or auto")
        number = int(wanted.partition(":")[2] or 0)
        if number >= torch.cuda.device_count():
            raise ValueError(f"device {wanted!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs")
    if wanted == "mps" and not has_mps:
        raise ValueError("device 'mps' was asked for, but torch has no MPS here; use --device cpu or auto")
    return wanted


def _pick_dtype(torch: Any, wanted: str, device: str, *, gguf: bool) -> Any:
    if wanted != "auto":
        return getattr(torch, wanted)
    if device == "cpu":
        # Most CPUs compute bfloat16 slower than float32, and less exactly.
        return torch.float32
    # A GGUF file is expanded while it is loaded and names no dtype of its own.
    return torch.bfloat16 if gguf else "auto"


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list | tuple) else frozenset((int(value),))
