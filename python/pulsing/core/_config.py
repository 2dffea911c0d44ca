"""What a system is started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, TypedDict

from pulsing.core._settings import MAX_MESSAGE, SETTINGS, Preset, check_security
from pulsing.core._shown import shown
from pulsing.exceptions import ConfigError

DEFAULT_TIMEOUT = 30.0
"""Seconds a call waits for its first answer (R5)."""
HOOK_TIMEOUT = 60.0
"""Seconds that `on_start` and `on_stop` may take; a Worker drains in the latter."""


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """Settings of one node. Every one but the security has a default that works on one machine.

    `docs/reference/settings.md` lists them with their flags and variables; neither is looked at here.

    Args:
        addr: ``host:port`` to listen on; None: a free port on the interface that reaches the first seed.
        advertise: ``host:port`` where others reach this node, if not at `addr`: behind NAT, in a container. Port 0: the
            one it listens on.
        seeds: Nodes to join: ``host:port`` (every address of a name), ``k8s://service.namespace:port``, or ``file:///path``
            of a file with one of those a line; none: this is the first node.
        cluster: Name of the cluster; nodes of another name are refused.
        passphrase: Secret of the cluster: mutual TLS between all who know it.
        cert: PEM file of this node's certificate, which names its address or the cluster: mutual TLS between the nodes
            of one authority. The files are read again when they change.
        key: PEM file of its private key.
        ca: PEM file of the authorities whose nodes are let in.
        insecure: Take plaintext peers from other hosts without proof; needed on both sides.
        secret_file: File of the per-user secret that peers on one host prove; None: the default place.
        join_timeout: Seconds to wait for the seeds; None for ever.
        observe: Answer observers on the node's port.
        observe_addr: ``host:port`` where observers are answered besides, in plain HTTP whatever the security; None:
            nowhere. What it tells is read-only and open to whoever reaches it.
        handshake_timeout: Seconds that a connection may take to say what it is, and to prove it.
        max_handshakes: Connections that may be doing so.
        max_observers: Observers served at once, at each of the two places.
        preset: How patient failure detection is: "local", "lan", "wan"; "auto": local without a secret, else lan.
        default_timeout: Seconds a call waits for its first answer unless it says otherwise; None for ever.
        start_timeout: Seconds an actor's constructor may take, and then its `on_start`; None for ever. The default
            lets a constructor load a large model. One that blocks its caller's own loop cannot be limited.
        stop_timeout: Seconds an actor's `on_stop` may take; a killed actor's gets one.
        stop_grace: Seconds that running handlers get when their actor or the node is stopped.
        process_start_timeout: Seconds that the process of an actor (``new_process=True``) may take until it has joined;
            None for ever.
        mailbox: Messages that may wait in front of an actor (16 to 1,000,000).
        max_concurrency: Handlers of one actor that may interleave.
        max_message: Largest message sent to a peer or accepted from one, in bytes.
        stream_idle: Seconds in which a stream may bring its consumer no item before it fails; None for ever.
        max_restarts: Restarts that an actor with a restart policy gets within `restart_window`.
        min_backoff: Seconds before the first restart of a series.
        max_backoff: Longest wait before a restart in seconds.
        restart_window: Seconds over which restarts are counted.
        watchdog: Seconds for which the event loop may be blocked before what blocks it is logged; None: off. Of several
            systems on one loop the last one decides.

    Raises:
        ConfigError: A value that does not fit; the message says which would.
    """

    addr: str | None = None
    advertise: str | None = None
    seeds: tuple[str, ...] = ()
    cluster: str = "default"
    passphrase: str | None = field(default=None, repr=False)
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    insecure: bool = False
    secret_file: str | None = None
    join_timeout: float | None = 10.0
    observe: bool = True
    observe_addr: str | None = None
    handshake_timeout: float = 5.0
    max_handshakes: int = 512
    max_observers: int = 256
    preset: Preset = "auto"
    default_timeout: float | None = DEFAULT_TIMEOUT
    start_timeout: float | None = 600.0
    stop_timeout: float = 60.0
    stop_grace: float = 5.0
    process_start_timeout: float | None = 30.0
    mailbox: int = 256
    max_concurrency: int = 256
    max_message: int = MAX_MESSAGE
    stream_idle: float | None = 300.0
    max_restarts: int = 3
    min_backoff: float = 0.1
    max_backoff: float = 30.0
    restart_window: float = 300.0
    watchdog: float | None = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.seeds, str):
            raise ConfigError(
                f"seeds={shown(self.seeds)}: expected a list of host:port, as in seeds=[{shown(self.seeds)}]"
            )
        if self.seeds is not None and not isinstance(self.seeds, Iterable):
            raise TypeError(f"seeds={shown(self.seeds)}: expected a list of host:port")
        object.__setattr__(self, "seeds", tuple(self.seeds or ()))
        for seed in self.seeds:
            if not isinstance(seed, str):
                raise TypeError(f"seeds: {shown(seed)} is no host:port")
        for setting in SETTINGS:
            if setting.field:
                setting.check(getattr(self, setting.name))
        if self.min_backoff > self.max_backoff:
            raise ConfigError(f"min_backoff={self.min_backoff} is longer than max_backoff={self.max_backoff}")
        check_security(self.passphrase, self.cert, self.key, self.ca, self.insecure)

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

    def with_certificate(self, cert: str, key: str, ca: str) -> Self:
        """The same, with a certificate of its own: PEM files of it, of its key, and of the authorities."""
        return dataclasses.replace(self, cert=cert, key=key, ca=ca)

    def with_head_node(self) -> Self:
        """The same: any node can be the seed of others, so that there is no special one."""
        return self

    def with_head_addr(self, addr: str) -> Self:
        """The same, joining `addr`."""
        return dataclasses.replace(self, seeds=(*self.seeds, addr))

    def is_tls_enabled(self) -> bool:
        """Whether traffic is encrypted."""
        return self.passphrase is not None or self.cert is not None


class NodeSettings(TypedDict, total=False):
    """The settings that `pul.init` and `pul.actor_system` take by name; `SystemConfig` says what they mean."""

    advertise: str | None
    cluster: str
    cert: str | None
    key: str | None
    ca: str | None
    insecure: bool
    secret_file: str | None
    join_timeout: float | None
    observe: bool
    observe_addr: str | None
    handshake_timeout: float
    max_handshakes: int
    max_observers: int
    preset: Preset
    default_timeout: float | None
    start_timeout: float | None
    stop_timeout: float
    stop_grace: float
    process_start_timeout: float | None
    mailbox: int
    max_concurrency: int
    max_message: int
    stream_idle: float | None
    max_restarts: int
    min_backoff: float
    max_backoff: float
    restart_window: float
    watchdog: float | None
