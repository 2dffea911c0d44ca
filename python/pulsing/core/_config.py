"""What a system is started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from pulsing.exceptions import ConfigError

DEFAULT_TIMEOUT = 30.0
"""Seconds a call waits for its first answer (R5)."""
HOOK_TIMEOUT = 60.0
"""Seconds that `on_start` and `on_stop` may take; a Worker drains in the latter."""


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """Settings of one node. Every one but the security has a default that works on one machine.

    Args:
        addr: ``host:port`` to listen on; None: a free port on the interface that reaches the first seed.
        seeds: ``host:port`` of nodes to join; none: this is the first node.
        cluster: Name of the cluster; nodes of another name are refused.
        passphrase: Secret of the cluster: mutual TLS between all who know it.
        insecure: Take plaintext peers from other hosts without proof; needed on both sides.
        secret_file: File of the per-user secret that peers on one host prove; None: the default place.
        join_timeout: Seconds to wait for the seeds; None for ever.
        observe: Answer observers on the node's port.
        default_timeout: Seconds a call waits for its first answer unless it says otherwise; None for ever.
        start_timeout: Seconds an actor's `on_start` may take; None for ever. Constructors are not limited.
        stop_timeout: Seconds an actor's `on_stop` may take; a killed actor's gets one.
        max_message: Largest message accepted from a peer, in bytes; None: 4 GiB.
        process_start_timeout: Seconds that the process of an actor (``new_process=True``) may take until it has joined;
            None for ever.
    """

    addr: str | None = None
    seeds: tuple[str, ...] = ()
    cluster: str = "default"
    passphrase: str | None = field(default=None, repr=False)
    insecure: bool = False
    secret_file: str | None = None
    join_timeout: float | None = 10.0
    observe: bool = True
    default_timeout: float | None = DEFAULT_TIMEOUT
    start_timeout: float | None = HOOK_TIMEOUT
    stop_timeout: float = HOOK_TIMEOUT
    max_message: int | None = None
    process_start_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.seeds, str):
            raise ConfigError(f"seeds={self.seeds!r}: expected a list of host:port, as in seeds=[{self.seeds!r}]")
        object.__setattr__(self, "seeds", tuple(self.seeds or ()))
        for name in ("join_timeout", "default_timeout", "start_timeout", "process_start_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value}: expected seconds above 0, or None for ever")
        if not self.stop_timeout > 0:
            raise ConfigError(f"stop_timeout={self.stop_timeout}: expected seconds above 0")
        if self.passphrase is not None and self.insecure:
            raise ConfigError("passphrase and insecure=True exclude each other: a cluster has a secret, or it has none")

    @classmethod
    def standalone(cls) -> Self:
        """A node of its own on this host."""
        return cls(addr="127.0.0.1:0")

    @classmethod
    def with_addr(cls, addr: str) -> Self:
        """A node that listens on `addr`, ``host:port``."""
        return cls(addr=addr)

    def with_seeds(self, seeds: Sequence[str]) -> Self:
        """The same, joining `seeds`."""
        return dataclasses.replace(self, seeds=tuple(seeds))

    def with_passphrase(self, passphrase: str) -> Self:
        """The same, with a secret."""
        return dataclasses.replace(self, passphrase=passphrase)

    def with_head_node(self) -> Self:
        """The same: any node can be the seed of others, so that there is no special one."""
        return self

    def with_head_addr(self, addr: str) -> Self:
        """The same, joining `addr`."""
        return dataclasses.replace(self, seeds=(*self.seeds, addr))

    def is_tls_enabled(self) -> bool:
        """Whether traffic is encrypted."""
        return self.passphrase is not None
