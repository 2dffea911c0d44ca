"""The spellings people use for options of `pulsing` itself."""

import pytest
import typer

from pulsing.cli._argv import normalise, split
from pulsing.cli._errors import MisuseError
from pulsing.cli._inspect_source import with_port
from pulsing.cli.main import app

COMMAND = typer.main.get_command(app)


def test_split_at_the_first_double_dash() -> None:
    assert split(["actor", "C"]) == (["actor", "C"], None)
    assert split(["actor", "C", "--"]) == (["actor", "C"], [])
    assert split(["a", "--", "--x", "--", "y"]) == (["a"], ["--x", "--", "y"])


@pytest.mark.parametrize(
    "written",
    ["--json_output", "--json-output", "--json_output=true", "--json-output=True", "--json_output True", "--json yes"],
)
def test_flags_take_every_spelling(written: str) -> None:
    got = normalise(["inspect", "actors", *written.split(), "--endpoint", "x:1"], COMMAND)
    assert got[2] in ("--json_output", "--json")
    assert got[3:] == ["--endpoint", "x:1"]


def test_false_flags_vanish_or_become_their_opposite() -> None:
    assert normalise(["inspect", "actors", "--all-actors=false"], COMMAND) == ["inspect", "actors"]
    assert normalise(["actor", "C", "--observe", "false"], COMMAND) == ["actor", "C", "--no_observe"]
    assert normalise(["actor", "C", "--no-observe"], COMMAND) == ["actor", "C", "--no_observe"]
    assert normalise(["actor", "C", "--no-observe=false"], COMMAND) == ["actor", "C", "--observe"]


def test_values_pass_untouched() -> None:
    line = ["actor", "--join-timeout", "5", "-D", "--odd", "--seeds=a,b", "C"]
    assert normalise(line, COMMAND) == ["actor", "--join_timeout", "5", "-D", "--odd", "--seeds=a,b", "C"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["actor", "C", "--model_name", "x"], "put it after --"),
        (["actor", "C", "--sedes", "x"], "did you mean --seeds?"),
        (["inspect", "actors", "--endpoints", "x"], "did you mean --endpoint?"),
        (["inspect", "actor"], "did you mean actors?"),
        (["actors"], "did you mean actor?"),
        (["actor", "--insecure=maybe"], "true or false, not 'maybe'"),
    ],
)
def test_unknown_words_get_the_nearest_right_one(line: list[str], words: str) -> None:
    with pytest.raises(MisuseError) as refused:
        normalise(line, COMMAND)
    assert words in str(refused.value)


def test_a_host_without_a_port_means_8000() -> None:
    assert with_port("node1") == "node1:8000"
    assert with_port("node1:9") == "node1:9"
    assert with_port("::1") == "[::1]:8000"
    assert with_port("[::1]") == "[::1]:8000"
    assert with_port("[::1]:9") == "[::1]:9"
