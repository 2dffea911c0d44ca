"""Text on the command line becomes what the annotation asks for, or a refusal that says what would."""

import collections.abc
import dataclasses
import enum
import pathlib
from typing import Annotated, Any, Literal

import pytest

from pulsing.core._convert import ConvertError, describe, from_json, from_text


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclasses.dataclass
class Config:
    limit: int
    ratio: float = 1.0


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (str, "10", "10"),
        (int, "10", 10),
        (int, "-1", -1),
        (float, "1e-3", 0.001),
        (float, "2", 2.0),
        (bool, "True", True),
        (bool, "no", False),
        (bool, "0", False),
        (int | None, "none", None),
        (int | None, "3", 3),
        (str | None, "null", None),
        (str | None, "x", "x"),
        (int | str, "3", 3),
        (int | str, "three", "three"),
        (bool | int, "1", 1),
        (bool | int, "true", True),
        (float | Literal["auto"], "auto", "auto"),
        (float | Literal["auto"], "0.5", 0.5),
        (Literal["cpu", "cuda", "auto"], "cuda", "cuda"),
        (Literal["cpu", "cuda"], "CPU", "cpu"),
        (Literal[1, 2], "2", 2),
        (list[int], "1,2,3", [1, 2, 3]),
        (list[int], "[1, 2]", [1, 2]),
        (list[str], "", []),
        (list[str], "a, b", ["a", "b"]),
        (list[str] | None, "a,b", ["a", "b"]),
        (collections.abc.Sequence[float], "1,2", [1.0, 2.0]),
        (tuple[int, ...], "1,2", (1, 2)),
        (tuple[int, str], "1,2", (1, "2")),
        (set[int], "1,1", {1}),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (dict[int, str], '{"1": "x"}', {1: "x"}),
        (dict, '{"a": [1]}', {"a": [1]}),
        (dict[str, Any] | None, '{"a": null}', {"a": None}),
        (Any, '{"a": 1}', {"a": 1}),
        (Any, "plain", "plain"),
        (Color, "red", Color.RED),
        (Color, "b", Color.BLUE),
        (pathlib.Path, "a/b", pathlib.Path("a/b")),
        (Annotated[int, "unit"], "5", 5),
        (Config, '{"limit": 2}', Config(2)),
        (Config | None, '{"limit": 2, "ratio": 3}', Config(2, 3.0)),
    ],
)
def test_text_fits(annotation: Any, text: str, value: Any) -> None:
    got = from_text(annotation, text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "words"),
    [
        (int, "ten", "'ten' is not an int"),
        (int, "1.5", "not an int"),
        (float, "x", "not a float"),
        (float, "nan", "nan"),
        (bool, "maybe", "not a bool (true, false"),
        (Literal["a", "b"], "c", "none of a|b"),
        (int | None, "x", "'x' is not an int"),
        (int | float, "x", "not int | float"),
        (list[int], "1,x", "'x' is not an int"),
        (list[int], "[1", "not a list in JSON"),
        (tuple[int, int], "1", "1 values given"),
        (dict[str, int], "a=1", "not an object in JSON"),
        (dict[str, int], '{"a": "x"}', '"x" is not int'),
        (dict[str, int], "[1]", "[1] is not dict[str, int]"),
        (Color, "green", "none of red|blue"),
        (Config, '{"limits": 2}', "Config has no 'limits'; it has limit, ratio"),
        (Config, "{}", "missing"),
        (bytes, "x", "a bytes cannot be given on the command line"),
    ],
)
def test_text_that_does_not_fit_says_why(annotation: Any, text: str, words: str) -> None:
    with pytest.raises(ConvertError) as refused:
        from_text(annotation, text)
    assert words in str(refused.value)


def test_json_keeps_its_types() -> None:
    assert from_json(float, 1) == 1.0
    assert from_json(str | None, None) is None
    assert from_json(list[str], ["a"]) == ["a"]
    for annotation, value in [(int, "1"), (int, True), (bool, 1), (str, 1), (float, True), (Literal[1], True)]:
        with pytest.raises(ConvertError):
            from_json(annotation, value)


def test_annotations_read_like_a_user_would_write_them() -> None:
    assert describe(int | None) == "int | none"
    assert describe(Literal["cpu", "cuda"]) == "cpu|cuda"
    assert describe(dict[str, list[int]]) == "dict[str, list[int]]"
    assert describe(tuple[int, ...]) == "tuple[int, ...]"


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("[::1]:8000", ["[::1]:8000"]),
        (" [fd77::1]:8000,router:8000", ["[fd77::1]:8000", "router:8000"]),
        ("[::ffff:10.0.0.1]:80, [fd77::2]:80", ["[::ffff:10.0.0.1]:80", "[fd77::2]:80"]),
        ("router:8000,[::1]:8000", ["router:8000", "[::1]:8000"]),
        ('["[::1]:8000", "a:1"]', ["[::1]:8000", "a:1"]),
        ("[]", []),
    ],
)
def test_m6_a_list_that_begins_with_an_ipv6_address_is_no_json(text: str, seeds: list[str]) -> None:
    assert from_text(list[str], text) == seeds
