"""Files that are not what they are named for: each is told in words, at once, however large it is."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from pulsing.fleet import FleetFileError, load
from pulsing.serving._model_files import ModelSource

ROUTER = ("actor", "pulsing.serving.Router", "--addr", "127.0.0.1:0")


@pytest.fixture
def endless(tmp_path: pathlib.Path) -> pathlib.Path:
    """64 MiB of zeros that take no room on the disk."""
    path = tmp_path / "endless.yaml"
    with path.open("wb") as stream:
        stream.truncate(64 << 20)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([*ROUTER, "--config", "{}"], "is not TOML: it is longer than 1048576 bytes"),
        ([*ROUTER, "--passphrase_file", "{}"], "is no secret: it is longer than 65536 bytes"),
        ([*ROUTER, "--secret_file", "{}"], "does not hold 64 hexadecimal digits"),
        ([*ROUTER, "--", "--config", "{}"], "is not TOML: it is longer than 1048576 bytes"),
        (
            [*ROUTER[:1], "pulsing.serving.EngineWorker", "--", "--url", "http://127.0.0.1:1", "--api_key_file", "{}"],
            "it is longer than 65536 bytes",
        ),
        (["fleet", "render", "{}"], "it is longer than 8388608 bytes"),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_a_file_without_end_is_read_no_further_than_it_could_go(
    pulsing: Callable[..., Any], endless: pathlib.Path, line: list[str], words: str
) -> None:
    done = pulsing(*(word.replace("{}", str(endless)) for word in line))
    assert done.code in (1, 2)
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "[" * 5000, "nested"),
        ("a.yaml", "fleet: caf\udce9", "not UTF-8"),
        ("a.py", "raise SystemExit(0)", "SystemExit: 0"),
        ("a.py", "import sys; sys.exit()", "SystemExit"),
    ],
)
def test_a_fleet_file_that_is_none_never_passes_for_one(
    pulsing: Callable[..., Any], tmp_path: pathlib.Path, name: str, text: str, words: str
) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode(errors="surrogateescape"))
    done = pulsing("fleet", "render", str(file))
    assert done.code == 2
    assert done.err.startswith(f"Error: {file}: ")
    assert words in done.err


@pytest.mark.parametrize(
    "line",
    [
        *(
            [*ROUTER, flag, ""]
            for flag in ("--passphrase_file", "--config", "--cert", "--key", "--ca", "--secret_file")
        ),
        [*ROUTER, "--", "--config", ""],
        [*ROUTER, "--", "--api_keys_file", ""],
        ["inspect", "cluster", "--seeds", "127.0.0.1:1", "--passphrase_file", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_misuse_and_no_default(pulsing: Callable[..., Any], line: list[str]) -> None:
    done = pulsing(*line)
    assert done.code in (1, 2)
    assert done.err.startswith("Error: ")
    assert "expected a path" in done.err


def test_toml_nested_without_end_is_misuse(pulsing: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("addr = " + "[" * 20_000)
    done = pulsing(*ROUTER, "--config", str(file))
    assert done.code == 2
    assert f"{file} is not TOML: it is nested too deeply" in done.err


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"], ids=["long", "zero"])
def test_a_name_that_no_file_can_have_is_a_file_that_is_not_there(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        ModelSource.of(f"{tmp_path}/{name}")
    with pytest.raises(FileNotFoundError, match="there is no GGUF file"):
        ModelSource.of(f"{tmp_path}/{name}.gguf")
    with pytest.raises(FleetFileError, match="no such file"):
        load(tmp_path / f"{name}.py")
