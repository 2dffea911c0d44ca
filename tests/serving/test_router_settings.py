"""Where the settings of a Router come from, and what is refused."""

import typing
from pathlib import Path

import pytest

from pulsing.cli import _constructor
from pulsing.cli._settings import default_text
from pulsing.exceptions import ConfigError
from pulsing.serving import Router
from pulsing.serving._router_settings import SETTINGS, RouterSettings, of_the_gateway, resolve

ROOT = Path(__file__).parents[2]


def test_the_argument_comes_before_the_variable_before_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('http_port = 1\nmax_body = "1KiB"\nbody_timeout = 3\nmodel_name = "file"\n')
    environ = {"PULSING_ROUTER_HTTP_PORT": "2", "PULSING_ROUTER_MAX_BODY": "2KiB", "PULSING_ROUTER_WORKER_NAME": ""}
    values = resolve({"http_port": 3, "model_name": None}, file, environ)
    assert (values["http_port"], values["max_body"], values["body_timeout"]) == (3, 2048, 3.0)
    assert (values["model_name"], values["worker_name"]) == ("file", "worker")
    assert resolve({}, None, {"PULSING_ROUTER_CONFIG": str(file)})["model_name"] == "file"


@pytest.mark.parametrize("name", [one.name for one in SETTINGS if one.annotation == list[str]])
def test_several_values_are_a_list_or_text_with_commas_wherever_they_stand(tmp_path: Path, name: str) -> None:
    both = ["https://a", "https://b"] if name == "cors_origins" else ["x-a", "X-B"]
    text = ", ".join(both)
    file, other = tmp_path / "list.toml", tmp_path / "text.toml"
    file.write_text(f"{name} = {both}\n")
    other.write_text(f"{name} = '{text}'\n")
    for given in (
        resolve({name: both}),
        resolve({name: text}),
        resolve({}, file),
        resolve({}, other),
        resolve({}, None, {f"PULSING_ROUTER_{name.upper()}": text}),
    ):
        assert given[name] == both
        Router(**{name: given[name]})
    file.write_text(f"{name} = [3]\n")
    with pytest.raises(ConfigError, match=rf"{file}: {name}: 3 is not str"):
        resolve({}, file)


@pytest.mark.parametrize(
    ("environ", "text", "words"),
    [
        ({"PULSING_ROUTER_HTTP_PROT": "1"}, "", "no setting of a Router - did you mean PULSING_ROUTER_HTTP_PORT?"),
        ({"PULSING_ROUTER_HTTP_PORT": "x"}, "", "PULSING_ROUTER_HTTP_PORT: 'x' is not an int"),
        ({}, "http_prot = 1", "unknown key 'http_prot' - did you mean http_port?"),
        ({}, "http_port = '1'x", "is not TOML"),
        ({}, "max_body = 0", "max_body=0: expected 1 to 4611686018427387904 bytes"),
        ({}, "request_timeout = true", "request_timeout"),
        ({"PULSING_ROUTER_MAX_BODY": "99999999999999999999GiB"}, "", "expected 1 to 4611686018427387904 bytes"),
        ({"PULSING_ROUTER_API_KEYS_FILE": ""}, "", "PULSING_ROUTER_API_KEYS_FILE is set but empty"),
        ({"PULSING_ROUTER_MAX_QUEUE": "1" + "0" * 30}, "", "expected 0 to 2147483647"),
        ({"PULSING_ROUTER_MAX_ATTEMPTS": str(2**32)}, "", "PULSING_ROUTER_MAX_ATTEMPTS=4294967296: expected 1 to"),
    ],
)
def test_what_cannot_be_meant_is_named_with_its_source(
    tmp_path: Path, environ: dict[str, str], text: str, words: str
) -> None:
    file = tmp_path / "router.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        resolve({}, file, environ)
    assert words in str(refused.value)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        Router(config="/nowhere/router.toml")


def test_variables_of_kubernetes_are_left_alone() -> None:
    theirs = {
        "PULSING_ROUTER_SERVICE_HOST": "10.0.0.1",
        "PULSING_ROUTER_PORT_80_TCP_ADDR": "x",
        "PULSING_ROUTER_PORT": "t",
    }
    assert resolve({}, None, theirs) == resolve({}, None, {})


def test_the_page_the_arguments_the_flags_and_the_table_agree() -> None:
    page = (ROOT / "docs/reference/router.md").read_text()
    lines = [line.strip().strip("|") for line in page.splitlines() if line.startswith("| `--")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[0] for row in rows[len(SETTINGS) :]] == ["`--config`"]
    assert rows[: len(SETTINGS)] == [
        [f"`--{one.name}`", f"`{one.env}`", f"`{default_text(one, serving=False)}`", one.unit, one.doc]
        for one in SETTINGS
    ]
    first = {"http_host", "http_port", "model_name", "worker_name", "scheduler_type"}
    assert first | set(typing.get_type_hints(RouterSettings)) == {one.name for one in SETTINGS}
    flags = _constructor.constructor_of(Router, "pulsing.serving.Router").params
    assert set(flags) == {one.name for one in SETTINGS} | {"config"}
    assert all(flags[one.name].doc for one in SETTINGS)


def test_the_command_line_reads_sizes_and_refuses_unknown_flags() -> None:
    constructor = _constructor.constructor_of(Router, "pulsing.serving.Router")
    given = _constructor.arguments(constructor, ["--max_body", "64MiB", "--http_port", "0"], [], [])
    assert Router(**given)._settings["max_body"] == 64 << 20
    with pytest.raises(Exception, match="did you mean max_body"):
        _constructor.arguments(constructor, ["--max_boddy", "1"], [], [])


def test_the_gateway_gets_what_is_its_own() -> None:
    assert "drain_timeout" not in of_the_gateway(resolve({}, environ={}), {})


def test_the_one_key_comes_from_the_environment_and_nowhere_else(tmp_path: Path) -> None:
    values = resolve({}, environ={"PULSING_API_KEY": "sk-x"})
    assert "sk-x" not in str(values)
    assert of_the_gateway(values, {"PULSING_API_KEY": " sk-x\n"})["api_key"] == "sk-x"
    with pytest.raises(ConfigError, match="set but empty"):
        of_the_gateway(values, {"PULSING_API_KEY": " "})
    with pytest.raises(ConfigError, match="exclude each other"):
        of_the_gateway(resolve({"api_keys_file": str(tmp_path)}), {"PULSING_API_KEY": "x"})
    (tmp_path / "router.toml").write_text('api_key = "sk-x"')
    with pytest.raises(ConfigError, match="unknown key 'api_key'"):
        resolve({}, tmp_path / "router.toml")
