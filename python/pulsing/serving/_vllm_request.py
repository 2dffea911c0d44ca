"""One request through vLLM: a client's body in vLLM's own terms, vLLM's outputs as deltas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError, VLLMUnprocessableEntityError
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from pulsing.core._shown import shown
from pulsing.serving._errors import RequestError
from pulsing.serving._logprobs import chat_logprobs, completion_logprobs
from pulsing.serving._request import GenerateRequest
from pulsing.serving._sampling import Picked
from pulsing.serving._token_blocks import Claim, TokenBlocks
from pulsing.serving._vllm_engine import Engine
from pulsing.serving._vllm_stops import StopsAcross
from pulsing.serving.worker import Delta, TokenizeRequest, Tokens, Usage

__all__ = ["answer", "read", "tokenized"]

# Fields of vLLM's that reach beyond the request itself (other hosts, pickled tensors, the host's own settings), or
# whose result has no place in an answer.
_NOT_FOR_CLIENTS = (
    "chat_template",
    "ec_transfer_params",
    "kv_transfer_params",
    "logprob_token_ids",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prompt_embeds",
    "vllm_xargs",
)
# Settled here for every engine alike, or by the Router: limits, counting, and what an answer looks like.
_SETTLED_HERE = (
    "include_stop_str_in_output",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "model",
    "n",
    "request_id",
    "return_token_ids",
    "seed",
    "session_id",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
)
_LOGPROB_FLOOR = -9999.0
# What vLLM's connectors are told of a request whose answer another engine gives: to keep what was read for it.
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Seconds after a request's end in which what the engine has to say of its blocks arrives.
_SETTLED_AFTER = 1.0
# vLLM takes a temperature below this for 0.
_GREEDY_BELOW = 1e-5


async def answer(
    engine: Engine, request: GenerateRequest, max_new_tokens: int, blocks: TokenBlocks | None = None
) -> AsyncGenerator[Delta, None]:
    """The answer to a request; closing the generator aborts it in the engine.

    Args:
        engine: the running engine.
        request: the checked request.
        max_new_tokens: tokens of an answer where the request sets no limit.
        blocks: is told whose the tokens are that the engine caches.

    Raises:
        RequestError: what the client gets as an HTTP error.
    """
    with _as_http_errors():
        asked, inputs = await _rendered(engine, request)
    with _claimed(blocks, request, inputs) as claim:
        async with contextlib.aclosing(_generated(engine, request, max_new_tokens, asked, inputs, claim)) as deltas:
            async for delta in deltas:
                yield delta


async def read(
    engine: Engine, request: GenerateRequest, blocks: TokenBlocks | None = None
) -> AsyncGenerator[Delta, None]:
    """Reads a prompt for another engine, which is told where to find what was read.

    Args:
        engine: the running engine, with a KV connector.
        request: the checked request.
        blocks: is told whose the tokens are that the engine caches.

    Raises:
        RequestError: what the client gets as an HTTP error.
    """
    if request.choices > 1:
        raise RequestError(
            400,
            "workers in pairs of prefill and decode give one choice; send as many requests",
            "n",
            "unsupported_parameter",
        )
    with _as_http_errors():
        _, inputs = await _rendered(engine, request)
        # Of an answer that is gone on with the beginning is read, too.
        done = _done_ids(engine, request)
    name = f"{request.request_id or 'request'}-{uuid.uuid4().hex[:8]}"
    with _claimed(blocks, request, inputs) as claim:
        # As the one that decodes has it, whatever the client wants to be made of it: the token made here is nobody's.
        extra: dict[str, Any] = {"kv_transfer_params": dict(_REMOTE_DECODE)}
        if claim is not None and not claim.complete:
            extra["kv_cache_report_mode"] = "full"
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)
        (prompt,) = inputs
        usage, told = Usage(len(prompt["prompt_token_ids"]), 1), None
        ids = [*prompt["prompt_token_ids"], *done]
        whole = tokens_input(ids, cache_salt=prompt.get("cache_salt")) if done else prompt
        async with contextlib.aclosing(engine.llm.generate(whole, params, name)) as outputs:
            with _as_http_errors(generating=True):
                async for output in outputs:
                    for piece in output.outputs:
                        _reason(piece.finish_reason)
                    told = output.kv_transfer_params or told
                    usage = Usage(usage.prompt_tokens, 1, cached_tokens=output.num_cached_tokens or 0)
    handoff = {"kv_transfer_params": told, "cached_tokens": usage.cached_tokens}
    yield Delta(finish_reason="length", usage=usage, handoff=json.dumps(handoff).encode())


def _handed_over(request: GenerateRequest) -> tuple[dict[str, Any], int | None]:
    """What the engine that read the prompt told for this one, and how much of it that one had in its cache."""
    if not request.handoff:
        return {}, None
    try:
        handoff = json.loads(request.handoff)
        params, cached = handoff["kv_transfer_params"], int(handoff["cached_tokens"])
        if params is not None and not isinstance(params, dict):
            raise TypeError("kv_transfer_params is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            500,
            f"what the prefill worker handed over is not vLLM's: {error}; give the two the same version",
            code="bad_handoff",
        ) from None
    # A connector that finds what was read by itself, as through shared storage, tells nothing.
    return ({} if params is None else {"kv_transfer_params": params}), cached


@contextlib.contextmanager
def _claimed(blocks: TokenBlocks | None, request: GenerateRequest, inputs: list[Any]) -> Iterator[Claim | None]:
    """While a request runs, what the engine tells of its tokens is told of its blocks."""
    # What is cached under a salt is found again under that salt alone, of which the blocks' names say nothing.
    if blocks is None or not request.blocks or len(inputs) != 1 or inputs[0].get("cache_salt"):
        yield None
        return
    claim = blocks.begin(request.blocks, request.prompt_bytes, inputs[0]["prompt_token_ids"])
    try:
        yield claim
    finally:
        asyncio.get_running_loop().call_later(_SETTLED_AFTER, blocks.settle, claim)


async def _generated(
    engine: Engine, request: GenerateRequest, max_new_tokens: int, asked: Any, inputs: list[Any], claim: Claim | None
) -> AsyncGenerator[Delta, None]:
    prompts = [list(one["prompt_token_ids"]) for one in inputs]
    done = _done_ids(engine, request)
    with _as_http_errors():
        across = [_across(engine, asked, request, ids, done) for ids in prompts]
    handed_over, read_from_cache = _handed_over(request)
    streams: list[AsyncGenerator[Any, None]] = []
    firsts: list[int] = []
    # vLLM does not take several choices of a greedy request, which are the same one: each is asked for by itself.
    times = request.n // asked.n
    for at, (prompt, ids) in enumerate(zip(inputs, prompts, strict=True)):
        limit = max_new_tokens if request.max_tokens is None else request.max_tokens
        # What the client already has counts towards its limit, and is not generated again.
        limit = min(limit, engine.max_model_len - len(ids)) - len(done)
        if limit <= 0:
            continue
        whole = tokens_input([*ids, *done], cache_salt=prompt.get("cache_salt")) if done else prompt
        with _as_http_errors():
            reasoning = _reasoning(engine, asked, ids)
            for time in range(times):
                params = asked.to_sampling_params(limit, engine.defaults)
                extra = dict(handed_over)
                if claim is not None and not claim.complete:
                    # Also what it finds in its cache, and may have told of when nobody knew whose it was.
                    extra["kv_cache_report_mode"] = "full"
                if extra:
                    params.extra_args = {**(params.extra_args or {}), **extra}
                # Ids of requests that run at once must differ, and a client may send the same one twice.
                name = f"{request.request_id or 'request'}-{uuid.uuid4().hex[:8]}"
                streams.append(engine.llm.generate(whole, params, name, priority=asked.priority, **reasoning))
                firsts.append(at * request.n + time)

    prompt_tokens = sum(len(ids) for ids in prompts)
    indices = [i for first in firsts for i in range(first, first + asked.n)]
    choices = {i: _Choice(engine, asked, request, i, across[i // request.n]) for i in indices}
    none_to_do = [index for index in range(len(prompts) * request.n) if index not in choices]
    for index in none_to_do:
        last = not streams and index == none_to_do[-1]
        owed = across[index // request.n]
        text = "" if owed is None else owed.take(ended=True)
        yield Delta(text, index=index, finish_reason="length", usage=Usage(prompt_tokens, 0) if last else None)
    if not streams:
        return

    cached = [0] * len(prompts)
    unfinished = set(choices)
    async with contextlib.aclosing(merge_async_iterators(*streams)) as outputs:
        with _as_http_errors(generating=True):
            async for stream, output in outputs:
                at = firsts[stream] // request.n
                # What came over from the other half was in no cache of the client's concern.
                found = read_from_cache if read_from_cache is not None else output.num_cached_tokens
                cached[at] = max(cached[at], found or 0)
                for piece in output.outputs:
                    choice = choices[firsts[stream] + piece.index]
                    parts = choice.feed(piece, prompts[at])
                    if choice.finished:
                        unfinished.discard(choice.index)
                    usage = None
                    if not unfinished:
                        generated = sum(one.generated for one in choices.values())
                        usage = Usage(prompt_tokens, generated, cached_tokens=min(sum(cached), prompt_tokens))
                    if parts is not None:
                        yield Delta(index=choice.index, usage=usage, **parts)
                    if choice.cut and not unfinished:
                        # To the engine it goes on.
                        return


class _Choice:
    """One choice of an answer as it grows."""

    def __init__(
        self, engine: Engine, asked: Any, request: GenerateRequest, index: int, across: StopsAcross | None
    ) -> None:
        self.index = index
        self.cut = False
        """Whether it ended at a stop string that the engine was not told of."""
        self._across = across
        self.generated = 0
        self.finished = False
        self._asked = asked
        self._request = request
        self._token_bytes = engine.token_bytes
        self._parser: Any = None
        self._forced = False
        self._called = False
        # Without tools and reasoning there is nothing to parse, and text keeps its tokens.
        parses = bool(request.messages) and (engine.has_reasoning_parser or bool(asked.tools))
        if parses and engine.renderer.parser is not None:
            self._parser = engine.renderer.parser(
                engine.tokenizer,
                asked.tools,
                chat_template_kwargs=engine.renderer.effective_chat_template_kwargs(asked),
                model_config=engine.model_config,
            )
            self._forced = isinstance(asked.tool_choice, ChatCompletionNamedToolChoiceParam)
        # Parsers hold back what may become a call, and make of text what is none: its tokens would tell nothing.
        self._aligned = self._parser is None
        self._held_ids: list[int] = []
        self._held_picked: list[Picked] = []
        self._characters = 0

    def feed(self, piece: Any, prompt: list[int]) -> dict[str, Any] | None:
        """What a piece of vLLM's output gives the client, as a delta's parts; ``None``: nothing yet."""
        if self.finished:
            return None
        ids = list(piece.token_ids)
        reason = _reason(piece.finish_reason)
        kept = len(ids)
        # The token that ends an answer is counted, but is no part of it.
        if piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str):
            kept = max(0, kept - 1)
        if self._across is None:
            parts = self._parsed(piece, ids, prompt)
        else:
            taken = self._across.feed(ids[:kept])
            if self._across.stopped:
                ids, kept, reason, self.cut = ids[:taken], taken, "stop", True
            text = self._across.take(ended=reason is not None)
            parts = {"text": text} if text else {}
        self.generated += len(ids)
        self.finished = reason is not None
        self._held_ids += ids[:kept]
        if piece.logprobs is not None:
            self._held_picked += [
                _picked(token, entries, self._request.top_logprobs)
                for token, entries in zip(ids[:kept], piece.logprobs, strict=False)
            ]
        if not parts and reason is None:
            return None
        if self._aligned:
            parts["token_ids"] = tuple(self._held_ids)
        if self._request.logprobs and self._held_picked:
            if self._request.messages:
                parts["logprobs"] = chat_logprobs(self._held_picked, self._token_bytes)
            else:
                parts["logprobs"] = completion_logprobs(self._held_picked, self._token_bytes, self._characters)
        self._characters += len(parts.get("text", ""))
        self._held_ids, self._held_picked = [], []
        if reason is not None:
            # OpenAI: a call that the client forced ends with "stop", one the model chose with "tool_calls".
            parts["finish_reason"] = "tool_calls" if self._called and reason == "stop" and not self._forced else reason
        return parts

    def _parsed(self, piece: Any, ids: list[int], prompt: list[int]) -> dict[str, Any]:
        """Text, reasoning and tool calls of a piece, the empty ones left out."""
        if self._parser is None:
            return {"text": piece.text} if piece.text else {}
        message = self._parser.parse_delta(
            delta_text=piece.text,
            delta_token_ids=ids,
            request=self._asked,
            prompt_token_ids=prompt,
            finished=piece.finish_reason is not None,
        )
        parts: dict[str, Any] = {}
        if message is None:
            return parts
        if message.content:
            parts["text"] = message.content
        if message.reasoning and self._asked.include_reasoning:
            parts["reasoning"] = message.reasoning
        calls = [
            call.model_dump(exclude_none=True)
            for call in message.tool_calls or ()
            if self._asked.parallel_tool_calls is not False or call.index == 0
        ]
        if calls:
            self._called = True
            parts["tool_calls"] = json.dumps(calls, ensure_ascii=False)
        return parts


async def _rendered(engine: Engine, request: GenerateRequest) -> tuple[Any, list[Any]]:
    """The request as vLLM's own class, and its prompts as ids."""
    body = _body(engine, request)
    if request.messages:
        if request.body.get("tools") and not engine.has_tool_parser and request.body.get("tool_choice") != "none":
            raise RequestError(
                400,
                "this worker does not read tool calls: start it with --tool_call_parser NAME (vLLM's parser of the "
                "model's tool calls), or leave tools out",
                "tools",
                "unsupported_parameter",
            )
        asked = ChatCompletionRequest.model_validate(body)
        rendered = await engine.renderer.render_chat(asked)
        inputs = rendered if isinstance(rendered, ErrorResponse) else rendered[1]
    else:
        asked = CompletionRequest.model_validate(body)
        inputs = await engine.renderer.render_completion(asked)
    if isinstance(inputs, ErrorResponse):
        raise RequestError(inputs.error.code, inputs.error.message, inputs.error.param)
    for one in inputs:
        if "prompt_token_ids" not in one:
            raise RequestError(400, "this worker takes text prompts only", "prompt")
        if len(one["prompt_token_ids"]) >= engine.max_model_len:
            # A prompt that fills the context leaves no room for an answer.
            raise _too_long(engine.max_model_len, f"has {len(one['prompt_token_ids'])} tokens")
    return asked, list(inputs)


async def tokenized(engine: Engine, request: TokenizeRequest) -> Tokens:
    """Ids of a text or a conversation.

    Raises:
        RequestError: what the client gets as an HTTP error.
    """
    tokenizer = engine.tokenizer
    with _as_http_errors():
        if request.prompt is not None:
            ids = list(tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens))
        else:
            asked = ChatCompletionRequest.model_validate(
                {
                    "messages": request.body["messages"],
                    "chat_template_kwargs": dict(request.template_args),
                    "add_generation_prompt": request.add_generation_prompt,
                    "add_special_tokens": request.add_special_tokens,
                    "tools": request.body.get("tools"),
                }
            )
            rendered = await engine.renderer.render_chat(asked)
            if isinstance(rendered, ErrorResponse):
                raise RequestError(rendered.error.code, rendered.error.message, rendered.error.param)
            ids = list(rendered[1][0]["prompt_token_ids"])
    texts = [str(tokenizer.decode([one])) for one in ids] if request.texts else None
    return Tokens(ids, texts)


def _body(engine: Engine, request: GenerateRequest) -> dict[str, Any]:
    """The client's body as vLLM is to read it: null is absent, what every engine checks alike is taken from there."""
    body = {name: value for name, value in request.body.items() if value is not None}
    for name in _NOT_FOR_CLIENTS:
        if name in body:
            raise RequestError(400, f"{name} is not taken from clients; leave it out", name, "unsupported_parameter")
    for name in _SETTLED_HERE:
        body.pop(name, None)
    body["stream"] = True
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.top_p == 0:
        # The best token only; vLLM wants that said as temperature 0.
        body["temperature"] = 0.0
    elif request.top_p is not None:
        body["top_p"] = request.top_p
    temperature = body.get("temperature", engine.defaults.get("temperature", 1.0))
    body["n"] = 1 if temperature < _GREEDY_BELOW else request.n
    if request.top_k is not None:
        body["top_k"] = request.top_k
    elif request.body.get("top_k") is not None:
        body["top_k"] = 0
    if request.seed is not None:
        # vLLM's seeds are 64 bits with a sign; OpenAI's clients send any.
        body["seed"] = request.seed % 2**63
    if not _goes_on(engine, request) and (stops := _stops(engine, request)):
        body["stop"] = stops
    if request.logprobs:
        if request.messages:
            body["logprobs"], body["top_logprobs"] = True, request.top_logprobs
        else:
            body["logprobs"] = request.top_logprobs
    if request.messages and body.get("tool_choice") == "none":
        body.pop("tools", None)
        body.pop("tool_choice", None)
    return body


def _done_ids(engine: Engine, request: GenerateRequest) -> list[int]:
    """Ids of the part of an answer that the client already has."""
    if request.continue_tokens or request.continue_text:
        # To vLLM these tokens are prompt: what it counts over the answer alone would not count them.
        told = (request.presence_penalty, request.frequency_penalty, request.body.get("min_tokens"))
        names = ("presence_penalty", "frequency_penalty", "min_tokens")
        unsound = next((name for name, value in zip(names, told, strict=True) if value), None)
        if unsound is not None:
            raise RequestError(
                400, f"vLLM cannot go on with an answer under {unsound}", unsound, code="cannot_continue"
            )
    if request.continue_tokens or not request.continue_text:
        return list(request.continue_tokens)
    return list(engine.tokenizer.encode(request.continue_text, add_special_tokens=False))


def _stops(engine: Engine, request: GenerateRequest) -> list[str]:
    return [*request.stop, *(engine.implied_stops if request.messages else ())]


def _goes_on(engine: Engine, request: GenerateRequest) -> bool:
    """Whether it is the rest of an answer whose text is looked at here, across where it was cut."""
    tools = request.body.get("tools") and request.body.get("tool_choice") != "none"
    parsed = request.messages and (engine.has_reasoning_parser or tools)
    return bool(request.continue_tokens or request.continue_text) and not parsed


def _across(
    engine: Engine, asked: Any, request: GenerateRequest, prompt: list[int], done: list[int]
) -> StopsAcross | None:
    stops = _stops(engine, request)
    if not stops or not _goes_on(engine, request):
        return None

    def decode(ids: list[int]) -> str:
        return str(engine.tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens))

    # A text can be cut into tokens in more than one way: only tokens tell what is owed.
    return StopsAcross(stops, decode, prompt, done, request.continue_text if request.continue_tokens else None)


def _reasoning(engine: Engine, asked: Any, ids: list[int]) -> dict[str, Any]:
    """What a structured answer after reasoning needs: where the reasoning ends; only the rest is constrained."""
    if not isinstance(asked, ChatCompletionRequest) or engine.renderer.parser is None:
        return {}
    template_args = engine.renderer.effective_chat_template_kwargs(asked)
    parser = engine.renderer.parser(
        engine.tokenizer, asked.tools, chat_template_kwargs=template_args, model_config=engine.model_config
    )
    if parser.reasoning_parser is None:
        return {}
    return {
        "reasoning_ended": asked.resolve_reasoning_ended(parser, ids),
        "reasoning_parser_kwargs": {"chat_template_kwargs": template_args},
    }


def _picked(token: int, entries: Any, top: int) -> Picked:
    """A token's log probability and the best alternatives, from vLLM's table of them."""
    ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)
    best = tuple((other, max(float(one.logprob), _LOGPROB_FLOOR)) for other, one in ranked[:top])
    return Picked(token, max(float(entries[token].logprob), _LOGPROB_FLOOR), best)


def _reason(reason: str | None) -> str | None:
    """A finish reason in OpenAI's words.

    Raises:
        RequestError: the engine gave the request up.
    """
    if reason in (None, "stop", "length"):
        return reason
    if reason == "repetition":
        return "stop"
    if reason == "abort":
        raise RequestError(503, "the engine gave this request up while it was shutting down", code="engine_abort")
    raise RequestError(500, f"the engine failed while it answered (vLLM says {reason!r})", code="engine_error")


def _too_long(limit: int, what: str) -> RequestError:
    return RequestError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your prompt {what}; shorten it.",
        "messages",
        "context_length_exceeded",
    )


@contextlib.contextmanager
def _as_http_errors(*, generating: bool = False) -> Iterator[None]:
    """What vLLM refuses, as the HTTP errors it means.

    Args:
        generating: the request is in the engine; before that, a plain ``ValueError`` is about what the client sent.
    """
    try:
        yield
    except RequestError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(400, f"{where or 'request'}: {first['msg']}"[:600], where) from None
    except GracefulHTTPError as error:
        raise RequestError(int(error.http_status), error.message, code="worker_full") from None
    except VLLMClientError as error:
        raise _client_error(error) from None
    except EngineDeadError:
        raise RequestError(503, "the engine of this worker has died", code="worker_failed") from None
    except EngineGenerateError as error:
        # vLLM wraps what its checks of grammars and schemas raise.
        if isinstance(error.__cause__, ValueError):
            raise RequestError(400, str(error.__cause__)[:600]) from None
        raise
    except ValueError as error:
        if generating:
            raise
        raise RequestError(400, str(error)[:600] or "vLLM refuses this request") from None


def _client_error(error: Any) -> RequestError:
    status = 400
    if isinstance(error, VLLMNotFoundError):
        status = 404
    elif isinstance(error, VLLMUnprocessableEntityError):
        status = 422
    # vLLM's text repeats the value at its end, however long.
    text = str(error.args[0] if error.args else error)[:600]
    param = getattr(error, "parameter", None)
    if param in ("input_tokens", "input_text"):
        return RequestError(400, text, "messages", "context_length_exceeded")
    value = getattr(error, "value", None)
    if value is not None and isinstance(value, str | int | float | bool) and shown(value) not in text:
        text += f" (got {shown(value)})"
    return RequestError(status, text, param)
