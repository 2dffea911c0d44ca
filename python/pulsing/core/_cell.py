"""One actor: what it is, and the parts that make it live."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from pulsing.core._actor import nothing
from pulsing.core._dispatch import MethodSpec
from pulsing.core._handlers import MAX_CONCURRENCY, Handlers
from pulsing.core._ids import ActorId
from pulsing.core._life import STARTING, Life
from pulsing.core._mailbox import CAPACITY, Mailbox
from pulsing.core._supervision import RestartPolicy

if TYPE_CHECKING:
    from pulsing.core._spawn import Blueprint
    from pulsing.core._system import ActorSystem

_log = logging.getLogger("pulsing")


class Cell:
    """An actor on its loop. Everything here runs on that loop's thread."""

    __slots__ = (
        "__weakref__",
        "context",
        "handlers",
        "id",
        "instance",
        "internal",
        "key",
        "life",
        "loss",
        "mailbox",
        "metadata",
        "methods",
        "name",
        "protocols",
        "public",
        "raw",
        "receive",
        "state",
        "system",
        "unique",
    )

    def __init__(
        self,
        system: ActorSystem,
        plan: Blueprint,
        *,
        name: str | None,
        policy: RestartPolicy,
        mailbox: int = CAPACITY,
        max_concurrency: int = MAX_CONCURRENCY,
        actor: ActorId | None = None,
    ) -> None:
        self.system = system
        # Where another node asked for the actor, the id is that node's choice.
        self.id = ActorId.generate() if actor is None else actor
        self.raw = self.id.raw
        self.name = name
        self.instance: Any = None
        self.methods: dict[str, MethodSpec] = {}
        """The instance's remote methods."""
        self.receive: MethodSpec | None = None
        """How the instance's `receive` runs, if it has one."""
        self.protocols: Collection[int] = ()
        """Codecs whose calls the actor takes raw, in `on_protocol_call`."""
        self.metadata: dict[str, str] = {}
        self.state = STARTING
        self.key = 0
        self.internal = False
        self.public = False
        self.unique = False
        self.loss: str | None = None
        """How it lost its unique name, if it did."""
        self.context = copy_context()
        """What its handlers' contexts are copied from: the surroundings of its spawn."""
        self.mailbox = Mailbox(self, mailbox)
        self.handlers = Handlers(self, max_concurrency)
        self.life = Life(self, plan, policy)

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing, ()

    @property
    def label(self) -> str:
        """How messages name it."""
        return self.name or str(self.id)

    @property
    def class_name(self) -> str:
        """``module.Class`` of the instance."""
        cls = type(self.instance)
        return f"{cls.__module__}.{cls.__qualname__}"

    def displaced(self, loss: str) -> None:
        """Another node's older claim of its unique name stands: the actor stops."""
        self.loss = loss
        _log.error("%s: it stops", loss)
        self.system.background(self.system.kill(self.id))
