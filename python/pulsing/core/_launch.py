"""How a node's own actors come to life: a name that is free, a place in the tables, a start, a published name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pulsing import _core
from pulsing.core._cell import Cell
from pulsing.core._checks import clean_name
from pulsing.core._errors import from_core
from pulsing.core._ids import ActorId
from pulsing.core._inbound import Inlet
from pulsing.core._life import OPEN, words
from pulsing.core._refs import ActorRef
from pulsing.core._spawn import Blueprint, Given, SpawnOptions, check_actor
from pulsing.exceptions import NameTakenError

if TYPE_CHECKING:
    from pulsing.core._bridge import LoopBridge
    from pulsing.core._system import ActorSystem

_log = logging.getLogger("pulsing")


class Launcher:
    """Starts the actors of one node.

    Args:
        system: The node.
        bridge: The bridge of its loop, over which messages reach its actors.
    """

    def __init__(self, system: ActorSystem, bridge: LoopBridge) -> None:
        self._system = system
        self._bridge = bridge

    def free(self, name: str, unique: bool) -> str:
        """The name as it is stored, once it is known that it may be claimed.

        Raises:
            NameTakenError: It has a holder on this node; or anywhere, if that holder is unique or the claim is.
        """
        name = clean_name(name)
        if self._system.named(name) is not None or self._system.processes.find(name) is not None:
            raise NameTakenError(f"name {name!r} is already taken on this node; stop its holder or choose another name")
        try:
            # Before any of the user's code runs; `register` looks again.
            self._system.core.check_vacant(name, unique)
        except _core.CoreError as error:
            raise from_core(error.args) from None
        return name

    async def launch(self, plan: Blueprint, options: SpawnOptions, actor: ActorId | None, internal: bool) -> ActorRef:
        """Starts an actor and returns when it is ready and its name is known.

        Args:
            plan: What makes the instance.
            options: How it lives.
            actor: Its id, when whoever asked for it has chosen one.
            internal: It is part of the runtime.
        """
        cell = self._cell(plan, options, actor)
        self._system.enter(cell)
        try:
            await cell.life.start()
            self._publish(cell, options.public, internal)
            if cell.life.tools is not None:
                await cell.life.tools.published()
        except BaseException as error:
            cell.state = OPEN if cell.state < OPEN else cell.state
            cell.life.begin("fail", 0.0, words(error))
            await cell.life.end("fail", 0.0)
            raise
        return self._system.ref_of(cell)

    def mount(self, instance: Any, name: str, public: bool) -> None:
        """Makes an object an actor whose asynchronous `on_start` is not waited for."""
        check_actor(instance)
        clean_name(name)
        cell = self._cell(Blueprint(Given(instance)), SpawnOptions(name, public), None)
        self._system.enter(cell)
        cell.life.adopt(instance)
        try:
            self._publish(cell, public, False)
        except BaseException:
            self._system.remove(cell)
            raise

        async def start() -> None:
            try:
                await cell.life.start(made=True)
                if cell.life.tools is not None:
                    await cell.life.tools.published()
            except Exception as error:  # noqa: BLE001 - whatever the user's hook raises
                _log.exception("on_start of mounted actor %s failed: it is unmounted", name)
                cell.state = OPEN if cell.state < OPEN else cell.state
                cell.life.begin("fail", 0.0, words(error))

        self._system.background(start())

    def _cell(self, plan: Blueprint, options: SpawnOptions, actor: ActorId | None) -> Cell:
        system = self._system
        system.check_usable()
        name = None if options.name is None else self.free(options.name, options.unique)
        cell = Cell(
            system,
            plan,
            name=name,
            policy=options.policy.under(system.config),
            mailbox=options.mailbox or system.config.mailbox,
            max_concurrency=options.max_concurrency or system.config.max_concurrency,
            actor=actor,
        )
        cell.unique = options.unique
        if name is not None:
            system.claim(name, cell)
        return cell

    def _publish(self, cell: Cell, public: bool | None, internal: bool) -> None:
        cell.public = cell.name is not None and public is not False
        cell.internal = internal or (cell.name or "").startswith("_")
        cell.key = self._bridge.token(Inlet(self._bridge, cell))
        try:
            self._system.core.register(
                self._bridge.core,
                cell.key,
                cell.id.raw,
                name=cell.name,
                public=cell.public,
                class_name=cell.class_name,
                metadata=cell.metadata,
                internal=cell.internal,
                unique=cell.unique,
            )
        except _core.CoreError as error:
            raise from_core(error.args) from None
