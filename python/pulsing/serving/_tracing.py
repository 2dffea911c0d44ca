"""Spans of workers: what a request cost here, below the Router's span of it."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING

from pulsing import _core
from pulsing.serving._router_settings import otlp_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pulsing.core import ActorSystem

__all__ = ["Spans"]

_log = logging.getLogger("pulsing.serving")

ENDPOINT = "PULSING_OTLP_ENDPOINT"
"""The collector (OTLP/HTTP), as for Routers. Without it nothing is recorded."""
HEADERS_FILE = "PULSING_OTLP_HEADERS_FILE"
"""File of the headers that it wants, as for Routers."""


class Spans:
    """Sends a span for each request of a worker that belongs to a trace.

    Args:
        system: The node, whose threads send.
        service: `service.name` of the spans.
        environ: Where ``PULSING_OTLP_ENDPOINT`` and the collector's headers are looked up. What cannot be used is
            logged, and the worker serves without: it has been told so at its Router's start.
    """

    def __init__(self, system: ActorSystem, service: str, environ: Mapping[str, str] = os.environ) -> None:
        self._tracer: _core.Tracer | None = None
        if endpoint := environ.get(ENDPOINT):
            try:
                self._tracer = _core.Tracer(
                    system.core,
                    endpoint,
                    service,
                    headers_file=environ.get(HEADERS_FILE) or None,
                    headers=otlp_headers(environ),
                )
            except ValueError as error:
                _log.warning("%s: %s; no spans are recorded", ENDPOINT, error)

    @property
    def recording(self) -> bool:
        """Whether there is anybody to send to."""
        return self._tracer is not None

    def record(
        self, wire: _core.WorkerRequest, began: float, model: str, engine: str, error: str | None, *, ended: str
    ) -> None:
        """One request that is over.

        Args:
            wire: What was asked; its trace context is that of the Router.
            began: When, in seconds since 1970.
            model: The worker's name for its model.
            engine: The engine's name.
            error: What went wrong.
            ended: ``complete``, ``failed`` or ``cancelled``.
        """
        if self._tracer is None or not wire.traceparent:
            return
        attributes = {
            "pulsing.request_id": wire.request_id,
            "pulsing.api": wire.api,
            "pulsing.engine": engine,
            "pulsing.outcome": ended,
            "gen_ai.response.model": model,
        }
        self._tracer.record(wire.traceparent, f"{wire.kind} {model}", began, time.time(), json.dumps(attributes), error)
