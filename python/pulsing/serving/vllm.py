"""The place of the vLLM worker, which a later version brings."""

from __future__ import annotations

from typing import Any

from pulsing.exceptions import PulsingUnsupportedError
from pulsing.serving.worker import Worker

__all__ = ["VllmWorker"]


class VllmWorker(Worker):
    """Serves a model with vLLM. Not in this version: constructing it says so at once.

    Args:
        model: a hub id or a local directory.
        options: whatever else vLLM's engine takes.
    """

    engine = "vllm"

    def __init__(self, model: str, **options: Any) -> None:
        del options
        raise PulsingUnsupportedError(
            "vLLM workers come with a later version of Pulsing; pulsing.serving.TransformersWorker serves the same "
            f"model now: --model_name {model}"
        )
