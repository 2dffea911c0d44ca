"""One thread that decodes many sequences, a token of each in turn.

Each sequence has its own KV cache, sampler and text state, so what one request asks for cannot disturb another. The
sequences are not batched into one matrix: correct first, and on a CPU a batch of small models gains little.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pulsing.serving._sampling import Picked, Sampler
from pulsing.serving._text import StopFilter

__all__ = ["DecodeLoop", "Piece", "SequenceJob"]

_log = logging.getLogger("pulsing.serving")

# Prompt tokens a step: between two chunks the other sequences get their token, and a cancelled prompt ends.
_PREFILL_CHUNK = 256
# Pieces a slow reader may leave unread before its sequence rests.
_UNREAD_LIMIT = 64


class Detokenizer(Protocol):
    """See ``_text``."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What became ready of one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    picked: tuple[Picked, ...]
    generated: int
    """Tokens generated so far, an end token among them."""
    finish_reason: str | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class SequenceJob:
    """One choice of one request.

    Args:
        index: number of the choice.
        ids: prompt, and what is to be continued.
        max_new: tokens to generate at most.
        end_tokens: ids that end the answer and are no text.
        sampler: picks the tokens.
        detokenizer: turns them into text.
        stops: cuts the text.
        emit: takes each piece; called on the engine's thread; ``False`` from it means nobody reads any more.
    """

    index: int
    ids: Sequence[int]
    max_new: int
    end_tokens: frozenset[int]
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopFilter
    emit: Callable[[Piece], bool]
    cancelled: bool = False
    consumed: int = 0
    """Pieces read; written by the reader only."""
    produced: int = 0
    """Pieces emitted; written by the engine only."""
    cache: Any = None
    prefilled: int = 0
    last: int | None = None
    generated: int = 0
    held_ids: list[int] = field(default_factory=list)
    held_picked: list[Picked] = field(default_factory=list)

    def resting(self) -> bool:
        """Whether the reader is too far behind."""
        return self.produced - self.consumed >= _UNREAD_LIMIT

    def accept(self, picked: Picked) -> bool:
        """Take a token, emit what became text; whether the sequence goes on."""
        self.generated += 1
        self.last = picked.token
        finish: str | None = None
        text = ""
        if picked.token in self.end_tokens:
            finish = "stop"
        else:
            self.held_ids.append(picked.token)
            self.held_picked.append(picked)
            text = self.stops.feed(self.detokenizer.feed(picked.token))
            if self.stops.stopped:
                finish = "stop"
            elif self.generated >= self.max_new:
                finish = "length"
        if finish is not None and not self.stops.stopped:
            text += self.stops.feed(self.detokenizer.flush())
            # The last bytes can complete a stop string too.
            finish = "stop" if self.stops.stopped else finish
            text += self.stops.flush()
        if not text and finish is None:
            return True
        return self._give(text, finish)

    def _give(self, text: str, finish: str | None) -> bool:
        self.produced += 1
        piece = Piece(
            self.index, text, tuple(self.held_ids), tuple(self.held_picked), self.generated, finish_reason=finish
        )
        self.held_ids.clear()
        self.held_picked.clear()
        return self.emit(piece) and finish is None

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.emit(Piece(self.index, "", (), (), self.generated, error=error))


class DecodeLoop:
    """The engine's thread.

    Args:
        model: a causal language model of transformers, in eval mode.
        name: the thread's name.
        threads: torch threads, or ``None`` to leave torch's own choice.
        progressed: called on the engine's thread after each part of a prompt.
    """

    def __init__(
        self, model: Any, name: str, threads: int | None = None, progressed: Callable[[], None] | None = None
    ) -> None:
        self._model = model
        self._progressed = progressed
        self._threads = threads
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument; both are tried so that all of 5.x serves.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._arrived: deque[SequenceJob] = deque()
        self._wake = threading.Event()
        self._closed = False
        self.steps = 0
        """Forward passes since the start: what a test watches to see that a cancelled request costs nothing more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: SequenceJob) -> None:
        """Start a sequence. Any thread."""
        self._arrived.append(job)
        self._wake.set()

    def wake(self) -> None:
        """Look again: a job was cancelled, or its reader caught up. Any thread."""
        self._wake.set()

    def close(self) -> None:
        """End the thread after the token it is at; blocks until then (5 s at most)."""
        self._closed = True
        self._wake.set()
        self._thread.join(5)

    def _run(self) -> None:
        import torch

        if self._threads is not None:
            torch.set_num_threads(self._threads)
        active: list[SequenceJob] = []
        with torch.inference_mode():
            while not self._closed:
                while self._arrived:
                    active.append(self._arrived.popleft())
                active = [job for job in active if not job.cancelled]
                ready = [job for job in active if not job.resting()]
                if not ready:
                    self._wake.wait()
                    self._wake.clear()
                    continue
                for job in ready:
                    if self._closed or (not job.cancelled and not self._advance(job)):
                        job.cancelled = True
                        job.cache = None
        for job in [*active, *self._arrived]:
            job.fail(RuntimeError("the engine was stopped"))

    def _advance(self, job: SequenceJob) -> bool:
        """One step of one sequence; whether it goes on."""
        try:
            if job.prefilled < len(job.ids):
                chunk = list(job.ids[job.prefilled : job.prefilled + _PREFILL_CHUNK])
                logits = self._forward(job, chunk)
                job.prefilled += len(chunk)
                if self._progressed is not None:
                    self._progressed()
                if job.prefilled < len(job.ids):
                    return True
            else:
                assert job.last is not None  # a prefilled sequence has picked a token
                logits = self._forward(job, [job.last])
            return job.accept(job.sampler.pick(logits))
        except BaseException as error:  # noqa: BLE001 - carried to the request, whatever it is
            # Out of memory, a bad kernel: this sequence ends, the others go on.
            _log.exception("decoding failed")
            job.fail(error)
            return False

    def _forward(self, job: SequenceJob, ids: list[int]) -> Any:
        import torch
        from transformers import DynamicCache

        if job.cache is None:
            job.cache = DynamicCache(config=self._model.config)
        self.steps += 1
        tokens = torch.tensor([ids], device=self._model.device)
        output = self._model(
            input_ids=tokens, use_cache=True, return_dict=True, **{self._cache_name: job.cache}, **self._extra
        )
        return output.logits[0, -1]
