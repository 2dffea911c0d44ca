"""Whatever somebody passes, an error is a few lines that a terminal can show."""

from collections.abc import Callable

import pytest
from tests.cli.conftest import Result

from pulsing.core._shown import brief, legible, shown

LONG = "x" * 100_000
# Turns a terminal red, hides what stands before it, and reads from right to left.
RUDE = "a\x1b[31mb\x07\rc\u202ed\x9b"
NODE = "--seeds=127.0.0.1:1"

PLACES: list[list[str]] = [
    ["{}"],
    ["inspect", "{}"],
    ["inspect", "cluster", "--{}"],
    ["inspect", "cluster", "--seeds", "{}"],
    ["inspect", "watch", NODE, "--kind", "{}"],
    ["inspect", "cluster", NODE, "--passphrase_file", "{}"],
    ["fleet", "render", "{}"],
    ["bench", "m", "--url", "{}"],
    ["bench", "m", "--url", "http://127.0.0.1:1", "--duration", "{}"],
    ["bench", "m", "--url", "http://127.0.0.1:1", "--benchmark_kind", "{}"],
    ["actor", "{}"],
    ["actor", "{}.Class"],
    ["actor", "pulsing.serving.{}"],
    *(
        ["actor", "pulsing.serving.Router", flag, "{}"]
        for flag in (
            "--name",
            "--addr",
            "--advertise",
            "--seeds",
            "--cluster",
            "--passphrase_file",
            "--preset",
            "--mailbox",
            "--max_message",
            "--config",
            "-D",
        )
    ),
    ["actor", "pulsing.serving.Router", "--seeds", "k8s://{}:1"],
    ["actor", "pulsing.serving.Router", "-D", "actor.extra_kwargs={}"],
    *(
        ["actor", "pulsing.serving.Router", "--", flag, "{}"]
        for flag in (
            "--{}",
            "--http_host",
            "--http_port",
            "--scheduler_type",
            "--models",
            "--cors_origins",
            "--otlp_endpoint",
            "--api_keys_file",
            "--tls_cert",
            "--config",
            "--worker_name",
        )
    ),
]


@pytest.mark.parametrize("value", [LONG, RUDE], ids=["long", "rude"])
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_an_error_names_a_value_in_a_few_lines(pulsing: Callable[..., Result], place: list[str], value: str) -> None:
    words = [word.replace("{}", value) for word in place]
    done = pulsing(*words)
    assert done.code in (1, 2)
    assert done.err.startswith("Error: ")
    assert len(done.err) < 4000
    assert not done.out
    assert not [char for char in done.err if char in "\x1b\x07\r\u202e\x9b"]


@pytest.mark.parametrize(
    "line",
    [
        ["actor", "pulsing.serving.Router", "-D", "actor.extra_kwargs=" + "[" * 100_000],
        ["actor", "pulsing.serving.Router", "--", "--models", "[" * 100_000],
        ["bench", "m", "--url", "http://127.0.0.1:1", "--extra_body", "[" * 100_000],
    ],
    ids=lambda line: line[-2],
)
def test_json_nested_without_end_is_misuse(pulsing: Callable[..., Result], line: list[str]) -> None:
    done = pulsing(*line)
    assert done.code in (1, 2)
    assert "Traceback" not in done.err
    assert done.err.startswith("Error: ")
    assert len(done.err) < 4000


def test_messages_stay_as_they_are_where_nothing_is_wrong_with_them() -> None:
    text = "Ünïcode 中文 😀\n\tand a second line"
    assert legible(brief(text)) == text
    assert legible("a\nb", keep="") == "a\\nb"
    assert shown("name") == "'name'"
