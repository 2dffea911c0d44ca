"""From logits to the next token: Hugging Face's processors in their usual order, and random numbers that depend on seed
and position alone, so that another worker can go on from any token."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pulsing.serving._request import GenerateRequest

__all__ = ["Picked", "Sampler", "SamplingDefaults"]

# Log probabilities below this are not JSON (-inf) or of no use; OpenAI's own sentinel.
_LOGPROB_FLOOR = -9999.0
# Spreads the seeds of a request's choices; choice 0 keeps the client's seed.
_SEED_STRIDE = 0x9E3779B97F4A7C15
_64_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's ``generation_config`` says, for what a request leaves open; ``None`` = nothing."""

    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, config: Any) -> SamplingDefaults:
        """Read a ``GenerationConfig``."""
        return cls(
            do_sample=bool(getattr(config, "do_sample", False)),
            temperature=getattr(config, "temperature", None),
            top_p=getattr(config, "top_p", None),
            top_k=getattr(config, "top_k", None) or None,
            min_p=getattr(config, "min_p", None),
            repetition_penalty=getattr(config, "repetition_penalty", None),
        )


@dataclass(frozen=True, slots=True)
class Picked:
    """The token chosen, and where asked for its log probability and the best alternatives."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one choice.

    Sampling happens where the request asks for it (temperature above 0, or any of top_p, top_k, min_p), or where it
    says nothing and the model's ``generation_config`` samples; else the best token is taken. Log probabilities are
    the model's own, before temperature and penalties.

    Args:
        request: what is asked for.
        defaults: the model's own settings.
        device: where the logits live.
        prompt: prompt ids, which the repetition penalty counts too.
        choice: number of the choice, so that choices of one seed differ.
        begun: ids of the answer so far, where another worker has begun it.
    """

    def __init__(
        self,
        request: GenerateRequest,
        defaults: SamplingDefaults,
        device: Any,
        prompt: Sequence[int],
        choice: int,
        begun: Sequence[int] = (),
    ) -> None:
        import torch
        from transformers.generation import logits_process as hf

        self._torch: Any = torch
        self._want_logprobs = request.logprobs
        self._top = request.top_logprobs
        self._presence = request.presence_penalty
        self._frequency = request.frequency_penalty
        self._counts = dict(Counter(begun))
        self._position = len(begun)
        self._bias: Any = None
        if request.logit_bias:
            ids = torch.tensor(list(request.logit_bias), device=device)
            self._bias = (ids, torch.tensor(list(request.logit_bias.values()), device=device))

        self._repetition: Any = None
        self._seen: Any = None
        penalty = request.repetition_penalty or defaults.repetition_penalty
        if penalty is not None and penalty != 1:
            self._repetition = hf.RepetitionPenaltyLogitsProcessor(penalty)
            self._seen = torch.tensor([[*prompt, *begun]], device=device)

        self._warpers: list[Any] = []
        self._generator: Any = None
        if not _samples(request, defaults):
            return
        temperature = _first(request.temperature, defaults.temperature)
        if temperature is not None and temperature != 1:
            self._warpers.append(hf.TemperatureLogitsWarper(float(temperature)))
        top_k = _first(request.top_k, defaults.top_k)
        if top_k is not None:
            self._warpers.append(hf.TopKLogitsWarper(int(top_k)))
        top_p = _first(request.top_p, defaults.top_p)
        if top_p is not None and top_p < 1:
            self._warpers.append(hf.TopPLogitsWarper(float(top_p)))
        min_p = _first(request.min_p, defaults.min_p)
        if min_p:
            self._warpers.append(hf.MinPLogitsWarper(float(min_p)))
        seed = secrets.randbits(63) if request.seed is None else request.seed
        self._seed = (seed + choice * _SEED_STRIDE) & _64_BITS
        self._generator = torch.Generator(device=device)

    def pick(self, logits: Any) -> Picked:
        """The next token, from the logits of the last position (one dimension)."""
        torch = self._torch
        scores = logits.float().unsqueeze(0)
        raw = scores
        if self._bias is not None:
            scores = scores.index_add(1, self._bias[0], self._bias[1].unsqueeze(0))
        if self._counts and (self._presence or self._frequency):
            ids = torch.tensor(list(self._counts), device=scores.device)
            counts = torch.tensor(list(self._counts.values()), device=scores.device, dtype=scores.dtype)
            scores = scores.index_add(1, ids, -(self._presence + self._frequency * counts).unsqueeze(0))
        if self._repetition is not None:
            scores = self._repetition(self._seen, scores)
        if self._generator is None:
            token = int(scores.argmax(dim=-1))
        else:
            for warper in self._warpers:
                scores = warper(self._seen, scores)
            self._generator.manual_seed(_mixed(self._seed, self._position))
            token = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))
        self._position += 1
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None:
            self._seen = torch.cat((self._seen, torch.tensor([[token]], device=self._seen.device)), dim=1)
        if not self._want_logprobs:
            return Picked(token)
        logprobs = raw.log_softmax(dim=-1)[0]
        top: tuple[tuple[int, float], ...] = ()
        if self._top:
            values, ids = logprobs.topk(min(self._top, logprobs.shape[0]))
            top = tuple((i, max(v, _LOGPROB_FLOOR)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
        return Picked(token, max(float(logprobs[token]), _LOGPROB_FLOOR), top)


def _mixed(seed: int, position: int) -> int:
    """The seed of one position (SplitMix64): those of neighbours have nothing in common."""
    mixed = (seed + (position + 1) * _SEED_STRIDE) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return (mixed ^ (mixed >> 31)) >> 1


def _samples(request: GenerateRequest, defaults: SamplingDefaults) -> bool:
    if request.temperature is not None:
        # top_p 0 keeps the best token only; HF's warper would be asked for the same with a division less exact.
        return request.temperature > 0 and request.top_p != 0
    if request.top_p == 0:
        return False
    narrows = (
        (request.top_p is not None and request.top_p < 1) or request.top_k is not None or request.min_p is not None
    )
    return narrows or defaults.do_sample


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
