"""Pulsing inside a Ray job: every process that asks becomes a node of one cluster.

They meet at a named Ray actor in the job's namespace, which knows who lives and hands on the cluster's secret.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import secrets
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Unpack

from pulsing.core._config import NodeSettings
from pulsing.core._system import ActorSystem
from pulsing.exceptions import JoinError, PulsingError, PulsingRuntimeError, RefusedError
from pulsing.integrations._job import Membership, Options, Terms, complete, off_loop
from pulsing.integrations._meeting import Entry
from pulsing.integrations._ray_actor import Beats, RayMeeting

if TYPE_CHECKING:
    from pulsing.sync import System

__all__ = ["async_init_in_ray", "cleanup", "cleanup_ray", "init_in_ray", "init_inside_ray", "is_inside_ray"]

_log = logging.getLogger("pulsing")

_ATTEMPT = 5.0
"""Seconds for the nodes that the rendezvous names to let us in, before it is asked for others."""
_ANSWER_WITHIN = 30.0
_ASK_AGAIN = 0.05
_BRIDGE_WITHIN = 10.0
_ANONYMOUS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_membership = Membership("pul.init_inside_ray()")


def is_inside_ray() -> bool:
    """Whether this process is a driver or a worker of a Ray job. Ray is not loaded to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


async def init_inside_ray(
    *,
    addr: str | None = None,
    expected: int | None = None,
    namespace: str | None = None,
    passphrase: str | None = None,
    passphrase_file: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    **settings: Unpack[NodeSettings],
) -> ActorSystem:
    """Joins the cluster of this Ray job, or begins it. Any process of the job may call: the driver, actors, tasks.

    Called again in a process it returns the system that runs. Unless one is given, the cluster's secret is made for the
    job and handed on by the rendezvous: who may run code in the job may join.

    Args:
        addr: ``host:port`` to listen on; default: a free port on the address that Ray knows this host by.
        expected: Nodes to wait for, this one counted; default: do not wait.
        namespace: Ray namespace of the rendezvous; default: the job's. Jobs that name the same one share a cluster.
        passphrase: Secret of the cluster, the same in all processes.
        passphrase_file: File with it; default: as for `pul.init`.
        config: TOML file of settings; default: ``PULSING_CONFIG``, if set.
        **settings: As for `pul.init`. `join_timeout` (60 s) limits the whole call; processes that name different
            `cluster`s form different ones.

    Raises:
        PulsingRuntimeError: Ray is missing or not initialized; the process has another system.
        JoinError: No node of the cluster let us in, or fewer than expected came, in time.
        ConfigError: The processes were not given the same kind of secret, or settings make no sense.
        BindError, RefusedError: As `pul.init`.
    """
    ray = _ray()
    options = Options(
        addr=addr,
        expected=expected,
        passphrase=passphrase,
        passphrase_file=passphrase_file,
        config=config,
        settings=dict(settings),
    )

    async def start() -> ActorSystem:
        system = await _Joining(ray, options, namespace).run()
        return await complete(system, options.expected, options.deadline, stop=True)

    which = (_namespace(ray, namespace), options.cluster)
    # Again, for those who were not the first here, or ask for more.
    return await complete(await _membership.join(which, start), options.expected, options.deadline)


async_init_in_ray = init_inside_ray


def init_in_ray(**settings: Any) -> System:
    """`init_inside_ray` for code without an event loop; the same as ``pul.sync.init_inside_ray``."""
    from pulsing import sync

    return sync.init_inside_ray(**settings)


def cleanup_ray(*, namespace: str | None = None, cluster: str = "default") -> None:
    """Ends the rendezvous of a job whose nodes have ended; nodes that run bring it back. It need not be called: without
    nodes the rendezvous ends by itself, within seconds if the last one left in order, else within half a minute.

    Args:
        namespace: As for `init_inside_ray`.
        cluster: As for `init_inside_ray`.

    Raises:
        PulsingRuntimeError: Ray is missing or not initialized.
    """
    ray = _ray()
    try:
        meeting = ray.get_actor(_name(cluster), namespace=_namespace(ray, namespace))
    except ValueError:
        return
    ray.kill(meeting)


cleanup = cleanup_ray


def _name(cluster: str) -> str:
    return f"pulsing-rendezvous-{cluster}"


def _namespace(ray: Any, given: str | None) -> str:
    if given is not None:
        return given
    context = ray.get_runtime_context()
    own = str(context.namespace)
    # What Ray calls the namespace of a job that named none. It warns of detached actors there.
    return f"pulsing-job-{context.get_job_id()}" if _ANONYMOUS.fullmatch(own) else own


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise PulsingRuntimeError("pul.init_inside_ray() needs Ray: pip install 'pulsing[ray]'") from error
    if not ray.is_initialized():
        raise PulsingRuntimeError(
            "Ray is not initialized in this process: call ray.init() before pul.init_inside_ray(). Workers of Ray are"
        )
    return ray


class _Joining:
    """One process's way into the cluster."""

    def __init__(self, ray: Any, options: Options, namespace: str | None) -> None:
        self._ray = ray
        self._options = options
        self._namespace = namespace
        self._who = secrets.token_hex(16)
        self._meeting: Any = None
        self._terms = ""

    async def run(self) -> ActorSystem:
        listen = await off_loop(self._listen)
        # All ever found away: with only the last ones, two sets of dead nodes would be named in turn for ever.
        away: set[str] = set()
        tried: Exception | None = None
        deadline = self._options.deadline
        while True:
            entry = Entry()
            try:
                entry = await self._enter(tuple(away))
                system = await self._attempt(entry, listen)
                if system is not None:
                    return system
            except (JoinError, RefusedError) as error:
                tried = error
                away.update(entry.seeds)
            except (self._ray.exceptions.RayActorError, TimeoutError) as error:
                # It had just ended, or is being started anew elsewhere.
                tried, self._meeting = error, None
            if deadline.passed:
                because = f": {tried}" if tried is not None else ": the process chosen to begin it has not done so yet"
                raise JoinError(f"the Ray job's cluster was not joined within {deadline.limit:g} s{because}") from tried
            await asyncio.sleep(_ASK_AGAIN)

    async def _attempt(self, entry: Entry, listen: str) -> ActorSystem | None:
        if not entry.first and not entry.seeds:
            return None
        terms = Terms.read(self._terms)
        system = await self._options.start(terms, listen, entry.seeds, self._options.deadline.left(_ATTEMPT))
        try:
            if entry.first and not await self._call("begin", self._who, system.addr):
                await system.shutdown(0)
                return None
            if not entry.first:
                await self._call("beat", system.addr)
        except BaseException:
            # The rendezvous may have heard what we have no answer to. Nobody waits for this one.
            self._meeting.leave.remote(system.addr)
            await system.shutdown(0)
            raise
        Beats(self._ray, system, lambda: self._find(self._terms), lambda lost: _bridge(system, lost)).start(
            self._meeting, self._terms
        )
        return system

    def _listen(self) -> str:
        host = str(self._ray.util.get_node_ip_address())
        return f"[{host}]:0" if ":" in host else f"{host}:0"

    async def _enter(self, away: tuple[str, ...]) -> Entry:
        if self._meeting is None:
            self._meeting = await off_loop(self._find, self._options.terms("ray").text())
            self._terms = await self._call("terms")
        entry: Entry = await self._call("enter", self._who, away)
        return entry

    def _find(self, terms: str) -> Any:
        """The rendezvous, begun on `terms` if there is none."""
        # Detached: the process that happens to come first may end before the others. No CPU, or a full cluster would
        # have no room for it; and in no placement group, which would take it along.
        options = {
            "name": _name(self._options.cluster),
            "namespace": _namespace(self._ray, self._namespace),
            "get_if_exists": True,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": "DEFAULT",
        }
        try:
            return self._ray.remote(RayMeeting).options(**options).remote(terms)
        except ValueError as error:
            # It was there and ended while Ray looked for it: the next try makes one.
            raise TimeoutError(str(error)) from error

    async def _call(self, method: str, *args: Any) -> Any:
        async with asyncio.timeout(self._options.deadline.left(_ANSWER_WITHIN)):
            return await getattr(self._meeting, method).remote(*args)


def _bridge(system: ActorSystem, lost: tuple[str, ...]) -> Future[None]:
    """Brings two halves of the job together that began apart, or lost each other: a node that joins both."""

    async def join_both() -> None:
        host = system.addr.rpartition(":")[0]
        config = dataclasses.replace(
            system.config,
            addr=f"{host}:0",
            advertise=None,
            seeds=(system.addr, *lost),
            join_timeout=_BRIDGE_WITHIN,
        )
        try:
            between = await ActorSystem.create(config)
        except PulsingError as error:
            _log.debug("nodes of the Ray job at %s are out of reach: %s", ", ".join(lost), error)
            return
        try:
            end = asyncio.get_running_loop().time() + _BRIDGE_WITHIN
            while asyncio.get_running_loop().time() < end:
                here = {one["addr"] for one in await system.members() if one["state"] == "alive"}
                if here.issuperset(lost):
                    _log.warning("nodes of the Ray job that were apart are together again: %s", ", ".join(lost))
                    return
                await asyncio.sleep(0.1)
        finally:
            await between.shutdown(0)

    return asyncio.run_coroutine_threadsafe(join_both(), system.loop)
