"""Settings: flag > environment > file > default, and every unknown key is an error."""

import pathlib
from typing import Any

import pytest

from pulsing.cli._errors import CliError, FailureError, MisuseError
from pulsing.cli._settings import SETTINGS, passphrase, resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_precedence(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('addr = "f:1"\ncluster = "file"\nseeds = ["a:1", "b:2"]\njoin_timeout = 3\ninsecure = true\n')
    environ = {"PULSING_ADDR": "e:1", "PULSING_CLUSTER": "env", "PULSING_CONFIG": str(file)}
    got = resolve({"addr": "c:1", "cluster": None}, None, environ)
    assert got["addr"] == "c:1"
    assert got["cluster"] == "env"
    assert got["seeds"] == ["a:1", "b:2"]
    assert got["join_timeout"] == 3.0
    assert got["insecure"] is True
    assert got["log_level"] == "info"


def test_defaults_are_the_table() -> None:
    assert resolve({}, None, {}) == {setting.name: setting.default for setting in SETTINGS}


@pytest.mark.parametrize(
    ("flags", "text", "kind", "words"),
    [
        ({}, "sedes = 1", MisuseError, "unknown key 'sedes' - did you mean seeds?"),
        ({}, "seeds = 1", MisuseError, "seeds: 1 is not list[str]"),
        ({}, "x", MisuseError, "is not TOML"),
        ({"log_level": "loud"}, "", MisuseError, "--log_level: 'loud' is none of error|warn|info|debug|trace"),
        ({"join_timeout": "soon"}, "", MisuseError, "--join_timeout: 'soon' is not a float"),
        ({"join_timeout": "-1"}, "", MisuseError, "0 or more"),
        ({"seeds": ""}, "", MisuseError, "--seeds '' names no node"),
        ({"seeds": ",,"}, "", MisuseError, "names no node"),
        ({"cluster": " "}, "", MisuseError, "--cluster is empty"),
        ({}, None, FailureError, "cannot read --config"),
    ],
)
def test_refusals(
    tmp_path: pathlib.Path, flags: dict[str, Any], text: str | None, kind: type[CliError], words: str
) -> None:
    file = tmp_path / "node.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(kind) as refused:
        resolve(flags, str(file), {})
    assert words in str(refused.value)


def test_the_secret_comes_from_a_file_or_from_its_variable(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secret"
    file.write_text("of the file\n")
    environ = {"PULSING_PASSPHRASE": "of the variable"}
    assert passphrase(None, {}) is None
    assert passphrase(None, {}) is None
    assert passphrase(None, environ) == "of the variable"
    assert passphrase(str(file), environ) == "of the file"
    with pytest.raises(MisuseError) as refused:
        resolve({"insecure": True}, None, environ)
    assert "PULSING_PASSPHRASE and --insecure exclude each other" in str(refused.value)
    assert "of the variable" not in str(refused.value)


def test_what_is_no_secret(tmp_path: pathlib.Path) -> None:
    for blank in ("", " \n"):
        with pytest.raises(MisuseError, match="PULSING_PASSPHRASE is set but empty"):
            passphrase(None, {"PULSING_PASSPHRASE": blank})
    with pytest.raises(MisuseError) as endless:
        passphrase("/dev/zero", {})
    assert "is longer than 65536 bytes" in str(endless.value)


def test_the_reference_page_is_the_table() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    lines = [line.strip("|") for line in page.splitlines() if line.startswith("| `--")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[0] for row in rows if row[2] != "`PULSING_CONFIG`"] == [f"`--{setting.name}`" for setting in SETTINGS]
    for row, setting in zip(rows, SETTINGS, strict=False):
        assert row[2] == f"`{setting.env}`"
