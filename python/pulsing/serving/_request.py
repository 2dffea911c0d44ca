"""One generation request, checked: parsed from the client's untouched JSON body, the same way for every engine.

Null is absent everywhere. A field that would change the output is in :attr:`GenerateRequest.needs`, and a Worker
refuses what its engine does not list in ``supports``: nothing a client asked for is dropped without a word. Fields
that mean nothing to an engine (``user``, ``metadata``, ``store``, other vendors' extensions) are let pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pulsing._core import read_json
from pulsing.core._shown import shown
from pulsing.serving._errors import RequestError
from pulsing.serving._messages import parse_messages, text_of

__all__ = ["GenerateRequest", "is_token", "parse_json"]

Api = Literal["chat.completions", "completions"]

# OpenAI's default for /v1/completions; chat has none, there the worker's own limit counts.
_COMPLETION_MAX_TOKENS = 16
_MAX_CHOICES = 128
_MAX_STOPS = 16

# Fields that change what is generated and that no code here reads: (name, value that asks for nothing).
_OTHER_FEATURES: tuple[tuple[str, object], ...] = (
    ("audio", None),
    ("bad_words", []),
    ("continue_final_message", False),
    ("echo", False),
    ("function_call", "none"),
    ("functions", []),
    ("guided_choice", None),
    ("guided_grammar", None),
    ("guided_json", None),
    ("guided_regex", None),
    ("ignore_eos", False),
    ("length_penalty", 1),
    ("min_tokens", 0),
    ("prompt_logprobs", None),
    ("stop_token_ids", []),
    ("structured_outputs", None),
    ("suffix", ""),
    ("use_beam_search", False),
    ("web_search_options", None),
)
_FEATURES = dict(_OTHER_FEATURES)

# All that is read beside the conversation. Most requests have little of it, and looking for each of them would cost
# more than reading the JSON.
_READ = frozenset(_FEATURES) | {
    "best_of",
    "chat_template_kwargs",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "modalities",
    "n",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "response_format",
    "seed",
    "stop",
    "temperature",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
}


# Without slots: what a request does not say is then no attribute of its own, see `from_body`.
@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a client wants generated. ``None`` means: not given, the engine's default counts."""

    api: Api
    """``"chat.completions"`` or ``"completions"``."""
    request_id: str = ""
    """The ``x-request-id`` of the HTTP request."""
    deadline: float | None = None
    """Seconds that were left when the request arrived."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The client's JSON, every key of it."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages in a template's terms: ``role`` and a string ``content``, plus tool fields where present."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Completion prompts, texts or token ids; choice ``p * n + i`` is the i-th answer to prompt p."""
    max_tokens: int | None = None
    """Most new tokens a choice may have."""
    temperature: float | None = None
    """0..2; 0 is greedy."""
    top_p: float | None = None
    """0..1."""
    top_k: int | None = None
    """Best tokens to choose among; ``None`` also for the 0 and -1 that mean "all"."""
    min_p: float | None = None
    """0..1."""
    presence_penalty: float = 0.0
    """-2..2."""
    frequency_penalty: float = 0.0
    """-2..2."""
    repetition_penalty: float | None = None
    """> 0; 1 changes nothing."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to -100..100."""
    seed: int | None = None
    """Same seed, same request, same engine: same answer."""
    stop: tuple[str, ...] = ()
    """Stop strings, never part of the output."""
    n: int = 1
    """Choices per prompt, 1..128."""
    logprobs: bool = False
    """Whether log probabilities are wanted."""
    top_logprobs: int = 0
    """How many alternatives per token, 0..20."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template (``chat_template_kwargs``, ``reasoning_effort``)."""
    continue_text: str = ""
    """Text the client already has, to be continued; not to be sent again."""
    continue_tokens: tuple[int, ...] = ()
    """The token ids of that text, where they are known."""
    handoff: bytes = b""
    """In a decode worker what the prefill worker gave (``Delta.handoff``); see ``Worker.role``."""
    blocks: tuple[int, ...] = ()
    """In a worker with ``reports_blocks``, of one prompt: the hash of each 256 bytes of it and all before them, as
    Routers have it; see ``Worker.blocks_stored``."""
    prompt_bytes: int = 0
    """With ``blocks``: how long the prompt is; what is left after the last block is part of none."""
    needs: frozenset[str] = frozenset()
    """Names of the fields that ask for something; see ``Worker.supports``."""

    @property
    def choices(self) -> int:
        """How many choices the answer has."""
        return self.n * max(1, len(self.prompts))

    @property
    def last_text(self) -> str:
        """What was said last: the last message's text, or the prompt; for engines that need no conversation."""
        if self.messages:
            return str(self.messages[-1]["content"])
        return next((prompt for prompt in self.prompts if isinstance(prompt, str)), "")

    @classmethod
    def from_body(
        cls,
        api: str,
        body: bytes | memoryview,
        *,
        request_id: str = "",
        deadline: float | None = None,
        continue_text: str = "",
        continue_tokens: tuple[int, ...] = (),
        handoff: bytes = b"",
        blocks: tuple[int, ...] = (),
        prompt_bytes: int = 0,
    ) -> GenerateRequest:
        """Parse and check a JSON body.

        Args:
            api: ``"chat.completions"`` or ``"completions"``.
            body: the JSON as the client sent it.
            request_id: id for logs.
            deadline: seconds left.
            continue_text: text to continue from.
            continue_tokens: its token ids where known.
            handoff: what a prefill worker gave for it.
            blocks: hashes of its prompt's blocks.
            prompt_bytes: bytes of its prompt.

        Raises:
            RequestError: 400 with ``param`` naming the field.
        """
        surroundings = {
            "api": api,
            "request_id": request_id,
            "deadline": deadline,
            "continue_text": continue_text,
            "continue_tokens": continue_tokens,
            "handoff": handoff,
            "blocks": blocks,
            "prompt_bytes": prompt_bytes,
        }
        return cls.within(surroundings, body)

    @classmethod
    def within(cls, surroundings: dict[str, Any], body: bytes | memoryview) -> GenerateRequest:
        """Parse and check a JSON body, as :meth:`from_body`.

        Args:
            surroundings: what :meth:`from_body` takes beside the body, by its names; ``api`` at least. It is kept.
            body: the JSON as the client sent it.

        Raises:
            RequestError: 400 with ``param`` naming the field.
        """
        fields = parse_json(body)
        api = surroundings["api"]
        if api == "chat.completions" and _READ.isdisjoint(fields):
            # As its constructor would make it, which takes as long as all the rest: it sets each default anew.
            surroundings["body"] = fields
            surroundings["messages"] = parse_messages(fields.get("messages"))
            surroundings["logit_bias"] = {}
            surroundings["template_args"] = {}
            request = object.__new__(cls)
            object.__setattr__(request, "__dict__", surroundings)
            return request
        read = _Fields(fields)
        parsed: dict[str, Any] = {}
        least = 1 if api == "chat.completions" else 0
        limit = read.integer("max_completion_tokens", least, 2**63 - 1)
        older = read.integer("max_tokens", least, 2**63 - 1)
        parsed["max_tokens"] = older if limit is None else limit
        if api == "chat.completions":
            parsed["messages"] = parse_messages(read.body.get("messages"))
            parsed["logprobs"] = read.boolean("logprobs")
            parsed["top_logprobs"] = read.integer("top_logprobs", 0, 20) or 0
            if parsed["top_logprobs"] and not parsed["logprobs"]:
                raise RequestError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        elif api == "completions":
            parsed["prompts"] = _prompts(read.body.get("prompt"))
            if parsed["max_tokens"] is None:
                parsed["max_tokens"] = _COMPLETION_MAX_TOKENS
            count = read.integer("logprobs", 0, 5)
            parsed["logprobs"] = count is not None
            parsed["top_logprobs"] = count or 0
        else:
            raise RequestError(400, f"unknown API {shown(api)}: use chat.completions or completions", "api")
        top_k = read.integer("top_k", -1, 2**31)
        request = cls(
            body=read.body,
            temperature=read.number("temperature", 0, 2),
            top_p=read.number("top_p", 0, 1),
            top_k=top_k if top_k is not None and top_k > 0 else None,
            min_p=read.number("min_p", 0, 1) or None,
            presence_penalty=read.number("presence_penalty", -2, 2) or 0.0,
            frequency_penalty=read.number("frequency_penalty", -2, 2) or 0.0,
            repetition_penalty=read.number("repetition_penalty", 1e-3, 1e3),
            logit_bias=read.logit_bias(),
            seed=read.integer("seed", -(2**63), 2**64 - 1),
            stop=read.stop(),
            n=read.integer("n", 1, _MAX_CHOICES) or 1,
            template_args=read.template_args(),
            needs=read.other_features(),
            **surroundings,
            **parsed,
        )
        object.__setattr__(request, "needs", request.needs | _asked(request, read.body))
        return request


def _asked(request: GenerateRequest, body: Mapping[str, Any]) -> frozenset[str]:
    """The parsed fields that are not at the value that changes nothing."""
    neutral: tuple[tuple[str, bool], ...] = (
        ("max_tokens", request.max_tokens is None),
        ("temperature", request.temperature is None),
        ("top_p", request.top_p is None or request.top_p == 1),
        ("top_k", request.top_k is None),
        ("min_p", request.min_p is None),
        ("presence_penalty", request.presence_penalty == 0),
        ("frequency_penalty", request.frequency_penalty == 0),
        ("repetition_penalty", request.repetition_penalty in (None, 1)),
        ("logit_bias", not request.logit_bias),
        ("seed", request.seed is None),
        ("stop", not request.stop),
        ("n", request.n == 1),
        ("prompt", len(request.prompts) <= 1),
        ("logprobs", not request.logprobs),
    )
    asked = {name for name, is_neutral in neutral if not is_neutral}
    if any(isinstance(prompt, tuple) for prompt in request.prompts):
        asked.add("prompt_tokens")
    best_of = body.get("best_of")
    if best_of is not None and best_of != request.n:
        asked.add("best_of")
    return frozenset(asked)


# Needs that are no fields, but shapes that the prompt of a completion has.
_SHAPES = {"prompt": "several prompts in one request", "prompt_tokens": "prompts of token ids"}


def unsupported(engine: str, needs: frozenset[str]) -> RequestError:
    """What a request gets that needs what the engine has not.

    Args:
        engine: How the engine is called.
        needs: What it lacks of `GenerateRequest.needs`.
    """
    names = sorted(needs)
    words = ", ".join(_SHAPES.get(name, name) for name in names)
    way = "leave it out" if needs.isdisjoint(_SHAPES) else "send one text"
    elsewhere = "" if engine == "custom" else " or use another worker"
    param = "prompt" if names[0] in _SHAPES else names[0]
    text = f"the {engine} engine does not support {words}; {way}{elsewhere}"
    return RequestError(400, text, param, "unsupported_parameter")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def parse_json(body: bytes | memoryview) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        RequestError: 400; it is none.
    """
    data = bytes(body)
    # What is not plainly in order is read by the one that has the words for what is wrong with it.
    if (plain := read_json(data)) is not None:
        return plain
    try:
        parsed = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400, f"the request body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from None
    if not isinstance(parsed, dict):
        raise RequestError(400, f"the request body must be a JSON object, not {shown(parsed)}")
    return parsed


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        raise RequestError(400, "prompt is missing: give a string, a list of strings, or token ids", "prompt")
    if isinstance(value, str):
        return (text_of(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise RequestError(400, f"prompt must be a string, strings or token ids, not {shown(value)}", "prompt")
    if all(is_token(item) for item in value):
        return (tuple(value),)
    if len(value) > _MAX_CHOICES:
        raise RequestError(400, f"prompt holds {len(value)} prompts; at most {_MAX_CHOICES} at once", "prompt")
    prompts: list[str | tuple[int, ...]] = []
    for at, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(text_of(item, f"prompt[{at}]"))
        elif isinstance(item, list) and item and all(is_token(token) for token in item):
            prompts.append(tuple(item))
        else:
            raise RequestError(400, f"prompt[{at}] must be a string or token ids, not {shown(item)}", f"prompt[{at}]")
    return tuple(prompts)


def is_token(value: object) -> bool:
    """Whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class _Fields:
    """Typed reading of the body's fields; null reads as absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(400, f"{name} must be a number, not {shown(value)}", name)
        if not low <= value <= high:
            raise RequestError(400, f"{name} must be between {low} and {high}, not {shown(value)}", name)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(400, f"{name} must be an integer, not {shown(value)}", name)
        if not low <= value <= high:
            raise RequestError(400, f"{name} must be between {low} and {high}, not {shown(value)}", name)
        return value

    def boolean(self, name: str) -> bool:
        value = self.body.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise RequestError(400, f"{name} must be true or false, not {shown(value)}", name)
        return value

    def stop(self) -> tuple[str, ...]:
        value = self.body.get("stop")
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return ()
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise RequestError(400, f"stop must be a string or a list of strings, not {shown(value)}", "stop")
        if len(stops) > _MAX_STOPS:
            raise RequestError(400, f"stop holds {len(stops)} strings; at most {_MAX_STOPS} are taken", "stop")
        if "" in stops:
            raise RequestError(400, "stop must not contain an empty string: it would stop at once", "stop")
        return tuple(dict.fromkeys(stops))

    def logit_bias(self) -> dict[int, float]:
        value = self.body.get("logit_bias")
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise RequestError(400, f"logit_bias must map token ids to numbers, not {shown(value)}", "logit_bias")
        bias: dict[int, float] = {}
        for token, amount in value.items():
            if not (token.isascii() and token.isdigit()):
                raise RequestError(400, f"logit_bias key {shown(token)} is no token id", "logit_bias")
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
                raise RequestError(
                    400, f"logit_bias of {shown(token)} must be -100..100, not {shown(amount)}", "logit_bias"
                )
            bias[int(token)] = float(amount)
        return bias

    def template_args(self) -> dict[str, Any]:
        value = self.body.get("chat_template_kwargs")
        if value is not None and not isinstance(value, dict):
            raise RequestError(
                400, f"chat_template_kwargs must be an object, not {shown(value)}", "chat_template_kwargs"
            )
        args = dict(value or {})
        if self.body.get("reasoning_effort") is not None:
            args.setdefault("reasoning_effort", self.body["reasoning_effort"])
        return args

    def other_features(self) -> frozenset[str]:
        given = self.body.keys() & _FEATURES.keys()
        asked = {name for name in given if self.body[name] is not None and self.body[name] != _FEATURES[name]}
        # Tools that must not be called ask for nothing.
        if self.body.get("tools") and self.body.get("tool_choice") != "none":
            asked.add("tools")
        response_format = self.body.get("response_format")
        if response_format is not None:
            if not isinstance(response_format, dict) or not isinstance(response_format.get("type"), str):
                raise RequestError(
                    400,
                    f"response_format must be an object with a type, not {shown(response_format)}",
                    "response_format",
                )
            if response_format["type"] != "text":
                asked.add("response_format")
        modalities = self.body.get("modalities")
        if modalities is not None and modalities != ["text"]:
            asked.add("modalities")
        return frozenset(asked)
