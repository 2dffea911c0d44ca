"""What every bootstrap shares: the cluster's secret, the settings of its nodes, joining until it is complete."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, TypeVar, cast

from pulsing.core import _global
from pulsing.core._lifecycle import check_fork
from pulsing.core._settings import BY_NAME, given
from pulsing.core._settings import passphrase as read_passphrase
from pulsing.core._system import ActorSystem
from pulsing.core._threads import run_in_thread
from pulsing.exceptions import ConfigError, JoinError, PulsingRuntimeError

T = TypeVar("T")
Security = Literal["made", "given", "certified", "insecure", "host"]
"""What keeps the cluster together: a secret made for the job and handed on; one that each process was given beforehand;
certificates; nothing; the secret file of the one user on the one host that all processes run on."""
_PKI = ("cert", "key", "ca")

JOIN_TIMEOUT = 60.0
"""Seconds for a job's processes to find each other: schedulers start them one after the other."""
_LOOK_EVERY = 0.02


@dataclass(frozen=True, slots=True)
class Terms:
    """What all nodes of a job's cluster have in common.

    Args:
        cluster: Name of the cluster, of this start of the job alone.
        security: What keeps it together.
        passphrase: The secret, if it was made.
    """

    cluster: str
    security: Security
    passphrase: str | None = field(default=None, repr=False)

    def text(self) -> str:
        """The same, to be handed on."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """What `text` made."""
        return cls(**json.loads(text))


class Options:
    """What the caller of a bootstrap function said, beside what the environment and the settings file say.

    Args:
        addr: ``host:port`` to listen on; None: the job's own address of this host, a free port.
        expected: Nodes to wait for, this one counted.
        passphrase: Secret of the cluster, the same in every process; None: one is made for the job.
        passphrase_file: File with it.
        config: TOML file of settings.
        settings: The other settings of `pul.init`.

    Raises:
        ConfigError: Of the environment or the file; or a number that makes no sense.
    """

    def __init__(
        self,
        *,
        addr: str | None,
        expected: int | None,
        passphrase: str | None,
        passphrase_file: str | os.PathLike[str] | None,
        config: str | os.PathLike[str] | None,
        settings: dict[str, Any],
    ) -> None:
        if expected is not None and (isinstance(expected, bool) or not isinstance(expected, int) or expected < 1):
            raise ConfigError(f"expected={expected!r}: a number of nodes, 1 or more, this one counted")
        usual = given(config, os.environ)
        self.addr = addr if addr is not None else usual.get("addr")
        self.expected = expected
        self.settings = settings
        self.config = config
        self.cluster: str = BY_NAME["cluster"].check(settings.get("cluster", usual.get("cluster", "default")))
        self.insecure = bool(settings.get("insecure", usual.get("insecure", False)))
        # As `pul.init` does: who says here what keeps the cluster together is not contradicted by the environment.
        here = passphrase is not None or passphrase_file is not None or bool(settings.get("insecure"))
        self.certified = any(settings.get(name) or (usual.get(name) and not here) for name in _PKI)
        other = self.insecure or self.certified
        file = passphrase_file or (None if other else usual.get("passphrase_file"))
        if passphrase is None and (file or not other):
            passphrase = read_passphrase(file, os.environ)
        self.passphrase = passphrase
        limit = settings.get("join_timeout", usual.get("join_timeout", JOIN_TIMEOUT))
        self.deadline = Deadline(BY_NAME["join_timeout"].check(limit))

    def terms(self, label: str, one_host: bool = False) -> Terms:
        """Terms that this process would set if it is the first."""
        if self._said == "certified":
            # Certificates may name the cluster.
            return Terms(self.cluster, "certified")
        cluster = f"{self.cluster}/{label}-{secrets.token_hex(4)}"
        if self._said is not None:
            return Terms(cluster, self._said)
        return Terms(cluster, "host") if one_host else Terms(cluster, "made", secrets.token_hex(32))

    @property
    def _said(self) -> Security | None:
        """What this process was told of the cluster's security, if anything."""
        if self.insecure:
            return "insecure"
        if self.certified:
            return "certified"
        return None if self.passphrase is None else "given"

    async def start(self, terms: Terms, addr: str, seeds: tuple[str, ...], within: float | None) -> ActorSystem:
        """Starts the process's own system on the job's terms.

        Args:
            terms: The job's.
            addr: Where to listen unless the caller said so.
            seeds: Nodes of the cluster; none: this is its first.
            within: Seconds until one of them has let us in.

        Raises:
            ConfigError: This process was given another kind of secret than the others.
            BindError, JoinError, RefusedError: As `pul.init`.
        """
        theirs = None if terms.security in ("made", "host") else terms.security
        if self._said != theirs:
            raise ConfigError(
                f"this process was given {_WORDS[self._said]}, the one that began the job's cluster {_WORDS[theirs]}: "
                "give all of them the same passphrase (PULSING_PASSPHRASE or passphrase_file), or certificates; or "
                "nothing, and a passphrase is made for the job; or insecure=True"
            )
        settings = {**self.settings, "cluster": terms.cluster, "join_timeout": within}
        return await _global.init(
            addr if self.addr is None else self.addr,
            seeds=seeds,
            passphrase=terms.passphrase or self.passphrase,
            config=self.config,
            **cast("Any", settings),
        )


_WORDS = {None: "no secret", "given": "a passphrase", "certified": "a certificate", "insecure": "insecure=True"}


class Deadline:
    """A limit that several steps share.

    Args:
        limit: Seconds; None for ever.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._end = None if limit is None else time.monotonic() + limit

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return self._end is not None and time.monotonic() >= self._end

    def left(self, most: float) -> float:
        """Seconds for one step: what is left, `most` at most, and never nothing at all."""
        return most if self._end is None else min(most, max(self._end - time.monotonic(), 0.1))


async def complete(system: ActorSystem, expected: int | None, deadline: Deadline, *, stop: bool = False) -> ActorSystem:
    """Waits until `expected` nodes are members, if that many are to be waited for.

    Args:
        system: This node.
        expected: How many; None: do not wait.
        deadline: How long.
        stop: Whether the node ends when they do not come.

    Raises:
        JoinError: They are not when the deadline passes.
    """
    there: set[str] = set()
    try:
        while expected is not None:
            # Who has left had joined: it was done before we looked.
            there |= {member["addr"] for member in await system.members() if member["state"] in ("alive", "left")}
            if len(there) >= expected:
                break
            if deadline.passed:
                raise JoinError(
                    f"{len(there)} of {expected} processes have joined within {deadline.limit:g} s: "
                    f"{', '.join(sorted(there))}. Every process of the job must call this; raise join_timeout if they "
                    "start later, lower expected if they are fewer"
                )
            await asyncio.sleep(_LOOK_EVERY)
    except BaseException:
        if stop:
            await system.shutdown(0)
        raise
    return system


async def off_loop(function: Callable[..., T], *args: Any) -> T:
    """Runs what blocks in a thread that does not keep the interpreter from exiting."""
    return cast("T", await run_in_thread(contextvars.copy_context(), function, *args))


class Membership:
    """The one cluster of a job that this process is in, however often it asks to join.

    Args:
        what: The function that joins, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._which: object = None
        self._system: ActorSystem | None = None
        self._starting: asyncio.Task[ActorSystem] | None = None

    async def join(self, which: object, start: Callable[[], Coroutine[Any, Any, ActorSystem]]) -> ActorSystem:
        """Runs `start` unless that has been done, or is being done on this loop.

        Args:
            which: What tells the cluster asked for from others.
            start: Makes the system.

        Raises:
            PulsingRuntimeError: The process has a system of other origin, in another cluster, or on another loop.
        """
        check_fork()
        loop = asyncio.get_running_loop()
        current = _global._current()
        other = None
        if current is not None and current is not self._system:
            other = "started by other means"
        elif current is not None and current.loop is not loop:
            other = "on another event loop"
        elif (current is not None or self._starting is not None) and which != self._which:
            other = f"in another cluster ({self._which}, not {which})"
        elif self._starting is not None and self._starting.get_loop() is not loop:
            other = "being started on another event loop"
        if other is not None:
            raise PulsingRuntimeError(
                f"this process has a system already, {other}: call pul.shutdown() before {self._what}, or use the one "
                "that runs"
            )
        if current is not None:
            return current
        if self._starting is not None:
            return await asyncio.shield(self._starting)
        self._which = which
        self._starting = loop.create_task(start())
        try:
            self._system = await self._starting
        finally:
            self._starting = None
        return self._system
