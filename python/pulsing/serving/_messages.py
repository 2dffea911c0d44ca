"""Chat messages of a request, brought into the form chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pulsing.core._shown import shown
from pulsing.serving._errors import RequestError

__all__ = ["parse_messages", "text_of"]

# Roles as templates know them: "developer" is OpenAI's newer word for "system", "function" the older one for "tool".
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NOT_TEXT = ("image", "image_url", "input_image", "input_audio", "audio", "video", "video_url", "file", "input_file")


def parse_messages(value: object) -> tuple[Mapping[str, Any], ...]:
    """Checked messages: known roles, ``content`` one string, tool calls with parsed arguments.

    Raises:
        RequestError: 400 with ``param`` naming the message and field.
    """
    if value is None:
        raise RequestError(400, "messages is missing: give a list of {role, content} objects", "messages")
    if not isinstance(value, list):
        raise RequestError(400, f"messages must be a list of objects, not {shown(value)}", "messages")
    if not value:
        raise RequestError(400, "messages is empty: give at least one message", "messages")
    return tuple([_plain(item) or _message(item, f"messages[{at}]") for at, item in enumerate(value)])


def _plain(value: object) -> dict[str, Any] | None:
    """A message that is a role and a text, as nearly all are; None for any other, and for what has to be looked at."""
    if not isinstance(value, dict) or len(value) != 2:
        return None
    role, content = value.get("role"), value.get("content")
    if isinstance(role, str) and role in _ROLES and isinstance(content, str) and content.isascii():
        return {"role": _ROLES[role], "content": content}
    return None


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(400, f"{where} must be an object with role and content, not {shown(value)}", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        said = "missing" if role is None else shown(role)
        raise RequestError(400, f"{where}.role is {said}; it must be one of {known}", f"{where}.role")
    tool_calls = value.get("tool_calls")
    content = value.get("content")
    if content is None and role != "assistant":
        raise RequestError(400, f"{where}.content is missing", f"{where}.content")
    message: dict[str, Any] = {"role": _ROLES[role], "content": _content(content, f"{where}.content")}
    if tool_calls:
        message["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = text_of(value[name], f"{where}.{name}")
    return message


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return text_of(value, where)
    if not isinstance(value, list):
        raise RequestError(400, f"{where} must be a string or a list of parts, not {shown(value)}", where)
    return "".join(_part(part, f"{where}[{at}]") for at, part in enumerate(value))


def _part(value: object, where: str) -> str:
    if isinstance(value, str):
        return text_of(value, where)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise RequestError(400, f"{where} must be an object with a type, not {shown(value)}", where)
    if kind in ("text", "input_text", "refusal"):
        text = value.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(400, f"{where} is a {kind} part without a text", where)
        return text_of(text, where)
    if kind in _NOT_TEXT:
        raise RequestError(400, f"{where} is a {kind} part; this model reads text only", where, "unsupported_content")
    raise RequestError(400, f"{where} has the unknown type {shown(kind)}; text parts are understood", where)


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestError(400, f"{where} must be a list, not {shown(value)}", where)
    calls: list[dict[str, Any]] = []
    for at, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, f"{where}[{at}] must hold a function with a name", f"{where}[{at}]")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # Templates iterate over the arguments; what is no JSON stays the text it was.
            with suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def text_of(value: str, where: str) -> str:
    """The text, if it is one: JSON can carry half a surrogate pair, which no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(400, f"{where} contains half of a surrogate pair, which is no text", where) from None
    return value
