"""What stands after `--` becomes constructor arguments; what cannot be meant is told what would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest

from pulsing.cli._constructor import arguments, constructor_of, help_text
from pulsing.cli._errors import MisuseError

if TYPE_CHECKING:
    from somewhere import Unknown


class Engine:
    """An engine.

    Args:
        model_name: hub id, directory or `DIR/FILE.gguf`,
            as the hub writes it.
        device: where to run.
        preload (bool): load before the first request.
    """

    def __init__(
        self,
        model_name: str,
        device: Literal["auto", "cpu"] = "auto",
        preload: bool = True,
        layers: list[int] | None = None,
        options: dict[str, Any] | None = None,
        ratio: float = 0.5,
        hook: Unknown | None = None,
        *,
        untyped=3,
    ) -> None:
        pass


class Open:
    def __init__(self, size: int = 1, **kwargs: Any) -> None:
        pass


class Bare:
    pass


ENGINE = constructor_of(Engine, "pkg.Engine")
OPTIONS = {"addr", "seeds", "name"}


def parse(*tokens: str, defines: tuple[str, ...] = ()) -> dict[str, Any]:
    return arguments(ENGINE, tokens, defines, OPTIONS)


def refusal(*tokens: str, defines: tuple[str, ...] = ()) -> str:
    with pytest.raises(MisuseError) as refused:
        parse(*tokens, defines=defines)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_every_spelling_of_key_and_value() -> None:
    assert parse("--model_name", "m", "--ratio=2", "--untyped", "7") == {"model_name": "m", "ratio": 2.0, "untyped": 7}
    assert parse("--model-name=m=1") == {"model_name": "m=1"}
    assert parse("--model_name", "m", "--preload") == {"model_name": "m", "preload": True}
    assert parse("--preload", "--model_name", "m") == {"model_name": "m", "preload": True}
    assert parse("--model_name", "m", "--preload", "False")["preload"] is False
    assert parse("--model_name", "m", "--ratio", "-1")["ratio"] == -1.0
    assert parse("--model_name=--odd")["model_name"] == "--odd"


def test_lists_add_up_and_others_must_not_repeat() -> None:
    assert parse("--model_name", "m", "--layers", "1,2", "--layers", "3")["layers"] == [1, 2, 3]
    assert "given 2 times" in refusal("--model_name", "a", "--model_name", "b")


def test_defines_are_json_and_the_command_line_wins() -> None:
    define = 'actor.extra_kwargs={"model_name": "d", "ratio": 1, "options": {"a": 1}}'
    got = parse("--ratio", "3", defines=(define,))
    assert got == {"model_name": "d", "ratio": 3.0, "options": {"a": 1}}
    assert "not JSON" in refusal(defines=("actor.extra_kwargs={",))
    assert "JSON object" in refusal(defines=("actor.extra_kwargs=[1]",))
    assert "JSON object" in refusal(defines=("actor.extra_kwargs",))
    assert "did you mean actor.extra_kwargs" in refusal(defines=("actor.extra_kwarg={}",))
    assert '"x" is not float' in refusal(defines=('actor.extra_kwargs={"model_name": "d", "ratio": "x"}',))
    assert "did you mean ratio" in refusal(defines=('actor.extra_kwargs={"ration": 1}',))


def test_unknown_parameters_get_the_nearest_and_the_list() -> None:
    text = refusal("--model_nam", "m")
    assert "pkg.Engine has no constructor parameter --model_nam - did you mean model_name?" in text
    assert "--model_name, --device, --preload" in text
    assert "put it before --" in refusal("--model_name", "m", "--seeds", "x")


def test_missing_and_malformed() -> None:
    text = refusal("--device", "cpu")
    assert "pkg.Engine needs --model_name" in text
    assert "-- --model_name VALUE" in text
    assert "--device needs a value (auto|cpu)" in refusal("--model_name", "m", "--device")
    assert "none of auto|cpu" in refusal("--model_name", "m", "--device", "tpu")
    assert "unexpected 'stray'" in refusal("stray")
    assert "unexpected '-x'" in refusal("-x")


def test_kwargs_take_anything() -> None:
    got = arguments(constructor_of(Open, "Open"), ["--size", "2", "--extra-thing", "[1]", "--flag"], [], OPTIONS)
    assert got == {"size": 2, "extra_thing": [1], "flag": True}


def test_a_class_without_a_constructor_takes_nothing() -> None:
    bare = constructor_of(Bare, "Bare")
    assert arguments(bare, [], [], OPTIONS) == {}
    with pytest.raises(MisuseError, match="Parameters of Bare: none"):
        arguments(bare, ["--x", "1"], [], OPTIONS)


def test_help_shows_types_defaults_and_doc_lines() -> None:
    text = help_text(ENGINE)
    assert "--model_name <str>  (required)" in text
    assert "hub id, directory or `DIR/FILE.gguf`, as the hub writes it." in text
    assert '--device <auto|cpu>  (default: "auto")' in text
    assert "--preload <bool>  (default: true)" in text
    assert "load before the first request." in text
    assert "--layers <list[int] | none>  (default: null)" in text
    assert "--untyped <int>  (default: 3)" in text
    assert help_text(constructor_of(Bare, "Bare")).endswith("none.")
