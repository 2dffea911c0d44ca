"""R7: errors travel with their traceback, as text that costs little."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from pulsing.core import _tracebacks
from pulsing.core._errors import encode
from pulsing.core._tracebacks import text_of_traceback
from pulsing.exceptions import RemoteTraceback


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def plain() -> None:
    raise ValueError("two\nlines")


def marked() -> None:
    table, key = {"x": 1}, "x"
    assert table[key] + table["not" + key] == 2


def caused() -> None:
    try:
        marked()
    except KeyError as error:
        raise ValueError from error


def during() -> None:
    try:
        caused()
    except ValueError:
        marked()


def hidden() -> None:
    try:
        plain()
    except ValueError:
        raise OSError(2, "none such") from None


def recursion(depth: int = 20) -> None:
    if depth == 0:
        plain()
    recursion(depth - 1)


def thrice() -> None:
    recursion(2)


def remote() -> None:
    error = KeyError("there")
    error.__cause__ = RemoteTraceback("Traceback:\n  there\n")
    raise error


def round_about() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    raise one


def noted() -> None:
    error = ValueError("with a note")
    error.add_note("a\nnote")
    raise error


def group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def without_source() -> None:
    exec(compile("def f():\n  1 / 0\nf()", "<generated>", "exec"), {})


FAILING: list[Callable[[], Any]] = [
    plain,
    marked,
    caused,
    during,
    hidden,
    recursion,
    thrice,
    remote,
    round_about,
    noted,
    group,
    without_source,
    lambda: no_such_nam,  # type: ignore[name-defined]  # noqa: F821
    lambda: compile("x = (", "here", "exec"),
    lambda: [].appendd,  # type: ignore[attr-defined]
    lambda: (_ for _ in ()).throw(WordlessError()),
]


def raised(failing: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 - of any kind
        failing()
    return info.value


@pytest.mark.parametrize("failing", FAILING)
def test_r7_tracebacks_read_as_pythons_own(failing: Callable[[], Any]) -> None:
    error = raised(failing)
    for _ in range(2):
        assert text_of_traceback(error) == "".join(traceback.format_exception(error))


def test_r7_an_error_that_was_never_raised_has_a_last_line() -> None:
    assert text_of_traceback(ValueError("never raised")) == "ValueError: never raised\n"


def test_r7_a_limit_of_the_users_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(caused)
    monkeypatch.setattr(sys, "tracebacklimit", 1, raising=False)
    assert text_of_traceback(error) == "".join(traceback.format_exception(error))


def test_r7_a_place_that_failed_before_asks_no_file_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = encode(raised(during))[4]
    asked: list[Any] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: (asked.append(args), stat(*args, **kwargs))[1])
    monkeypatch.setattr(linecache, "getlines", lambda *args: asked.append(args) or [])
    error = raised(during)
    asked.clear()
    assert encode(error)[4] == before
    assert asked == []


def test_r7_equal_code_of_two_files_keeps_its_places() -> None:
    codes = [compile("def f():\n  1 / 0\nf()", name, "exec") for name in ("<one>", "<two>")]
    one, two = (text_of_traceback(raised(lambda code=code: exec(code, {}))) for code in codes)
    assert codes[0].co_consts[0] == codes[1].co_consts[0]
    assert "<one>" in one
    assert "<two>" in two
    assert "<one>" not in two


def test_what_is_kept_of_tracebacks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tracebacks, "_KEPT", 8)
    monkeypatch.setattr(_tracebacks, "_texts", {})
    for failing in FAILING * 2:
        text_of_traceback(raised(failing))
    assert len(_tracebacks._texts) <= 8
