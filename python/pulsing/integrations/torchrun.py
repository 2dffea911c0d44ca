"""Pulsing inside a torchrun job: every rank becomes a node of one cluster.

The ranks meet at the job's own store, ``torch.distributed.TCPStore`` at ``MASTER_ADDR:MASTER_PORT``, before or after
``init_process_group``. Rank 0 is the seed. Each start of the job's workers is a cluster of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from pulsing.core._config import NodeSettings
from pulsing.core._system import ActorSystem
from pulsing.exceptions import ConfigError, JoinError, PulsingRuntimeError, RefusedError
from pulsing.integrations._job import Deadline, Membership, Options, Terms, complete, off_loop

if TYPE_CHECKING:
    from pulsing.sync import System

__all__ = ["async_init_in_torchrun", "init_in_torchrun", "init_inside_torchrun", "is_torchrun"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ATTEMPT = 5.0
"""Seconds for one look at the store, or for one attempt to reach rank 0 before its address is looked up again: a store
that outlives the workers may still hold that of an earlier start."""
_LOOK_EVERY = 0.05
_HOLD = 10.0
"""Seconds that rank 0, having failed, waits for the others to learn of it from a store that ends with its process."""
_membership = Membership("pul.init_inside_torchrun()")
_served: list[Any] = []
"""Stores, which rank 0 may serve, of ranks that are not waited for: they may look things up later."""
_rounds = 0
"""Clusters that this process has asked for: ranks that shut down and begin again must not meet their old ones."""


def is_torchrun() -> bool:
    """Whether this process is a rank of a job: torchrun's variables are set."""
    return all(os.environ.get(name) for name in _VARIABLES)


async def init_inside_torchrun(
    *,
    addr: str | None = None,
    expected: int | None = None,
    passphrase: str | None = None,
    passphrase_file: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    **settings: Unpack[NodeSettings],
) -> ActorSystem:
    """Joins the cluster of this torchrun job, and returns when all its ranks have; every rank must call it.

    Called again it returns the system that runs. Where all ranks run on one host the cluster is protected by the
    per-user secret, else by a passphrase that rank 0 makes and the store hands on, unless one is given.

    Args:
        addr: ``host:port`` to listen on; default: a free port on loopback if all ranks run on one host, else on the
            interface that reaches ``MASTER_ADDR``.
        expected: Nodes to wait for, this one counted; default: ``WORLD_SIZE``. 1: do not wait.
        passphrase: Secret of the cluster, the same on all ranks.
        passphrase_file: File with it; default: as for `pul.init`.
        config: TOML file of settings; default: ``PULSING_CONFIG``, if set.
        **settings: As for `pul.init`. `join_timeout` (60 s) limits the whole call; `cluster` is what the cluster's name
            begins with.

    Raises:
        PulsingRuntimeError: torch is missing, or this is no rank of a job; the process has another system.
        JoinError: Rank 0, or one of the others, was not there in time.
        ConfigError: The ranks were not given the same kind of secret, or settings make no sense.
        BindError, RefusedError: As `pul.init`.
    """

    async def start() -> ActorSystem:
        return await _start(options)

    options = Options(
        addr=addr,
        expected=expected,
        passphrase=passphrase,
        passphrase_file=passphrase_file,
        config=config,
        settings=dict(settings),
    )
    return await _membership.join(options.cluster, start)


async_init_in_torchrun = init_inside_torchrun


def init_in_torchrun(**settings: Any) -> System:
    """`init_inside_torchrun` for code without an event loop; the same as ``pul.sync.init_inside_torchrun``."""
    from pulsing import sync

    return sync.init_inside_torchrun(**settings)


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    world: int
    master: str
    """Host of the store; "" without one."""
    port: int
    one_host: bool


class _Board(Protocol):
    """Where rank 0 writes and the others read."""

    def write(self, text: str) -> None: ...

    def read(self, within: float) -> str | None: ...

    def hold(self, within: float) -> None: ...


async def _start(options: Options) -> ActorSystem:
    global _rounds  # noqa: PLW0603 - the process counts
    me = _rank()
    distributed = _distributed()
    _rounds += 1
    board = await off_loop(_board, distributed, me, _rounds, options.deadline)
    listen = "127.0.0.1:0" if me.one_host else _interface(me.master)
    system = await (_lead if me.rank == 0 else _follow)(options, me, board, listen)
    expected = options.expected or me.world
    await complete(system, expected, options.deadline, stop=True)
    if expected < me.world:
        _served.append(board)
    return system


async def _lead(options: Options, me: _Rank, board: _Board, listen: str) -> ActorSystem:
    terms = options.terms("torchrun", me.one_host)
    try:
        system = await options.start(terms, listen, (), options.deadline.left(_ATTEMPT))
    except Exception as error:
        # The others would wait for their whole limit.
        await off_loop(board.write, json.dumps({"failed": f"{type(error).__name__}: {error}"}))
        await off_loop(board.hold, options.deadline.left(_HOLD))
        raise
    await off_loop(board.write, json.dumps({"terms": terms.text(), "seed": system.addr}))
    return system


async def _follow(options: Options, me: _Rank, board: _Board, listen: str) -> ActorSystem:
    deadline = options.deadline
    tried: Exception | None = None
    while True:
        text = await off_loop(board.read, deadline.left(_ATTEMPT))
        found = {} if text is None else json.loads(text)
        if "failed" in found:
            raise JoinError(f"rank 0 could not begin the cluster: {found['failed']}")
        if "seed" in found:
            try:
                within = deadline.left(_ATTEMPT)
                return await options.start(Terms.read(found["terms"]), listen, (found["seed"],), within)
            except (JoinError, RefusedError) as error:
                tried = error
        if deadline.passed:
            raise JoinError(
                f"rank {me.rank} did not join rank 0 within {deadline.limit:g} s: "
                + (f"{tried}" if tried is not None else "rank 0 has not begun the cluster; does it call this, too?")
            ) from tried


def _distributed() -> Any:
    try:
        from torch import distributed
    except ImportError as error:
        raise PulsingRuntimeError("pul.init_inside_torchrun() needs torch: pip install torch") from error
    if not distributed.is_available():
        raise PulsingRuntimeError("this torch was built without torch.distributed; torchrun jobs need it")
    return distributed


def _rank() -> _Rank:
    if is_torchrun():
        rank, world, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        here = os.environ.get("LOCAL_WORLD_SIZE")
        one_host = here is not None and _number("LOCAL_WORLD_SIZE") == world
        return _Rank(rank, world, os.environ["MASTER_ADDR"], port, one_host)
    # Who has a process group has loaded it; loading torch takes seconds.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return _Rank(distributed.get_rank(), distributed.get_world_size(), "", 0, False)
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    raise PulsingRuntimeError(
        f"this process is no rank of a torchrun job: {', '.join(missing)} not set, and torch.distributed has no "
        "process group. Start it with torchrun, or use pul.init(seeds=[...])"
    )


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name}={os.environ[name]!r}: expected a whole number") from None


def _board(distributed: Any, me: _Rank, rounds: int, deadline: Deadline) -> _Board:
    if me.master:
        return _StoreBoard(distributed, me, rounds, deadline)
    return _GroupBoard(distributed, me, deadline)


class _StoreBoard:
    """A key of the job's store, which torchrun's agent serves; without an agent, rank 0 does, together with torch."""

    def __init__(self, distributed: Any, me: _Rank, rounds: int, deadline: Deadline) -> None:
        serve = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = distributed.TCPStore(
                me.master,
                me.port,
                is_master=serve,
                timeout=timedelta(seconds=deadline.left(300.0)),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (distributed.DistError, RuntimeError) as error:
            raise JoinError(f"the job's store at {me.master}:{me.port} cannot be used: {error}") from error
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = distributed.PrefixStore(f"pulsing/{job}/{start}/{rounds}", store)
        self._distributed = distributed
        self._told = False
        self._readers = me.world - 1 if serve else 0

    def write(self, text: str) -> None:
        self._store.set("seed", text)

    def read(self, within: float) -> str | None:
        try:
            self._store.wait(["seed"], timedelta(seconds=within))
            found: bytes = self._store.get("seed")
            if not self._told:
                self._store.add("told", 1)
                self._told = True
        except self._distributed.DistStoreError:
            return None
        except (self._distributed.DistError, RuntimeError) as error:
            raise JoinError(f"the job's store is gone: {error}") from error
        return found.decode()

    def hold(self, within: float) -> None:
        limit = time.monotonic() + within
        while self._store.add("told", 0) < self._readers and time.monotonic() < limit:
            time.sleep(_LOOK_EVERY)


class _GroupBoard:
    """The default process group, where the ranks did not meet at a store. What rank 0 writes all read, once."""

    def __init__(self, distributed: Any, me: _Rank, deadline: Deadline) -> None:
        self._distributed = distributed
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=deadline.left(300.0)))
        self._text: str | None = None

    def write(self, text: str) -> None:
        self._distributed.broadcast_object_list([text], src=0, group=self._group)

    def read(self, within: float) -> str | None:
        if self._text is None:
            found = [None]
            self._distributed.broadcast_object_list(found, src=0, group=self._group)
            self._text = found[0]
        return self._text

    def hold(self, within: float) -> None:
        """All have read when `write` returns."""


def _interface(master: str) -> str:
    """``address:0`` of this host that others reach it at, as far as the way to the master tells."""
    import ipaddress

    found = _source(master) if master else None
    if found is None or ipaddress.ip_address(found).is_loopback:
        # The master itself, where its name means loopback: the runtime chooses the address to tell others.
        return "0.0.0.0:0"
    return f"[{found}]:0" if ":" in found else f"{found}:0"


def _source(host: str) -> str | None:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a UDP socket sends nothing.
            probe.connect(where)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
