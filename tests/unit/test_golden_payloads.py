"""What the runtime's Python values are on the wire: calls, answers, references, errors.

A node of a neighbouring version reads and writes these (docs/guides/upgrading.md). One file for each, which may be
added but never changed once a version has been released: its codec, its head and its buffers, ``xx*n`` for n times one
byte. The pickles name functions and classes of private modules, which therefore cannot be moved or renamed either.
What Rust puts around them stands in `crates/pulsing-core/tests/golden`.
"""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from pulsing.core import ActorProxy, ActorRef, Message
from pulsing.core._dispatch import OP_AUTO, OP_CALL, OP_GET, OP_MESSAGE
from pulsing.core._errors import encode as encode_error
from pulsing.core._ids import ActorId, NodeId
from pulsing.core._outbound import _envelope
from pulsing.core._pickle import loads
from pulsing.core._reply import decode, encode
from pulsing.exceptions import PulsingBusinessError

FOLDER = pathlib.Path(__file__).parent / "golden_payloads" / "v1"

Parts = tuple[int, bytes, list[Any]]

SYSTEM: Any = SimpleNamespace(node_id=NodeId(bytes(16)), counts=SimpleNamespace(bytes_copied=0))
"""Whom references belong to."""
REF = ActorRef(SYSTEM, NodeId(bytes(range(16))), ActorId(bytes(range(16, 32))), "worker")
BLOCK = b"\x07" * (1 << 16)
"""As long as what leaves the pickle."""
ARGUMENTS: tuple[Any, ...] = (1, -2.5, "é", None, True, b"\x00\xff", [1, (2, {"k": "v"})])

CALLS: dict[str, tuple[Any, ...]] = {
    "call": (OP_CALL, "echo", ARGUMENTS, {"flag": False}, None),
    "call-carrying": (OP_CALL, "echo", (1,), {}, {"tenant": "acme"}),
    "call-with-site": (OP_CALL, "echo", (1,), {}, None, ("main.py", 7, "node")),
    "call-large": (OP_CALL, "store", (BLOCK, {"deep": bytearray(BLOCK)}), {}, None),
    "call-view": (OP_CALL, "store", (memoryview(bytearray(b"\x05" * 4096)), memoryview(b"ab")), {}, None),
    "call-references": (OP_CALL, "meet", (REF, ActorProxy(REF, None)), {}, None),
    "get": (OP_GET, "count", (), {}, None),
    "auto": (OP_AUTO, "", ("anything",), {}, None),
    "message": (OP_MESSAGE, "", (Message("kind", b"body"),), {}, None),
    "message-carrying": (OP_MESSAGE, "", (Message("kind", b"body"),), {}, {"tenant": "acme"}),
}
ANSWERS: dict[str, Any] = {
    "answer": {"text": "x", "numbers": (1, 2)},
    "answer-large": [BLOCK, "end"],
    "answer-message": Message("kind", b"body"),
    "answer-reference": REF,
}
ERRORS: dict[str, BaseException] = {
    "error": ValueError("no", 7),
    "error-business": PulsingBusinessError(404, "no such thing", "details"),
}


def payloads() -> dict[str, Parts]:
    """All of them, as this tree writes them."""
    made = {name: _envelope(*call) for name, call in CALLS.items()}
    made |= {name: encode(value) for name, value in ANSWERS.items()}
    return made | {name: (0, encode_error(error)[3], []) for name, error in ERRORS.items()}


def _shown(block: Any) -> str:
    raw = bytes(memoryview(block).cast("B"))
    return f"{raw[0]:02x}*{len(raw)}" if len(raw) > 64 and len(set(raw)) == 1 else raw.hex()


def _block(shown: str) -> bytes:
    one, _, times = shown.partition("*")
    return bytes.fromhex(one) * int(times or 1)


def _text(parts: Parts) -> str:
    codec, head, buffers = parts
    return "\n".join([str(codec), _shown(head), *map(_shown, buffers)]) + "\n"


def _read(name: str) -> Parts:
    codec, head, *buffers = (FOLDER / f"{name}.txt").read_text().removesuffix("\n").split("\n")
    return int(codec), _block(head), [bytearray(_block(one)) for one in buffers]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Message):
        return isinstance(other, Message) and (one.msg_type, one.payload) == (other.msg_type, other.payload)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", sorted(payloads()))
def test_a_value_is_written_as_its_file_says(name: str) -> None:
    file = FOLDER / f"{name}.txt"
    written = _text(payloads()[name])
    assert (file.read_text() if file.exists() else "") == written, f"{file} would be\n{written}"


def test_every_file_is_of_a_value() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(payloads())


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("message")])
def test_a_call_of_the_file_is_read(name: str) -> None:
    op, method, args, kwargs, carried, *more = CALLS[name]
    read = decode(*_read(name), SYSTEM)
    assert read[:2] == (op, method)
    assert _same(read[2], args)
    assert read[3] == kwargs
    assert len(read) == 4 + (2 if more else 1 if carried else 0)
    if more:
        assert read[5] == more[0]
    if carried:
        assert {key: loads(value) for key, value in read[4].items()} == carried


@pytest.mark.parametrize("name", ["message", "message-carrying"])
def test_a_message_of_the_file_is_read(name: str) -> None:
    codec, head, buffers = _read(name)
    assert _same(decode(codec, head, buffers, SYSTEM), CALLS[name][2][0])
    for packed in buffers[1:]:
        assert {key: loads(value) for key, value in loads(bytes(packed)).items()} == CALLS[name][4]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_the_file_is_read(name: str) -> None:
    assert _same(decode(*_read(name), SYSTEM), ANSWERS[name])


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_the_file_is_read(name: str) -> None:
    read, error = loads(_read(name)[1]), ERRORS[name]
    assert (type(read), read.args, vars(read)) == (type(error), error.args, vars(error))
