"""Ids, exceptions, messages and pickles as values."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

import pulsing as pul
from pulsing import exceptions as ex
from pulsing.core import Message, NodeId
from pulsing.core._errors import encode, from_core
from pulsing.core._pickle import dumps, loads


def test_ids_print_as_32_hex_digits_and_read_back() -> None:
    one = pul.ActorId.generate()
    assert len(str(one)) == 32
    for spelling in (str(one), str(one.uuid()), str(one.id)):
        assert pul.ActorId.from_str(spelling) == one
    assert pul.ActorId(one.id) == one
    assert pul.ActorId(0xAB) == pul.ActorId("000000000000000000000000000000ab")
    assert hash(pul.ActorId(one.raw)) == hash(one)
    assert one != NodeId(one.raw)
    assert pickle.loads(pickle.dumps(one)) == one
    assert NodeId.local().is_local()
    assert str(NodeId.local()) == "0" * 32
    for bad in ("zz", "", -1, 1 << 128, b"short"):
        with pytest.raises(ValueError, match="ActorId"):
            pul.ActorId(bad)
    with pytest.raises(AttributeError):
        one.raw = b""


ERRORS = [
    ex.PulsingError("text"),
    ex.PulsingRuntimeError("text", ValueError("x")),
    ex.PulsingActorError("text", "actor"),
    ex.PulsingBusinessError(404, "nothing", "details"),
    ex.PulsingSystemError("broken", False),
    ex.PulsingTimeoutError("a thing", 1500),
    ex.PulsingUnsupportedError("that"),
    ex.NameNotFoundError("who"),
    ex.MailboxFull("full"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_exceptions_survive_a_trip(error: ex.PulsingError) -> None:
    type_name, message, code, data, traceback = encode(error)
    fields = {"type_name": type_name, "message": message, "code": code, "data": data, "traceback": traceback}
    back = from_core(("app", "", fields, "yes"))
    assert type(back) is type(error)
    assert str(back) == str(error)
    for key, value in vars(error).items():
        if key != "cause":
            assert getattr(back, key) == value
    assert isinstance(back.__cause__, ex.RemoteTraceback)


def test_what_cannot_be_rebuilt_names_its_type() -> None:
    class AwkwardError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("only text")

    class UnpicklableError(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("no")

    for error in (AwkwardError(1, 2), UnpicklableError("x")):
        type_name, message, code, data, traceback = encode(error)
        fields = {"type_name": type_name, "message": message, "code": code, "data": data, "traceback": traceback}
        back = from_core(("app", "", fields, "yes"))
        assert type(back) is ex.PulsingActorError
        assert type(error).__qualname__ in str(back)
        assert back.type_name == type_name
        assert str(error) in back.remote_traceback


def test_a_foreign_exit_does_not_end_this_process() -> None:
    _, _, _, data, _ = encode(SystemExit(3))
    fields = {"type_name": "builtins.SystemExit", "message": "3", "code": 0, "data": data, "traceback": ""}
    assert type(from_core(("app", "", fields, "yes"))) is ex.PulsingActorError


def test_the_printed_tree_is_the_real_one() -> None:
    printed: dict[str, str | None] = {}
    at_depth: dict[int, str] = {}
    for line in (ex.__doc__ or "").splitlines():
        indent = len(line) - len(line.lstrip("│├└─ "))
        name = line[indent:].split(" ")[0]
        if isinstance(getattr(ex, name, None), type):
            at_depth[indent] = name
            printed[name] = at_depth.get(indent - 4)
    real = {name for name in ex.__all__ if issubclass(getattr(ex, name), ex.PulsingError)}
    assert set(printed) == real
    for name, parent in printed.items():
        if parent is not None:
            assert getattr(ex, name).__mro__[1].__name__ == parent


def test_retry_advice() -> None:
    assert ex.ConnectFailedError("x").retry_safe
    assert not ex.ConnectionLostError("x").retry_safe
    assert not ex.PulsingTimeoutError("x").retry_safe
    assert ex.MailboxFull("x").retry_safe
    lost = from_core(("connection_lost", "gone", {"addr": "a"}, "maybe"))
    assert isinstance(lost, ConnectionError)


def test_large_buffers_leave_the_pickle_and_come_back_writable() -> None:
    block = bytearray(100_000)
    head, buffers = dumps({"block": pickle.PickleBuffer(block), "small": 1})
    assert len(head) < 1000
    assert [len(buffer) for buffer in buffers] == [100_000]
    back = loads(head, [bytearray(buffer) for buffer in buffers])
    memoryview(back["block"])[0] = 7
    assert back["small"] == 1


def test_lambdas_and_local_classes_travel_by_value() -> None:
    class Local:
        x = 5

    double, cls = loads(*dumps((lambda n: 2 * n, Local)))
    assert double(4) == 8
    assert cls.x == 5
    with pytest.raises(TypeError, match="cannot send a generator"):
        dumps(n for n in range(3))


def test_messages() -> None:
    message = Message.from_json("Kind", {"a": [1]})
    assert message.to_json() == {"a": [1]}
    assert pickle.loads(pickle.dumps(message)) == message
    assert Message.empty() == Message("", b"")
    assert not message.is_stream


def test_import_is_light() -> None:
    heavy = {"typer", "cloudpickle", "uvloop", "torch", "numpy", "transformers", "multiprocessing", "http"}
    code = "import sys, pulsing; print(' '.join(m for m in sys.modules if '.' not in m))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & heavy


def test_every_public_name_exists() -> None:
    import pulsing.admin
    import pulsing.core

    for module in (pul, pulsing.core, pulsing.admin, ex):
        assert sorted(set(module.__all__)) == sorted(module.__all__)
        for name in module.__all__:
            assert hasattr(module, name)
