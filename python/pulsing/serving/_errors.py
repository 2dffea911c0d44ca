"""The one exception with which an engine refuses or fails a request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulsing.core._inbound import InboundCall

__all__ = ["RequestError"]

# OpenAI's error types by HTTP status; anything else follows its class (4xx the client's, 5xx ours).
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}


class RequestError(Exception):
    """A request that ends with an HTTP error in OpenAI's shape.

    Raised by ``Worker.generate`` (before the first delta it becomes the HTTP status; later it ends the stream as an
    error event) and by the shared request parser.

    Args:
        status: HTTP status, 400..599.
        message: what is wrong and the way out, for the client's eyes.
        param: the request field at fault, e.g. ``"messages[0].content"``.
        code: a machine-readable word, e.g. ``"context_length_exceeded"``.
        type: OpenAI's error type; derived from the status when not given.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
    ) -> None:
        if not 400 <= status <= 599:
            raise ValueError(f"RequestError status must be an HTTP error, 400..599, not {status}")
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")

    def __reduce__(self) -> tuple[type[RequestError], tuple[int, str, str | None, str | None, str]]:
        return (RequestError, (self.status, self.message, self.param, self.code, self.type))

    def to_json(self) -> bytes:
        """The OpenAI error object (what stands under ``"error"``) as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps(error, ensure_ascii=False).encode("utf-8", "replace")

    def fail(self, call: InboundCall) -> None:
        """Ends a call of the worker protocol with it."""
        call.fail("pulsing.serving.RequestError", self.message, code=self.status, data=self.to_json())
