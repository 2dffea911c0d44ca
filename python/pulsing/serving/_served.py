"""The public model names of a Router, as its users write them down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError

__all__ = ["Served", "parse_models"]

_HOW = "expected PUBLIC=WORKER_NAME or PUBLIC=WORKER_NAME:WORKER_MODEL"


class Served(NamedTuple):
    """One public name and what it stands for."""

    name: str
    """What clients put into ``model``."""
    worker_name: str
    """Name that the workers behind it are registered under."""
    model: str | None = None
    """Which of those workers' models is meant; ``None``: whatever they serve."""


def parse_models(models: str | Mapping[str, str] | Iterable[str], source: str = "models") -> list[Served]:
    """Reads a table of public names.

    Args:
        models: ``"PUBLIC=WORKER_NAME[:WORKER_MODEL],..."``, a list of such entries, or a mapping of public name to
            ``"WORKER_NAME[:WORKER_MODEL]"`` (the form of a TOML table). What follows the first colon is the model:
            it may have colons of its own, as ``llama3:8b`` has.
        source: how errors name where it comes from.

    Raises:
        ConfigError: an entry cannot be read, or a public name is given twice; the text names it.
    """
    if isinstance(models, Mapping):
        pairs = [(str(name), target) for name, target in models.items()]
    else:
        if not isinstance(models, str | Iterable):
            raise ConfigError(f"{source}: {shown(models)} is no table of names: {_HOW}")
        entries = models.split(",") if isinstance(models, str) else list(models)
        pairs = []
        for entry in entries:
            name, equals, target = str(entry).strip().partition("=")
            if not equals:
                raise ConfigError(f"{source}: {shown(entry)} has no '=': {_HOW}")
            pairs.append((name, target))
    served: list[Served] = []
    for name, target in pairs:
        if not isinstance(target, str):
            raise ConfigError(
                f"{source}: {shown(name)} stands for {shown(target)}: expected WORKER_NAME[:WORKER_MODEL]"
            )
        worker_name, colon, model = target.strip().partition(":")
        one = Served(name.strip(), worker_name.strip(), model.strip() or None)
        if not one.name or not one.worker_name or (colon and one.model is None):
            raise ConfigError(f"{source}: {shown(f'{name}={target}')} has an empty part: {_HOW}")
        if any(other.name == one.name for other in served):
            raise ConfigError(f"{source}: the name {shown(one.name)} is given twice")
        served.append(one)
    if not served:
        raise ConfigError(f"{source} is empty: {_HOW}, or leave it out")
    return served
