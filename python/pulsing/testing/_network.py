"""`Network`: several systems in one thread, their links and their clock."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from pulsing import _core
from pulsing.core._config import SystemConfig
from pulsing.core._global import adopt
from pulsing.core._ids import draw_from
from pulsing.core._system import ActorSystem
from pulsing.exceptions import ConfigError
from pulsing.testing._loop import VirtualLoop
from pulsing.testing._seed import choose, note

T = TypeVar("T")

LIMIT = 3600.0
"""Seconds of the network's time that a scenario may take: one that waits for what never comes has to end."""

_POLL = 0.01
_PORT = 7000


class Network:
    """Several `ActorSystem`s in one thread, connected in memory, on a clock that jumps to the next thing that happens.

    Made by `run` (or `pulsing.testing.simulate`), which hand it to the scenario. Hosts are named; ``"a"`` is host a's
    address too. Without faults a link delivers at once and in order.

    Attributes:
        seed: What every chance of this run derives from.
        random: A generator for the scenario's own choices, derived from the seed.
    """

    def __init__(self, core: _core.TestNetwork, loop: VirtualLoop, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self._core = core
        self._loop = loop
        self._systems: dict[str, ActorSystem] = {}
        self._ends: dict[asyncio.Task[None], None] = {}

    # -- running ------------------------------------------------------------------------------------------------------

    @classmethod
    def run(
        cls,
        scenario: Callable[[Network], Coroutine[Any, Any, T]],
        *,
        seed: int | None = None,
        limit: float = LIMIT,
    ) -> T:
        """Runs ``scenario(net)`` on a network of its own and returns its result.

        Args:
            scenario: An async function of one argument, the network.
            seed: What the run's chances derive from, 0 to 2**64-1; None: ``PULSING_TEST_SEED``, else a random one. An
                exception that leaves the scenario carries a note with the seed.
            limit: Seconds of the network's time after which the scenario fails.

        Raises:
            Exception: What the scenario raised.
            TimeoutError: It did not end within `limit`.
            RuntimeError: Called inside a running event loop.
            ValueError: A seed that is none.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError("Network.run() runs an event loop of its own: call it from a function that is not async")
        seed = choose(seed)
        core = _core.TestNetwork(seed)
        loop = VirtualLoop(core)
        net = cls(core, loop, seed)

        def play() -> T:
            # The loop is closed by the runner.
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                return runner.run(net._main(scenario, limit))

        state = random.getstate()
        random.seed(seed)
        # A generator of their own: how many actors there are changes none of the scenario's choices.
        ids = draw_from(random.Random(f"ids of {seed}").randbytes)
        try:
            return core.play(play)
        except BaseException as error:
            note(error, seed)
            raise
        finally:
            random.setstate(state)
            draw_from(ids)
            loop.close()

    async def _main(self, scenario: Callable[[Network], Coroutine[Any, Any, T]], limit: float) -> T:
        watch = asyncio.timeout(limit)
        try:
            async with watch:
                return await scenario(self)
        except TimeoutError as error:
            if watch.expired():
                raise TimeoutError(f"the scenario did not end within {limit:g} s of the network's time") from error
            raise
        finally:
            await self._end()

    async def _end(self) -> None:
        # Who is paused or cut off could not say goodbye.
        self._core.heal()
        for name in self._systems:
            self._core.resume(name)
        running = [system.shutdown(0.0) for system in self._systems.values()]
        self._systems.clear()
        await asyncio.gather(*running, *self._ends, return_exceptions=True)

    # -- systems ------------------------------------------------------------------------------------------------------

    async def system(self, name: str, *, seeds: Iterable[str] = (), **settings: Any) -> ActorSystem:
        """Starts a system on host `name`; again, once the former has ended or was killed: at the same address.

        Args:
            name: Name of the host: letters, digits, ``-``, ``_`` and ``.``.
            seeds: Names of hosts to join.
            settings: Further settings of `pulsing.core.SystemConfig`: cluster, passphrase, join_timeout, ...

        Raises:
            ValueError: A system runs there, or the name cannot be one.
            TypeError: An unknown setting, or one that the network decides (addr, insecure, secret_file).
            JoinError, RefusedError, ConfigError: As they say.
        """
        for decided in ("addr", "insecure", "secret_file"):
            if decided in settings:
                raise TypeError(f"{decided} is the network's to decide")
        if isinstance(seeds, str):
            raise ConfigError(f"seeds={seeds!r}: expected a list of host names, as in seeds=[{seeds!r}]")
        config = SystemConfig(
            seeds=tuple(seed if ":" in seed else f"{seed}:{_PORT}" for seed in seeds),
            insecure=settings.get("passphrase") is None and settings.get("cert") is None,
            **settings,
        )
        host = self._core.host(name)
        system = await ActorSystem.create(config, _host=host)
        self._systems[name] = system
        return system

    def __getitem__(self, name: str) -> ActorSystem:
        """The system that was started last on host `name`."""
        return self._systems[name]

    @contextlib.contextmanager
    def main(self, system: ActorSystem) -> Iterator[ActorSystem]:
        """Makes `system` the process's own inside the block: what `pul.get_system`, `pul.spawn` and the like use."""
        before = adopt(system)
        try:
            yield system
        finally:
            adopt(before)

    def members(self, system: ActorSystem) -> set[str]:
        """Addresses of the members that `system` takes for living (alive or suspect), its own included."""
        return {m["addr"] for m in system.core.members() if m["state"] in ("alive", "suspect")}

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds of the network's time since it began."""
        return self._core.now()

    async def sleep(self, seconds: float) -> None:
        """Lets `seconds` of the network's time pass; in real time it takes as long as what happens meanwhile."""
        await asyncio.sleep(seconds)

    async def until(self, check: Callable[[], T | Awaitable[T]], *, within: float = 10.0, what: str | None = None) -> T:
        """Waits until ``check()`` is true, looking every 10 ms of the network's time; returns what it gave.

        Args:
            check: A function, which may be async. An exception that it raises ends the wait.
            within: Seconds of the network's time.
            what: What is waited for, for the error message.

        Raises:
            AssertionError: It was not within that time.
        """
        end = self.now + within
        while True:
            given = check()
            result: T = await given if inspect.isawaitable(given) else given
            if result:
                return result
            if self.now >= end:
                raise AssertionError(f"not within {within:g} s: {what or _source(check)}")
            await asyncio.sleep(_POLL)

    @contextlib.contextmanager
    def hold_clock(self) -> Iterator[None]:
        """Keeps the clock still inside the block: for threads and sockets of the scenario's own, which take real time.

        `pul.blocking` methods, `asyncio.to_thread` and `loop.run_in_executor` hold it by themselves.
        """
        release = self._loop.hold_clock()
        try:
            yield
        finally:
            release()

    # -- faults -------------------------------------------------------------------------------------------------------

    def faults(
        self,
        *,
        delay: float | tuple[float, float] = 0.0,
        loss: float = 0.0,
        reorder: float = 0.0,
        break_after: float = 60.0,
        between: tuple[str, str] | None = None,
    ) -> None:
        """Says how links misbehave from now on; what is not given is as on a perfect link.

        Args:
            delay: Seconds a segment takes, or the shortest and the longest of them; each segment takes a random time
                between the two. Timers have a grain of 1 ms.
            loss: Probability that a segment is lost. TCP sends it again: its connection stalls for 0.2 s, twice as long
                when it is lost again. For a connection's opening that is 1 s.
            reorder: Probability that a segment and what follows it on its connection take up to four times the longest
                delay more, so that other connections overtake it.
            break_after: Seconds of stall after which a connection breaks. Default: keep-alive's 60 s.
            between: Two hosts that these faults are for; none: every pair that has none of its own.

        Raises:
            ValueError: Numbers that make no sense, unknown hosts.
        """
        least, most = delay if isinstance(delay, tuple) else (delay, delay)
        self._core.faults(delay=(least, most), loss=loss, reorder=reorder, break_after=break_after, between=between)

    def partition(
        self, a: Iterable[str], b: Iterable[str] | None = None, *, one_way: bool = False, refuse: bool = False
    ) -> None:
        """Lets nothing pass between the hosts of `a` and those of `b`, until `heal`.

        What is on its way waits and arrives after the heal, when TCP would have sent it again. Dials hang.

        Args:
            a: Names of hosts.
            b: Names of hosts; None: all others.
            one_way: Only what goes from `a` to `b` is stopped.
            refuse: Dials are refused instead of hanging.

        Raises:
            ValueError: Unknown hosts.
        """
        left = _names(a)
        right = sorted(set(self._systems) - set(left)) if b is None else _names(b)
        self._core.partition(left, right, one_way, refuse)

    def heal(self) -> None:
        """Ends every partition."""
        self._core.heal()

    async def kill(self, name: str) -> None:
        """Ends host `name` as SIGKILL would: links are reset, dials refused, nothing is announced.

        Its actors' handlers are cancelled; what their ``finally`` blocks send reaches nobody.

        Raises:
            ValueError: No such host.
        """
        self._core.kill(name)
        system = self._systems.pop(name, None)
        if system is not None:
            end = self._loop.create_task(system.shutdown(0.0))
            self._ends[end] = None
            end.add_done_callback(self._ends.pop)
            await asyncio.sleep(0)

    def pause(self, name: str) -> None:
        """Stops host `name` until `resume`, as SIGSTOP would as far as others see: it takes connections and bytes and
        answers nothing, and its membership stands still. Its Python code and its own calls' deadlines go on.

        Raises:
            ValueError: No such host.
        """
        self._core.pause(name)

    def resume(self, name: str) -> None:
        """Ends a pause.

        Raises:
            ValueError: No such host.
        """
        self._core.resume(name)

    def __repr__(self) -> str:
        return f"<Network {', '.join(self._systems) or 'without systems'} at {self.now:.3f} s, seed {self.seed}>"


def _names(hosts: Iterable[str]) -> list[str]:
    return [hosts] if isinstance(hosts, str) else sorted(hosts)


def _source(check: Callable[..., Any]) -> str:
    name: str = getattr(check, "__qualname__", repr(check))
    if not name.endswith("<lambda>"):
        return name
    try:
        return inspect.getsource(check).strip()
    except (OSError, TypeError):
        return name
