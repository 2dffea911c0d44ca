"""Settings: flag > environment > file > default, and every unknown key is an error."""

import os
import pathlib
from typing import Any

import pytest
import typer

from pulsing.cli._errors import CliError, FailureError, MisuseError
from pulsing.cli._settings import SETTINGS, default_text, passphrase, resolve
from pulsing.cli.main import app
from pulsing.core._settings import net_threads
from pulsing.exceptions import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_precedence(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'addr = "f:1"\ncluster = "file"\nseeds = ["a:1", "b:2"]\njoin_timeout = 3\ninsecure = true\n'
        'default_timeout = 0\nmax_message = "64MiB"\nmailbox = 32\n'
    )
    environ = {"PULSING_ADDR": "e:1", "PULSING_CLUSTER": "env", "PULSING_CONFIG": str(file)}
    got = resolve({"addr": "c:1", "cluster": None}, None, environ)
    assert got["addr"] == "c:1"
    assert got["cluster"] == "env"
    assert got["seeds"] == ["a:1", "b:2"]
    assert got["join_timeout"] == 3.0
    assert got["insecure"] is True
    assert got["log_level"] == "info"
    assert (got["default_timeout"], got["max_message"], got["mailbox"]) == (None, 64 << 20, 32)
    assert resolve({"join_timeout": "0"}, str(file), {})["join_timeout"] is None


def test_defaults_are_the_table() -> None:
    want = {setting.name: setting.default_for(serving=True) for setting in SETTINGS}
    assert resolve({}, None, {}) == {**want, "seeds": []}


@pytest.mark.parametrize(
    ("flags", "text", "kind", "words"),
    [
        ({}, "sedes = 1", MisuseError, "unknown key 'sedes' - did you mean seeds?"),
        ({}, "seeds = 1", MisuseError, "seeds: 1 is not list[str]"),
        ({}, "x", MisuseError, "is not TOML"),
        ({"log_level": "loud"}, "", MisuseError, "--log_level: 'loud' is none of error|warn|info|debug|trace"),
        ({"join_timeout": "soon"}, "", MisuseError, "--join_timeout: 'soon' is not a float"),
        ({"join_timeout": "-1"}, "", MisuseError, "--join_timeout=-1.0: expected seconds above 0"),
        ({"mailbox": "3"}, "", MisuseError, "--mailbox=3: expected 16 to 1000000 messages"),
        ({"preset": "moon"}, "", MisuseError, "--preset: 'moon' is none of auto|local|lan|wan"),
        ({"max_message": "big"}, "", MisuseError, "--max_message: 'big' is not a size, such as"),
        ({}, "max_restarts = -1", MisuseError, "max_restarts=-1: expected 0 to 2147483647"),
        ({"seeds": ""}, "", MisuseError, "--seeds '' names no node"),
        ({"seeds": ",,"}, "", MisuseError, "names no node"),
        ({"cluster": " "}, "", MisuseError, "--cluster=' ': expected a name"),
        ({}, None, FailureError, "cannot read the configuration file"),
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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PULSING_MAILBOXES", "PULSING_MAILBOX"),
        ("PULSING_JOIN_TIMEOUTS", "PULSING_JOIN_TIMEOUT"),
        ("PULSING_SEED", "PULSING_SEEDS"),
        ("PULSING_PASPHRASE", "PULSING_PASSPHRASE"),
    ],
)
def test_a_misspelt_variable_is_an_error_that_names_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(MisuseError, match=f"{name} is no setting - did you mean {meant}"):
        resolve({}, None, {name: "1"})


def test_variables_of_others_are_left_alone() -> None:
    theirs = {
        # What Kubernetes makes of services called pulsing-seeds and pulsing.
        "PULSING_SEEDS_SERVICE_HOST": "10.0.0.1",
        "PULSING_SEEDS_SERVICE_PORT_HTTP": "80",
        "PULSING_SEEDS_PORT_80_TCP_ADDR": "10.0.0.1",
        "PULSING_PORT": "tcp://10.0.0.1:80",
        "PULSING_TEST_SEED": "1",
        "PULSING_BENCH_API_KEY": "x",
        "PULSING_FLEET_DIR": "/x",
        "PULSING_LOG": "debug",
        "PULSING_OWN_THING": "x",
        "PATH": "/bin",
    }
    assert resolve({}, None, theirs) == resolve({}, None, {})


def test_the_networks_threads_are_as_many_as_the_variable_says_or_the_cores_leave() -> None:
    assert net_threads({"PULSING_NET_THREADS": "7"}) == 7
    assert (
        net_threads({}) == net_threads({"PULSING_NET_THREADS": ""}) == (1 if len(os.sched_getaffinity(0)) <= 2 else 2)
    )
    for wrong in ("0", "65", "two", "1.5", "-1"):
        with pytest.raises(ConfigError, match=rf"PULSING_NET_THREADS.*{wrong}.*(int|whole number)"):
            net_threads({"PULSING_NET_THREADS": wrong})
    # It is no misspelt setting.
    resolve({}, None, {"PULSING_NET_THREADS": "2"})


def rows() -> list[list[str]]:
    """The table of the page, without its marks."""
    page = (ROOT / "docs/reference/settings.md").read_text()
    lines = [line.strip().strip("|") for line in page.splitlines() if line.startswith("| `--")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [[*(cell.strip("`") for cell in row[:-1]), row[-1]] for row in cells]


def test_the_reference_page_is_the_table() -> None:
    found = {row[0].removeprefix("--"): row[1:] for row in rows()}
    assert found.pop("config")[1] == "PULSING_CONFIG"
    assert found == {
        setting.name: [
            setting.name,
            setting.env,
            default_text(setting, serving=False),
            default_text(setting, serving=True),
            setting.unit,
            setting.doc,
        ]
        for setting in SETTINGS
    }


def test_every_setting_is_a_flag_and_only_they_are() -> None:
    actor = typer.main.get_command(app).commands["actor"]
    options = {option.name for option in actor.params if option.opts[0].startswith("--")}
    assert options - {"name", "config", "show_help"} == {setting.name for setting in SETTINGS}
