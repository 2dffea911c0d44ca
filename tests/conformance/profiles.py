"""Engine servers as they stream: what each of them does differently from OpenAI, in small."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tcp_server import listening

TEXT = "Grüße 😀 日本"
PIECES = ("Grüße ", "😀 ", "日本")
ARGUMENTS = ('{"a":', "1}")
PROFILES = ("vllm", "sglang", "llama_cpp", "tgi", "ollama", "transformers")
USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def _event(profile: str, choices: Any, **more: Any) -> bytes:
    head = {"id": f"{profile}-1", "object": "chat.completion.chunk", "created": 1, "model": "their/own-name"}
    if profile == "ollama":
        head |= {"system_fingerprint": "fp_ollama"}
    data = json.dumps({**head, "choices": choices, **more}, ensure_ascii=False).encode()
    # TGI writes no space, llama.cpp's proxies write CRLF.
    return b"data:" + data + b"\n\n" if profile == "tgi" else b"data: " + data + b"\r\n\r\n"


def _choice(profile: str, delta: Any, reason: str | None = None) -> list[dict[str, Any]]:
    choice: dict[str, Any] = {"delta": delta, "finish_reason": reason}
    if profile != "transformers":
        choice["index"] = 0
    if profile == "vllm":
        choice |= {"logprobs": None, "stop_reason": None}
    if profile == "sglang":
        choice |= {"logprobs": None, "matched_stop": 2 if reason else None}
    return [choice]


def _deltas(profile: str, case: str) -> Iterator[dict[str, Any]]:
    every = {"role": "assistant"} if profile in ("tgi", "ollama") else {}
    if profile in ("vllm", "sglang"):
        yield {"role": "assistant", "content": ""}
    if profile == "llama_cpp":
        yield {"role": "assistant", "content": None}
    if case != "tool":
        for piece in PIECES:
            yield {**every, "content": piece}
        return
    call: dict[str, Any] = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": ""}}
    if profile in ("ollama", "tgi"):
        # In one piece; TGI as an object.
        call["function"]["arguments"] = "".join(ARGUMENTS) if profile == "ollama" else {"a": 1}
        yield {**every, "content": "", "tool_calls": [{"index": 0, **call}]}
        return
    number = {"sglang": {"index": 1}, "transformers": {}}.get(profile, {"index": 0})
    yield {"tool_calls": [{**number, **call}]}
    for piece in ARGUMENTS:
        # Id and name once more, which clients would join to "addadd".
        name = {"name": "add"} if profile == "sglang" else {}
        yield {"tool_calls": [{**number, "function": {**name, "arguments": piece}}]}


def _reason(profile: str, case: str) -> str:
    if case == "tool":
        return "tool_calls"
    return {"tgi": "eos_token"}.get(profile, "stop")


def stream(profile: str, case: str, *, usage: bool) -> bytes:
    """The body of a streamed answer: ``text``, ``tool``, ``cut`` (no end) or ``error`` (an error event)."""
    out = b": hello\n\n" if profile == "llama_cpp" else b""
    deltas = list(_deltas(profile, case))
    if case in ("cut", "error"):
        out += b"".join(_event(profile, _choice(profile, delta)) for delta in deltas[:2])
        if case == "error":
            error: Any = {"message": "CUDA is out of memory", "type": "server_error", "param": None, "code": 500}
            shape = {"tgi": {"error": "CUDA is out of memory", "error_type": "generation"}}
            out += b"data: " + json.dumps(shape.get(profile, {"error": error})).encode() + b"\n\n"
        return out
    reason = _reason(profile, case)
    *first, last = deltas
    out += b"".join(_event(profile, _choice(profile, delta)) for delta in first)
    if profile in ("tgi", "ollama") or (profile == "transformers" and case == "text"):
        # The last text shares a chunk with the reason.
        out += _event(profile, _choice(profile, last, reason), usage=USAGE if profile == "tgi" else None)
    else:
        out += _event(profile, _choice(profile, last))
        end: Any = {"role": None, "content": None} if profile == "sglang" else {}
        more: Any = {"usage": USAGE, "timings": {"predicted_ms": 1.5}} if profile == "llama_cpp" else {}
        out += _event(profile, _choice(profile, end, reason), **more)
    if usage and profile in ("vllm", "sglang", "ollama"):
        out += _event(profile, [], usage=USAGE)
    return out if profile in ("tgi", "transformers") else out + b"data: [DONE]\n\n"


def whole(profile: str, case: str) -> dict[str, Any]:
    """The body of an answer in one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": TEXT}
    if case == "tool":
        arguments: Any = {"a": 1} if profile == "tgi" else "".join(ARGUMENTS)
        call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": _reason(profile, case)}
    return {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}


@contextlib.asynccontextmanager
async def engine(profile: str) -> AsyncIterator[str]:
    """A server that answers by the last message; what it streams is cut into small pieces. Gives its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await _serve(profile, reader, writer)

    async with listening(serve) as addr:
        yield f"http://{addr}"


async def _serve(profile: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split(" ", 2)
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    if method == "GET" and path == "/v1/models":
        _answer(writer, 200, {"object": "list", "data": [{"id": f"{profile}-model", "owned_by": profile}]})
        return
    if path != "/v1/chat/completions":
        _answer(writer, 404, {"detail": "Not Found"})
        return
    asked = json.loads(body)
    content = asked["messages"][-1]["content"]
    case = content if isinstance(content, str) else content[0]["text"]
    if case == "long":
        message = "This model's maximum context length is 5 tokens. However, you asked for more."
        _answer(writer, 400, {"object": "error", "message": message, "type": "BadRequestError", "code": 400})
        return
    if not asked.get("stream"):
        _answer(writer, 200, whole(profile, case))
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    events = stream(profile, case, usage=bool((asked.get("stream_options") or {}).get("include_usage")))
    for at in range(0, len(events), 97):
        piece = events[at : at + 97]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    raw = json.dumps(body, ensure_ascii=False).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
