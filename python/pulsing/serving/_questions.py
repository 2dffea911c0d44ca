"""Requests answered in one piece (embeddings, tokenize, detokenize), parsed and checked alike for every engine."""

from __future__ import annotations

import array
import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pulsing._core import Usage, encode_answer
from pulsing.core._shown import shown
from pulsing.serving._errors import RequestError
from pulsing.serving._messages import parse_messages, text_of
from pulsing.serving._request import is_token, parse_json

if TYPE_CHECKING:
    from pulsing._core import WorkerRequest
    from pulsing.serving.worker import Worker

__all__ = ["EmbedRequest", "Embeddings", "TokenizeRequest", "Tokens", "answered", "embeddings_answer", "parse_tokens"]

# As OpenAI has it.
_MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """What a client wants embedded."""

    inputs: tuple[str | tuple[int, ...], ...]
    """Texts or token ids, 1 to 2048 of them."""
    dimensions: int | None = None
    """Length of the vectors that the client asks for; ``None``: the model's own. A worker that cannot shorten its
    vectors raises ``RequestError(400, ...)``."""
    request_id: str = ""
    """The ``x-request-id`` of the HTTP request."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The client's JSON, every key of it."""

    @classmethod
    def from_body(cls, body: bytes | memoryview, *, request_id: str = "") -> EmbedRequest:
        """Parse and check a JSON body.

        Args:
            body: the JSON as the client sent it.
            request_id: id for logs.

        Raises:
            RequestError: 400 with ``param`` naming the field.
        """
        parsed = parse_json(body)
        dimensions = parsed.get("dimensions")
        if isinstance(dimensions, float) and dimensions.is_integer():
            dimensions = int(dimensions)
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise RequestError(
                400, f"dimensions must be an integer of at least 1, not {shown(dimensions)}", "dimensions"
            )
        return cls(inputs=_inputs(parsed.get("input")), dimensions=dimensions, request_id=request_id, body=parsed)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors, and what they cost."""

    vectors: Sequence[Iterable[float]]
    """One for each input, in order: lists, or arrays of any kind."""
    usage: Usage | None = None
    """Tokens of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """What a client wants as token ids: a text, or a conversation as the model would read it."""

    prompt: str | None = None
    """The text; ``None`` with messages."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages in a template's terms."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds what it puts around a text. Default: for a prompt yes, for messages no."""
    add_generation_prompt: bool = True
    """Whether messages end with the beginning of an answer."""
    texts: bool = False
    """Whether the text of each token is wanted."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The client's JSON, every key of it."""

    @classmethod
    def from_body(cls, body: bytes | memoryview) -> TokenizeRequest:
        """Parse and check a JSON body.

        Args:
            body: the JSON as the client sent it.

        Raises:
            RequestError: 400 with ``param`` naming the field.
        """
        parsed = parse_json(body)
        flags: dict[str, bool] = {}
        for name in ("add_special_tokens", "add_generation_prompt", "return_token_strs"):
            value = parsed.get(name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(400, f"{name} must be true or false, not {shown(value)}", name)
            if value is not None:
                flags[name] = value
        prompt, messages = parsed.get("prompt"), parsed.get("messages")
        if (prompt is None) == (messages is None):
            raise RequestError(400, "give a prompt or messages, one of them", "prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(400, f"prompt must be a string, not {shown(prompt)}", "prompt")
        extra = parsed.get("chat_template_kwargs") or {}
        if not isinstance(extra, dict):
            raise RequestError(
                400, f"chat_template_kwargs must be an object, not {shown(extra)}", "chat_template_kwargs"
            )
        return cls(
            prompt=None if prompt is None else text_of(prompt, "prompt"),
            messages=() if messages is None else parse_messages(messages),
            add_special_tokens=flags.get("add_special_tokens", prompt is not None),
            add_generation_prompt=flags.get("add_generation_prompt", True),
            texts=flags.get("return_token_strs", False),
            template_args=extra,
            body=parsed,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and where asked for the text of each."""

    ids: Sequence[int]
    """The ids."""
    texts: Sequence[str] | None = None
    """One a token; needed where ``TokenizeRequest.texts`` is set."""


def _inputs(value: object) -> tuple[str | tuple[int, ...], ...]:
    one = _input(value, "input")
    if one is not None:
        return (one,)
    if not isinstance(value, list) or not value:
        raise RequestError(400, f"input must be a text, token ids, or a list of either, not {shown(value)}", "input")
    if len(value) > _MAX_INPUTS:
        raise RequestError(400, f"input holds {len(value)} inputs; at most {_MAX_INPUTS} go in one request", "input")
    inputs: list[str | tuple[int, ...]] = []
    for at, item in enumerate(value):
        parsed = _input(item, f"input[{at}]")
        if parsed is None:
            raise RequestError(400, f"input[{at}] must be a text or token ids, not {shown(item)}", f"input[{at}]")
        inputs.append(parsed)
    return tuple(inputs)


def _input(value: object, where: str) -> str | tuple[int, ...] | None:
    if isinstance(value, str):
        if not value:
            raise RequestError(400, f"{where} is empty: there is nothing to embed", where)
        return text_of(value, where)
    if isinstance(value, list) and value and all(is_token(item) for item in value):
        return tuple(value)
    return None


def parse_tokens(body: bytes | memoryview) -> list[int]:
    """The token ids of a detokenize request.

    Raises:
        RequestError: 400 with ``param`` naming the field.
    """
    tokens = parse_json(body).get("tokens")
    if not isinstance(tokens, list) or not all(is_token(token) for token in tokens):
        raise RequestError(400, f"tokens must be a list of token ids, not {shown(tokens)}", "tokens")
    return tokens


def embeddings_answer(request: EmbedRequest, given: Embeddings | Sequence[Iterable[float]]) -> bytes:
    """The worker protocol's answer from what ``embed`` returned.

    Raises:
        ValueError: it is none to this request; the text says what is wrong.
    """
    embeddings = given if isinstance(given, Embeddings) else Embeddings(given)
    vectors = [_floats(vector) for vector in embeddings.vectors]
    if len(vectors) != len(request.inputs):
        raise ValueError(f"embed() returned {len(vectors)} vectors for {len(request.inputs)} inputs")
    for vector in vectors:
        if request.dimensions is not None and len(vector) != request.dimensions:
            raise ValueError(f"embed() returned {len(vector)} dimensions where {request.dimensions} were asked for")
        if not all(map(math.isfinite, vector)):
            raise ValueError("embed() returned a vector with a value that is no number")
    if sys.byteorder == "big":
        for vector in vectors:
            vector.byteswap()
    return encode_answer(embeddings=[vector.tobytes() for vector in vectors], usage=embeddings.usage)


def _floats(vector: Iterable[float]) -> array.array[float]:
    # A tensor gives its numbers one by one as tensors; a list of them is one step for all of them.
    tolist = getattr(vector, "tolist", None)
    return array.array("f", vector if tolist is None else tolist())


async def answered(worker: Worker, asked: WorkerRequest) -> bytes:
    """What a question is answered with by a worker.

    Args:
        worker: it has a method for the question.
        asked: the question.

    Raises:
        RequestError: the question is none, or the worker says so.
    """
    if asked.api == "embeddings":
        request = EmbedRequest.from_body(asked.body, request_id=asked.request_id)
        return embeddings_answer(request, await _given(worker.embed(request)))
    if asked.api == "detokenize":
        return encode_answer(text=await _given(worker.detokenize(parse_tokens(asked.body))))
    given = await _given(worker.tokenize(TokenizeRequest.from_body(asked.body)))
    tokens = given if isinstance(given, Tokens) else Tokens(given)
    return encode_answer(
        tokens=list(tokens.ids), token_texts=list(tokens.texts or ()), max_model_len=worker.max_model_len
    )


async def _given(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
