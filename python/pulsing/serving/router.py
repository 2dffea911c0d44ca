"""The Router: an actor that owns a native HTTP server. No request passes through Python."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

from pulsing import _core
from pulsing.core import Actor, ActorRef, Message
from pulsing.core._actor import cell_of
from pulsing.exceptions import ConfigError
from pulsing.serving import _router_settings as table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from pulsing.core import ActorId, ActorSystem, InboundCall
    from pulsing.serving._router_settings import RouterSettings
    from pulsing.serving._schedulers import Scheduler

__all__ = ["Router", "RouterRunner", "start_router", "stop_router"]

_log = logging.getLogger("pulsing.serving")

# A pick that is no id: the gateway counts the scheduler as failed for this request, and lets its policy decide.
_FAILED = ""


class _SchedulerActor(Actor):
    """Answers the gateway's questions with a Python scheduler's choices."""

    __pulsing_protocols__: ClassVar[set[int]] = {2}

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def on_start(self, actor_id: ActorId) -> None:
        await _maybe(getattr(self._scheduler, "start", None))

    async def on_stop(self) -> None:
        await _maybe(getattr(self._scheduler, "stop", None))

    async def on_protocol_call(self, call: InboundCall) -> None:
        requests = json.loads(call.head)["requests"]
        picks = await asyncio.gather(*(self._pick(one["text"], one["headers"]) for one in requests))
        call.reply(json.dumps({"picks": picks}).encode())

    async def _pick(self, text: str, headers: dict[str, str]) -> str | None:
        try:
            # Old schedulers may be plain functions.
            worker: Any = self._scheduler.select_worker(text, headers)
            if inspect.isawaitable(worker):
                worker = await worker
            # A proxy is as good as the reference behind it.
            ref = getattr(worker, "ref", worker)
            if not isinstance(ref, ActorRef | None):
                raise TypeError(f"it must return an ActorRef, an ActorProxy or None, not {worker!r}")
        except Exception:  # noqa: BLE001 - whatever a user's scheduler raises
            _log.exception("%s.select_worker failed; the Router's own policy decides", type(self._scheduler).__name__)
            return _FAILED
        return None if ref is None else str(ref.actor_id)


async def _maybe(hook: Callable[[], Any] | None) -> None:
    if hook is not None:
        result = hook()
        if inspect.isawaitable(result):
            await result


class RouterRunner:
    """A running Router that is no actor, as `start_router` returns it."""

    def __init__(self, system: ActorSystem, gateway: _core.Gateway, picker: ActorRef | None, grace: float) -> None:
        self._grace = grace
        self._system = system
        self._gateway = gateway
        self._picker = picker

    @property
    def addr(self) -> str:
        """``host:port`` it listens on."""
        return self._gateway.addr

    @property
    def port(self) -> int:
        """The port alone."""
        return self._gateway.port

    async def stop(self, grace: float | None = None) -> None:
        """Stops accepting, lets requests finish for up to `grace` seconds, then cuts what is left. None: the Router's
        `drain_timeout`."""
        if grace is None:
            grace = self._grace
        await self._system.run_core(lambda _, bridge, token: self._gateway.shutdown(bridge, token, grace))
        if self._picker is not None:
            picker, self._picker = self._picker, None
            await self._system.stop(picker)


async def _start(system: ActorSystem, scheduler: Scheduler | None, settings: Mapping[str, Any]) -> RouterRunner:
    picker = None
    if scheduler is not None:
        picker = await system.spawn(_SchedulerActor(scheduler), _internal=True)
    address = None if picker is None else (picker.node_id.raw, picker.actor_id.raw)
    handed = json.dumps(table.of_the_gateway(settings))
    try:
        gateway = await system.run_core(
            lambda core, bridge, token: _core.start_gateway(core, bridge, token, settings=handed, scheduler=address)
        )
    except BaseException:
        if picker is not None:
            await system.stop(picker)
        raise
    return RouterRunner(system, gateway, picker, settings["drain_timeout"])


class Router(Actor):
    """Serves OpenAI's API over HTTP in front of the Workers that serve under one name.

    Every setting may also come from a variable (``PULSING_ROUTER_HTTP_PORT``) or from the file `config`; an argument
    comes first, then the variable, the file, the default. `docs/reference/router.md` lists them all.

    Args:
        http_host: Address to listen on; ``0.0.0.0`` is every interface.
        http_port: Port to listen on; 0 takes a free one.
        model_name: Public name of whatever the workers serve; their own model names are accepted too.
        worker_name: Name the workers are registered under.
        scheduler_type: stream_load (least pushed load), round_robin, random, power_of_two, consistent_hash or
            cache_aware.
        config: TOML file of settings. Variable: PULSING_ROUTER_CONFIG.
        settings: Any other setting by name.

    Raises:
        ConfigError: A value that does not fit, or a setting that there is not; named with its source.
    """

    default_name: ClassVar[str] = "router"
    """Name that ``pulsing actor`` gives it: a Router must not pass for one of its workers."""

    __pulsing_settings__: ClassVar[tuple[table.RouterSetting, ...]] = table.SETTINGS

    def __init__(
        self,
        http_host: str | None = None,
        http_port: int | None = None,
        model_name: str | None = None,
        worker_name: str | None = None,
        scheduler_type: str | None = None,
        *,
        config: str | os.PathLike[str] | None = None,
        **settings: Unpack[RouterSettings],
    ) -> None:
        first = {
            "http_host": http_host,
            "http_port": http_port,
            "model_name": model_name,
            "worker_name": worker_name,
            "scheduler_type": scheduler_type,
        }
        self._settings = table.resolve({**first, **settings}, None if config is None else os.fspath(config))
        self.http_host: str = self._settings["http_host"]
        self.http_port: int = self._settings["http_port"]
        self.served = table.served(self._settings)
        self.model_name: str = self.served[0].name
        self.worker_name: str = self.served[0].worker_name
        self.scheduler_type: str = self._settings["scheduler_type"]
        self.drain_timeout: float = self._settings["drain_timeout"]
        self._runner: RouterRunner | None = None

    def scheduler(self, system: ActorSystem) -> Scheduler | None:
        """A scheduler that decides before the policy does; override it to plug one in. None: the policy decides."""
        return None

    @property
    def addr(self) -> str | None:
        """``host:port`` it listens on; None before it has started."""
        return None if self._runner is None else self._runner.addr

    def metadata(self) -> dict[str, str]:
        """What the registry shows of this Router."""
        return {"kind": "router", "model": self.model_name, "http": f"{self.http_host}:{self.http_port}"}

    async def on_start(self, actor_id: ActorId) -> None:
        """Starts the HTTP server.

        Raises:
            ConfigError: The Router has the name of the workers it looks for.
            BindError: The port is taken.
        """
        cell = cell_of(self)
        if any(cell.name == one.worker_name for one in self.served):
            raise ConfigError(
                f"this Router is named {cell.name!r}, the name of the workers it routes to: give it another name "
                f"(--name {self.default_name}), or look for workers under another one (--worker_name)"
            )
        self._runner = await _start(cell.system, self.scheduler(cell.system), self._settings)
        # With port 0 only now known.
        self.set_metadata(http=self._runner.addr)
        for one in self.served:
            _log.info("Router serves %r on http://%s for workers named %r", one.name, self.addr, one.worker_name)

    async def on_stop(self) -> None:
        """Lets requests finish for up to `drain_timeout` seconds."""
        if self._runner is not None:
            await self._runner.stop(self.drain_timeout)

    async def receive(self, msg: Any) -> Any:
        """Answers ``HealthCheck`` and ``GetConfig``."""
        kind = msg.msg_type if isinstance(msg, Message) else type(msg).__name__
        port = self.http_port if self._runner is None else self._runner.port
        if kind == "HealthCheck":
            status = "healthy" if self._runner is not None else "stopped"
            return Message.from_json("Ok", {"status": status, "http_port": port, "model_name": self.model_name})
        if kind == "GetConfig":
            return Message.from_json(
                "Config",
                {
                    "http_host": self.http_host,
                    "http_port": port,
                    "model_name": self.model_name,
                    "worker_name": self.worker_name,
                    "models": {one.name: ":".join(filter(None, one[1:])) for one in self.served},
                    "scheduler_type": self.scheduler_type,
                },
            )
        return Message.from_json("Error", {"error": f"a Router answers HealthCheck and GetConfig, not {kind!r}"})


async def start_router(
    system: ActorSystem,
    http_host: str | None = None,
    http_port: int | None = None,
    model_name: str | None = None,
    worker_name: str | None = None,
    scheduler_type: str | None = None,
    scheduler: Scheduler | None = None,
    scheduler_class: Callable[..., Scheduler] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    **settings: Unpack[RouterSettings],
) -> RouterRunner:
    """Starts a Router on `system` without an actor around it. End it with `stop_router`.

    Args:
        system: The system whose cluster the workers are in.
        http_host: Address to listen on.
        http_port: Port to listen on; 0 takes a free one.
        model_name: Public name of whatever the workers serve.
        worker_name: Name the workers are registered under.
        scheduler_type: The policy; also what decides when a scheduler is late or returns None.
        scheduler: Decides in Python before the policy does.
        scheduler_class: Called with `(system, worker_name)` to make one.
        config: TOML file of settings, as for `Router`; variables count too.
        settings: Any other setting of a `Router` by name; `drain_timeout` is what `RouterRunner.stop` waits by default.

    Raises:
        ConfigError: An argument makes no sense.
        BindError: The port is taken.
    """
    first = {
        "http_host": http_host,
        "http_port": http_port,
        "model_name": model_name,
        "worker_name": worker_name,
        "scheduler_type": scheduler_type,
    }
    values = table.resolve({**first, **settings}, None if config is None else os.fspath(config))
    if scheduler is not None and scheduler_class is not None:
        raise ConfigError("scheduler and scheduler_class exclude each other: give one of them")
    if scheduler_class is not None:
        scheduler = scheduler_class(system, table.served(values)[0].worker_name)
    if scheduler is not None and not callable(getattr(scheduler, "select_worker", None)):
        raise ConfigError(f"scheduler={scheduler!r} has no select_worker(request_text, headers)")
    return await _start(system, scheduler, values)


async def stop_router(runner: RouterRunner, grace: float | None = None) -> None:
    """Ends a Router of `start_router`; requests under way get `grace` seconds (None: its `drain_timeout`) to finish."""
    await runner.stop(grace)
