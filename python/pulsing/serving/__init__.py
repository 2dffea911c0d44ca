"""Serving language models: Routers, Workers around engines, schedulers.

Nothing here is imported before it is used: a Router must not pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsing.serving._schedulers import (
        RUST_POLICIES_AVAILABLE,
        LeastConnectionScheduler,
        RandomScheduler,
        RoundRobinScheduler,
        RustCacheAwareScheduler,
        RustConsistentHashScheduler,
        RustPowerOfTwoScheduler,
        RustRandomScheduler,
        RustRoundRobinScheduler,
        Scheduler,
        StreamLoadScheduler,
        WorkerInfo,
        get_scheduler,
    )
    from pulsing.serving.engine import EngineWorker
    from pulsing.serving.mistralrs import MistralRsWorker
    from pulsing.serving.router import Router, RouterRunner, start_router, stop_router
    from pulsing.serving.transformers import TransformersWorker
    from pulsing.serving.vllm import VllmWorker
    from pulsing.serving.worker import (
        Delta,
        Embeddings,
        EmbedRequest,
        GenerateRequest,
        RequestError,
        TokenizeRequest,
        Tokens,
        Usage,
        Worker,
    )

__all__ = [
    "RUST_POLICIES_AVAILABLE",
    "Delta",
    "EmbedRequest",
    "Embeddings",
    "EngineWorker",
    "GenerateRequest",
    "LeastConnectionScheduler",
    "MistralRsWorker",
    "RandomScheduler",
    "RequestError",
    "RoundRobinScheduler",
    "Router",
    "RouterRunner",
    "RustCacheAwareScheduler",
    "RustConsistentHashScheduler",
    "RustPowerOfTwoScheduler",
    "RustRandomScheduler",
    "RustRoundRobinScheduler",
    "Scheduler",
    "StreamLoadScheduler",
    "TokenizeRequest",
    "Tokens",
    "TransformersWorker",
    "Usage",
    "VllmWorker",
    "Worker",
    "WorkerInfo",
    "get_scheduler",
    "start_router",
    "stop_router",
]

_HOMES = {
    "EngineWorker": "engine",
    "MistralRsWorker": "mistralrs",
    "TransformersWorker": "transformers",
    "VllmWorker": "vllm",
    **dict.fromkeys(("Router", "RouterRunner", "start_router", "stop_router"), "router"),
    **dict.fromkeys(
        (
            "Delta",
            "EmbedRequest",
            "Embeddings",
            "GenerateRequest",
            "RequestError",
            "TokenizeRequest",
            "Tokens",
            "Usage",
            "Worker",
        ),
        "worker",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES.get(name, '_schedulers')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
