"""The life of one cell: start, ready, joined; crash, wait, again; stop."""

import asyncio
import contextlib
import pathlib
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from pulsing.fleet import _leftovers, _probe
from pulsing.fleet._join import Onlooker, last_words
from pulsing.fleet._placement import Cell, Command, Layout
from pulsing.fleet._ports import PortTakenError
from pulsing.fleet._processes import CellProcesses, Order
from pulsing.fleet._status import CellStatus, State

# Starts that a stranger on our port spoilt are not the engine's fault, but they must end some time.
_MAX_THEFTS = 3
# Seconds between two looks at whether the cluster shows a cell.
_LOOK_EVERY = 0.5
# Joining takes a moment that nobody needs to be told of.
_JOINS_WITHIN = 3.0

T = TypeVar("T")


class Backend(Protocol):
    """Where the cells of a fleet run."""

    name: str

    async def prepare(self) -> Layout:
        """Places every worker and learns every address, all ports held. Raises ValueError or PortTakenError."""
        ...

    async def refresh(self, cell: Cell) -> bool:
        """Before a restart: makes the cell's addresses usable again; whether one had to change."""
        ...

    async def processes(self, cell: Cell, mark: str) -> CellProcesses:
        """For one start of a cell."""
        ...

    async def let_bind(self, cell: Cell) -> None:
        """Just before the start: lets the commands bind the ports that are held."""
        ...

    def environment(self, command: Command) -> dict[str, str]:
        """The environment of a worker."""
        ...

    def join_environment(self) -> dict[str, str]:
        """The environment of a join process: secrets of the cluster travel in it."""
        ...

    async def close(self) -> None:
        """Gives back all that was placed."""
        ...


class CellRun:
    """Runs one cell until it is told to stop, or given up."""

    def __init__(
        self,
        cell: Cell,
        layout: Layout,
        backend: Backend,
        run: str,
        log_dir: pathlib.Path,
        keep_generations: int,
        onlooker: Onlooker,
        changed: Callable[[CellStatus], None],
    ) -> None:
        self.cell = cell
        self.status = CellStatus(cell.name, joined=None if cell.pool.join is None else False)
        self._layout = layout
        self._backend = backend
        self._run_id = run
        self._log_dir = log_dir
        self._keep = keep_generations
        self._onlooker = onlooker
        self._changed = changed
        self._stopping = asyncio.Event()
        self._limits = (cell.pool.stop.drain, cell.pool.stop.term)
        self._processes: CellProcesses | None = None
        self._restarts: deque[float] = deque()
        self._thefts = 0
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Until stopped or failed. Never raises for what a cell does."""
        while not self._stopping.is_set():
            reason, ready_for = await self._once()
            if self._stopping.is_set():
                break
            moved = await self._refreshed()
            if isinstance(moved, str):
                reason = moved
            elif moved and ready_for is None and self._thefts < _MAX_THEFTS:
                self._thefts += 1
                self._set("backoff", f"{reason}; its port was taken by somebody else, it gets another one")
                continue
            wait = self._budget(ready_for)
            if wait is None:
                self._set("failed", reason)
                return
            self._set("backoff", f"{reason}; restart in {wait:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
        self._set("stopped", "")

    async def stop(self, drain: float | None = None, term: float | None = None) -> None:
        """Asks the cell to stop; a second call may only shorten."""
        again = self._stopping.is_set()
        old_drain, old_term = self._limits
        self._limits = (
            min(old_drain, drain if drain is not None else old_drain),
            min(old_term, term if term is not None else old_term),
        )
        self._stopping.set()
        if again and self._processes is not None:
            await self._processes.stop(*self._limits)

    def _budget(self, ready_for: float | None) -> float | None:
        """Seconds until the restart; None: no restart."""
        policy = self.cell.pool.restart
        if policy.when == "never":
            return None
        now = time.monotonic()
        if ready_for is not None and ready_for >= policy.stable_after:
            self._restarts.clear()
            self._failures_in_a_row = 0
        while self._restarts and now - self._restarts[0] > policy.window:
            self._restarts.popleft()
        if len(self._restarts) >= policy.budget:
            return None
        self._restarts.append(now)
        wait = min(policy.cap, policy.backoff * policy.factor**self._failures_in_a_row)
        self._failures_in_a_row += 1
        self.status.restarts += 1
        return wait * (1 + random.uniform(-policy.jitter, policy.jitter))

    async def _refreshed(self) -> bool | str:
        """Whether an address changed, or why the cell cannot have its own."""
        try:
            return await self._backend.refresh(self.cell)
        except (PortTakenError, RuntimeError, ValueError, OSError) as error:
            return str(error)

    async def _once(self) -> tuple[str, float | None]:
        """One start until its end: (why it ended, seconds it was ready or None)."""
        self.status.generation += 1
        mark = _leftovers.mark(self._run_id, self.cell.name, self.status.generation)
        try:
            orders = self._orders(mark)
            self._prune_logs()
            self._set("starting", "")
            processes = await self._backend.processes(self.cell, mark)
            await self._backend.let_bind(self.cell)
            self._processes = processes
            self.status.pids = await processes.start(orders)
        except (RuntimeError, ValueError, OSError, PortTakenError) as error:
            self._processes = None
            self.status.pids = {}
            return str(error), None
        self._changed(self.status)
        try:
            return await self._watch(processes, mark)
        finally:
            self._processes = None
            self.status.pids = {}
            if self.status.joined:
                self.status.joined = False

    async def _watch(self, processes: CellProcesses, mark: str) -> tuple[str, float | None]:
        gone = asyncio.create_task(processes.gone())
        stopping = asyncio.create_task(self._stopping.wait())
        ready = asyncio.create_task(self._until_ready())
        joining: asyncio.Task[None] | None = None
        ready_since: float | None = None
        try:
            await asyncio.wait({gone, stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and not stopping.done():
                problem = ready.result()
                if problem is not None:
                    await processes.stop(0.0, self.cell.pool.stop.term)
                    self._hear("0")
                    return problem, None
                ready_since = time.monotonic()
                self._set("ready", "")
                joining = asyncio.create_task(self._keep_joined(processes, mark))
                await asyncio.wait({gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
            ready_for = None if ready_since is None else time.monotonic() - ready_since
            if gone.done():
                ending = gone.result()
                if ending.first is not None:
                    self._hear(ending.first)
                return ending.reason, ready_for
            self._set("stopping", "")
            if joining is not None:
                await _cancelled(joining)
            await processes.stop(*self._limits)
            return "stopped", ready_for
        finally:
            for task in (gone, stopping, ready, joining):
                if task is not None:
                    await _cancelled(task)

    async def _until_ready(self) -> str | None:
        """None once worker 0 answers, else why it does not in time."""
        wanted = self.cell.pool.ready
        if wanted.port is None:
            return None
        addr = self.cell.workers[0].addrs[wanted.port]
        deadline = time.monotonic() + wanted.within
        while True:
            problem = await _probe.answers(addr, wanted.path, wanted.timeout)
            if problem is None:
                return None
            if time.monotonic() + wanted.every > deadline:
                return f"not ready within {wanted.within:g} s: {problem}"
            await asyncio.sleep(wanted.every)

    async def _keep_joined(self, processes: CellProcesses, mark: str) -> None:
        """The join process runs as long as the cell is ready; that it died does not make the engine worse."""
        argv = self._layout.join_argv(self.cell)
        if argv is None:
            return
        policy = self.cell.pool.restart
        failures = 0
        while True:
            log = self._log("join")
            env = {**self._backend.join_environment(), _leftovers.MARK: mark}
            began = time.monotonic()
            looking: asyncio.Task[None] | None = None
            try:
                await processes.start_join(Order("join", argv, env, str(log), join=True))
                self.status.argv["join"], self.status.logs["join"] = list(argv), str(log)
                looking = asyncio.create_task(self._look_whether_joined())
                code = await processes.join_ended()
                problem = (
                    f"join process exited with {code}" if code >= 0 else f"join process was killed by signal {-code}"
                )
            except RuntimeError as error:
                problem = f"join process {error}"
            finally:
                if looking is not None:
                    await _cancelled(looking)
            self._hear("join")
            failures = 0 if time.monotonic() - began > policy.stable_after else failures + 1
            wait = min(policy.cap, policy.backoff * policy.factor ** (failures - 1)) if failures else policy.backoff
            self.status.joined, self.status.reason = False, f"{problem}; again in {wait:.1f} s, see {log}"
            self._changed(self.status)
            await asyncio.sleep(wait)

    async def _look_whether_joined(self) -> None:
        """Keeps `joined` true to what the Routers of the cluster see. Of a command of the user's that is unknown: it
        has joined when it runs."""
        began = time.monotonic()
        while True:
            target = self._layout.join_target(self.cell)
            problem = None if target is None else await self._onlooker.problem(*target)
            news = problem is None or self.status.joined or time.monotonic() - began > _JOINS_WITHIN
            if news and (self.status.joined, self.status.reason) != (problem is None, problem or ""):
                self.status.joined, self.status.reason, self.status.last_words = problem is None, problem or "", []
                self._changed(self.status)
            await asyncio.sleep(_LOOK_EVERY)

    def _hear(self, who: str) -> None:
        """Takes in the last words of a process of this start."""
        log = self.status.logs.get(who)
        self.status.last_words = [] if log is None else last_words(pathlib.Path(log))

    def _orders(self, mark: str) -> list[Order]:
        orders = []
        self.status.argv, self.status.logs, self.status.addrs = {}, {}, {}
        for command in self._layout.commands(self.cell):
            worker = command.worker
            log = self._log(str(worker.index))
            env = {**self._backend.environment(command), _leftovers.MARK: mark}
            orders.append(Order(str(worker.index), command.argv, env, str(log)))
            self.status.argv[str(worker.index)] = list(command.argv)
            self.status.logs[str(worker.index)] = str(log)
            self.status.addrs[str(worker.index)] = {name: addr.addr for name, addr in worker.addrs.items()}
        return orders

    def _log(self, who: str) -> pathlib.Path:
        return self._log_dir / f"{self.cell.name.replace('/', '.')}.{who}.g{self.status.generation}.log"

    def _prune_logs(self) -> None:
        """Keeps the logs of the last generations, this one included."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        stem = self.cell.name.replace("/", ".") + "."
        for path in self._log_dir.glob(f"{stem}*.g*.log"):
            generation = path.name.rpartition(".g")[2].removesuffix(".log")
            if generation.isdigit() and int(generation) <= self.status.generation - self._keep:
                path.unlink(missing_ok=True)

    def _set(self, state: State, reason: str) -> None:
        self.status.state, self.status.reason, self.status.since = state, reason, time.time()
        if state not in ("backoff", "failed"):
            self.status.last_words = []
        self._changed(self.status)


async def _cancelled(task: "asyncio.Task[T]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
