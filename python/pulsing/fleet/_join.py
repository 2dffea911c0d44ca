"""How a ready cell joins a Pulsing cluster, and how one sees that it has."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pulsing.core._shown import legible

# A node that takes longer is asked again; the launcher looks often.
_ANSWER_WITHIN = 3.0
# Cells of one fleet look through the same eyes: one question to the seeds serves all who ask within this time.
_FRESH_FOR = 0.4
# An EngineWorker drains no longer than this; see `Worker`.
_LONGEST_DRAIN = 50.0


def engine_worker_command(
    seeds: str, name: str, url: str, drain: float = 0.0, half: Sequence[str] = ()
) -> tuple[str, ...]:
    """An EngineWorker in front of an engine that already answers.

    Secrets and the cluster's name travel as PULSING_* variables of the environment.

    Args:
        seeds: host:port of nodes to join, separated by commas.
        name: name to serve under.
        url: where the engine answers.
        drain: seconds it has to leave; it waits so long for the engine's requests to end.
        half: further words for an engine that does half of requests: `--role prefill --pd sequential`.
    """
    # A second of it is for leaving itself.
    waits = min(drain - 1.0, _LONGEST_DRAIN)
    return (
        *("pulsing", "actor", "pulsing.serving.EngineWorker"),
        *("--seeds", seeds, "--name", name),
        *("--", "--url", url, *half),
        *(("--drain_timeout", f"{waits:g}") if waits > 0 else ()),
    )


class Onlooker:
    """Sees who serves in a cluster as its Routers do, through the observer endpoint of the seeds; joins nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """
        Args:
            environ: environment of the join processes; the cluster's name and secret are read as they read them.

        Raises:
            ValueError: the secret cannot be read; says why.
        """
        from pulsing.cli._errors import CliError
        from pulsing.cli._settings import passphrase, resolve

        try:
            settings = resolve({}, None, environ)
            self._pki = tuple(settings[name] for name in ("cert", "key", "ca"))
            self._passphrase = None if settings["cert"] else passphrase(settings["passphrase_file"], environ)
        except CliError as error:
            raise ValueError(f"the fleet's nodes could not start: {error}") from error
        self._cluster = str(settings["cluster"])
        self._locks: dict[str, asyncio.Lock] = {}
        self._seen: dict[str, tuple[float, list[Any] | str]] = {}

    async def problem(self, seeds: str, name: str, url: str) -> str | None:
        """None when a ready worker of that name with that address is registered, else what there is instead."""
        async with self._locks.setdefault(seeds, asyncio.Lock()):
            at, seen = self._seen.get(seeds, (-1.0, ""))
            if time.monotonic() - at > _FRESH_FOR:
                seen = await asyncio.to_thread(self._look, seeds)
                self._seen[seeds] = time.monotonic(), seen
        if isinstance(seen, str):
            return seen
        states = []
        for row in seen:
            metadata = row.get("metadata") or {}
            if row.get("name") == name and metadata.get("url") == url:
                states.append(str(metadata.get("state", "of no state")))
        if "ready" in states:
            return None
        if states:
            return f"its EngineWorker is {states[0]}"
        return f"its EngineWorker has not joined the cluster of {seeds} yet"

    def _look(self, seeds: str) -> list[Any] | str:
        """Rows of the first seed that answers, or why none does."""
        from pulsing._core import observe_get, seed_places

        try:
            addrs = [place for part in seeds.split(",") if part.strip() for place in seed_places(part)]
        except ValueError as none:
            return f"no seed says who has joined: {none}"
        reasons = []
        try:
            answers = observe_get(addrs, "/actors", _ANSWER_WITHIN, self._passphrase, self._cluster, *self._pki)
        except ValueError as unfit:
            # A certificate that is being replaced; it is read again at the next look.
            return f"nobody can be asked who has joined: {unfit}"
        for addr, (status, body, error) in zip(addrs, answers, strict=True):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if error is None and status == 200:
                    return list(json.loads(body)["cluster"])
            reasons.append(error if error is not None else f"{addr} answers {status} to /actors")
        return f"no seed says who has joined: {'; '.join(reasons)}"


# Colours and what else a program tells a terminal: as ECMA-48 has it, sequences (CSI) and strings (OSC).
_TOLD_A_TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def last_words(log: pathlib.Path, lines: int = 8) -> list[str]:
    """What a process wrote last; nothing where its log is not on this machine.

    Args:
        log: its file.
        lines: how many lines, the empty ones not counted.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    text = _TOLD_A_TERMINAL.sub("", text)
    # A progress bar draws over itself: what is on the screen in the end counts.
    written = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    kept = [line.rstrip() for line in written if line.strip(" \t^~─│╭╮╰╯❱")]
    return [legible(line if len(line) <= 300 else f"{line[:299]}…") for line in kept[-lines:]]
