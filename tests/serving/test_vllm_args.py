"""vLLM's engine arguments by their own names: known without importing vLLM, which need not be here for these tests."""

from __future__ import annotations

import argparse
import importlib.util
import json
import types
from pathlib import Path
from typing import Any

import pytest

from pulsing.cli import _constructor
from pulsing.cli._errors import FailureError, MisuseError
from pulsing.serving import VllmWorker
from pulsing.serving._vllm_args import convert

PATH = "pulsing.serving.VllmWorker"
# As vLLM writes it, shortened.
SOURCE = '''
class EngineArgs:
    """Arguments for vLLM engine."""

    model: str = ModelConfig.model
    served_model_name: str | list[str] | None = None
    tensor_parallel_size: int = ParallelConfig.tensor_parallel_size
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    max_model_len: int = ModelConfig.max_model_len
    enforce_eager: bool = ModelConfig.enforce_eager
    trust_remote_code: bool = ModelConfig.trust_remote_code
    kv_transfer_config: KVTransferConfig | None = None
    revision: str | None = ModelConfig.revision
    compilation_config: CompilationConfig = get_field(VllmConfig, "compilation_config")
    _api_process_rank: int = 0

    def method(self) -> None:
        local: int = 1

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
'''


def vllm_is_at(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    spec = None if folder is None else types.SimpleNamespace(submodule_search_locations=[str(folder)])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: spec if name == "vllm" else find(name, *more))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE)
    vllm_is_at(monkeypatch, tmp_path)


def read(*tokens: str) -> dict[str, Any]:
    return _constructor.arguments(_constructor.constructor_of(VllmWorker, PATH), tokens, [], [])


@pytest.mark.usefixtures("installed")
def test_engine_arguments_are_taken_by_their_own_names() -> None:
    values = read(
        *("--model", "org/name", "--role", "aggregated", "--max_new_tokens", "512", "--gpu_memory_utilization", "0.9"),
        *("--tensor-parallel-size=2", "--enforce_eager", "--max_model_len", "8k", "--revision", "1234"),
        *("--compilation_config", '{"level": 3}', "--enable_log_requests", "true"),
    )
    assert values == {
        "model": "org/name",
        "role": "aggregated",
        "max_new_tokens": 512,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "max_model_len": "8k",  # vLLM reads it
        "revision": "1234",  # not the number
        "compilation_config": {"level": 3},
        "enable_log_requests": True,
    }
    assert VllmWorker(**values).model == "org/name"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("token", "meant"),
    [
        ("--gpu_memory_utilisation", "gpu_memory_utilization"),
        ("--tensor-parallel", "tensor_parallel_size"),
        ("--max_new_token", "max_new_tokens"),
        ("--enable_log_request", "enable_log_requests"),
    ],
)
def test_a_misspelt_name_is_misuse_and_the_nearest_is_told(token: str, meant: str) -> None:
    with pytest.raises(MisuseError) as refused:
        read("--model", "m", token, "1")
    assert refused.value.exit_code == 2
    assert f"{token} - did you mean {meant}?" in str(refused.value)
    assert len(str(refused.value)) < 600  # not a list of all that vLLM has
    with pytest.raises(TypeError, match=f"did you mean {meant}"):
        VllmWorker("m", **{token[2:].replace("-", "_"): 1})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["method", "local", "_api_process_rank"])
def test_only_arguments_are_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=f"no parameter {name}"):
        VllmWorker("m", **{name: 1})


@pytest.mark.usefixtures("installed")
def test_roles() -> None:
    assert VllmWorker("m", role="aggregated").metadata()["role"] == "aggregated"
    for role in ("prefill", "decode"):
        assert read("--model", "m", "--role", role)["role"] == role
        with pytest.raises(ValueError, match=f"role {role} needs a KV connector.*--kv_transfer_config .*NixlConnector"):
            VllmWorker("m", role=role)  # type: ignore[arg-type]
        for given in ({"kv_role": "kv_both"}, '{"kv_role": "kv_both"}', types.SimpleNamespace(kv_role="kv_both")):
            half = VllmWorker("m", role=role, kv_transfer_config=given)  # type: ignore[arg-type]
            assert (half.metadata()["role"], half.metadata()["pd"]) == (role, "sequential")
    with pytest.raises(ValueError, match=r"role prefill does not go with kv_role kv_consumer.* kv_producer or kv_both"):
        VllmWorker("m", role="prefill", kv_transfer_config={"kv_role": "kv_consumer"})
    with pytest.raises(ValueError, match=r"kv_transfer_config 'x' is no JSON"):
        VllmWorker("m", role="decode", kv_transfer_config="x")
    with pytest.raises(MisuseError, match=r"aggregated\|prefill\|decode"):
        read("--model", "m", "--role", "both")
    with pytest.raises(ValueError, match="'both' is none of"):
        VllmWorker("m", role="both")  # type: ignore[arg-type]


def test_without_vllm_one_line_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_is_at(monkeypatch, None)
    with pytest.raises(FailureError) as failed:
        read("--model", "m", "--anything", "1")
    assert failed.value.exit_code == 1
    assert str(failed.value) == "vLLM is not installed here; install it with: pip install 'pulsing[vllm]'"
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pulsing\[vllm\]'"):
        VllmWorker("m")
    # Help is given all the same.
    shown = _constructor.help_text(_constructor.constructor_of(VllmWorker, PATH))
    assert "--model <str>  (required)" in shown
    assert "--<any other>" in shown


def test_values_are_read_as_vllms_command_line_reads_them() -> None:
    def size(text: str) -> int:
        return int(text[:-1]) * 1000 if text.endswith("k") else int(text)

    parser = argparse.ArgumentParser()
    parser.add_argument("--max-model-len", type=size)
    parser.add_argument("--dtype", choices=["auto", "bfloat16"])
    parser.add_argument("--compilation-config", type=lambda text: ("parsed", json.loads(text)))
    parser.add_argument("--sizes", type=int, nargs="+")
    given = {
        "max_model_len": "8k",
        "dtype": "bfloat16",
        "compilation_config": {"level": 3},
        "sizes": "1, 2",
        "seed": 3,
        "worker_cls": str,
        "enforce_eager": True,
    }
    assert convert(given, parser) == {
        **given,
        "max_model_len": 8000,
        "compilation_config": ("parsed", {"level": 3}),
        "sizes": [1, 2],
    }
    with pytest.raises(ValueError, match=r"max_model_len='much'"):
        convert({"max_model_len": "much"}, parser)
    with pytest.raises(ValueError, match=r"dtype='int3'; it takes auto, bfloat16"):
        convert({"dtype": "int3"}, parser)
