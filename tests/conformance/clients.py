"""What every client is asked to do, and what it must make of it."""

import json
from typing import Any, Protocol

from profiles import ARGUMENTS, TEXT

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class Client(Protocol):
    """A client library, in four words."""

    def text(self, model: str, prompt: str, *, stream: bool) -> tuple[str, str, tuple[int, int] | None]:
        """Text, finish reason, and (prompt, completion) tokens where it was told."""

    def call(self, model: str, *, stream: bool) -> tuple[str, str, str]:
        """Id, name and arguments of the one tool call."""

    def failure(self, model: str, prompt: str, *, stream: bool) -> str:
        """The text of the error that it raises."""


def says(command: str, backend: str) -> str:
    """The prompt that makes a backend do as it is told."""
    actor = {"text": TEXT, "cut": "break", "error": "break", "long": "fail 400"}
    return actor.get(command, command) if backend == "actor" else command


def check_text(client: Client, backend: str, *, stream: bool) -> None:
    text, reason, usage = client.text(backend, says("text", backend), stream=stream)
    assert (text, reason) == (TEXT, "stop")
    # transformers serve tells no usage when it streams.
    assert usage == (4, 3) or (usage is None and stream and backend == "transformers"), usage


def check_call(client: Client, backend: str, *, stream: bool) -> None:
    identity, name, arguments = client.call(backend, stream=stream)
    assert identity
    assert (name, json.loads(arguments)) == ("add", json.loads("".join(ARGUMENTS)))


def check_broken(client: Client, backend: str, command: str) -> None:
    # A short answer that looks whole would raise nothing.
    message = client.failure(backend, says(command, backend), stream=True)
    if command == "error":
        assert ("engine broke" if backend == "actor" else "CUDA is out of memory") in message


def check_refused(client: Client, backend: str, *, stream: bool) -> None:
    assert "maximum context length is 5 tokens" in client.failure(backend, says("long", backend), stream=stream)
