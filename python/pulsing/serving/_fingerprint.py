"""What workers have in common that answer alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["fingerprint_of", "weights_in", "weights_of"]

# Read of each file of weights: its header, which names every tensor, and the first of them.
_READ = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def fingerprint_of(*parts: object) -> str:
    """A short name for all of `parts`, told apart by their ``repr``.

    Args:
        parts: what decides an answer: versions, settings, weights.
    """
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:24]


def weights_of(parameters: Iterable[Any]) -> str:
    """A short name for tensors of torch, from the first four numbers of each: training moves all of them.

    Args:
        parameters: tensors, in a fixed order.
    """
    seen = hashlib.sha256()
    for parameter in parameters:
        seen.update(repr((tuple(parameter.shape), parameter.detach().flatten()[:4].float().tolist())).encode())
    return seen.hexdigest()


def weights_in(folder: Path) -> str:
    """A short name for the files of weights in a folder, from the name, size and first megabyte of each; empty if there
    are none.

    Args:
        folder: a model's directory.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
    seen = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            seen.update(f"{path.name} {path.stat().st_size}".encode())
            seen.update(file.read(_READ))
    return seen.hexdigest() if files else ""
