"""The rendezvous of a job's nodes, as a Ray actor; and the thread by which a node stays known to it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pulsing.core._system import ActorSystem
from pulsing.integrations._meeting import BEAT, Entry, Meeting

_log = logging.getLogger("pulsing")

_ANSWER_WITHIN = 10.0
_APART_BEATS = 5
"""Beats for which a node is alive in Ray and no member: more than a dead one is named for."""
_SPREAD_BEATS = 10
"""Beats over which the nodes of one half choose by lot who goes first; the others then find it done."""
_BRIDGE_WITHIN = 30.0
_LAST_WORDS = 1.0
"""Seconds that an exiting process waits for its thread to say goodbye."""


class RayMeeting:
    """Runs as a detached actor, and ends itself when it has heard of no node for a while.

    Args:
        terms: What all nodes have in common; as an argument it outlives a restart of the actor.
    """

    def __init__(self, terms: str) -> None:
        import ray

        self._ray: Any = ray
        self._terms = terms
        context = ray.get_runtime_context()
        with warnings.catch_warnings():
            # Ray's own code behind it uses what Ray deprecates.
            warnings.simplefilter("ignore")
            restarted = bool(context.was_current_actor_reconstructed)
        self._meeting = Meeting(time.monotonic(), restarted)
        self._me = context.current_actor
        threading.Thread(target=self._watch, name="pulsing-lease", daemon=True).start()

    def terms(self) -> str:
        """What all nodes have in common."""
        return self._terms

    def enter(self, who: str, away: tuple[str, ...]) -> Entry:
        """See `Meeting.enter`."""
        return self._meeting.enter(who, away, time.monotonic())

    def begin(self, who: str, addr: str) -> bool:
        """See `Meeting.begin`."""
        return self._meeting.begin(who, addr, time.monotonic())

    def beat(self, addr: str) -> tuple[str, ...]:
        """See `Meeting.beat`."""
        return self._meeting.beat(addr, time.monotonic())

    def leave(self, addr: str) -> None:
        """See `Meeting.leave`."""
        self._meeting.leave(addr, time.monotonic())

    def _watch(self) -> None:
        while not self._meeting.over(time.monotonic()):
            time.sleep(1.0)
        # Not `exit_actor`, which waits for what this process itself has asked of the actor. Who comes at this very
        # moment gets an error for it, and begins again.
        self._ray.kill(self._me)


class Beats:
    """Says that a node lives. A thread of its own does, since a busy event loop is no reason to be taken for dead.

    Args:
        ray: The module.
        system: The node.
        find: Gives a handle of the rendezvous, begun anew on the same terms if it has ended.
        apart: Called, in that thread, with addresses of nodes that are alive in Ray and were no members for several
            beats.
    """

    def __init__(
        self,
        ray: Any,
        system: ActorSystem,
        find: Callable[[], Any],
        apart: Callable[[tuple[str, ...]], Future[None]],
    ) -> None:
        self._ray = ray
        self._system = system
        self._find = find
        self._apart = apart
        self._patience = _APART_BEATS + random.randrange(_SPREAD_BEATS)
        self._missed: dict[str, int] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, meeting: Any, terms: str) -> None:
        """Starts the thread; it ends with the node. On the node's loop.

        Args:
            meeting: Handle of the rendezvous.
            terms: On which the node joined.
        """
        self._thread = threading.Thread(target=self._run, args=(meeting, terms), name="pulsing-ray-beat", daemon=True)
        self._system.background(self._until_shutdown())
        # Registered after Ray's own hook, so that it runs while Ray can still carry a message.
        atexit.register(self._at_exit)
        self._thread.start()

    async def _until_shutdown(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._done.set()

    def _at_exit(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(_LAST_WORDS)

    def _run(self, meeting: Any, terms: str) -> None:
        lost = False
        try:
            while not self._done.wait(BEAT) and self._ray.is_initialized():
                try:
                    if lost:
                        meeting = self._find()
                    if not lost or _answer(meeting.terms.remote()) == terms:
                        lost = False
                        self._beat(meeting)
                    else:
                        _log.warning(
                            "the Ray job has begun another cluster while %s was not heard of: processes that come from "
                            "here on do not join this one; pul.shutdown() and init_inside_ray() again lead there",
                            self._system.addr,
                        )
                        return
                except TimeoutError:
                    continue
                except self._ray.exceptions.RayActorError:
                    lost = True
            if self._ray.is_initialized():
                _answer(meeting.leave.remote(self._system.addr), _LAST_WORDS)
        except Exception as error:  # noqa: BLE001 - whatever Ray raises when the job has ended
            _log.debug("the job's rendezvous is gone: %s", error)
        finally:
            atexit.unregister(self._at_exit)

    def _beat(self, meeting: Any) -> None:
        others = _answer(meeting.beat.remote(self._system.addr))
        here = {one["addr"] for one in self._system.core.members() if one["state"] in ("alive", "suspect")}
        self._missed = {one: self._missed.get(one, 0) + 1 for one in others if one not in here}
        lost = tuple(one for one, times in self._missed.items() if times >= self._patience)
        if lost:
            self._missed = {}
            self._apart(lost).result(_BRIDGE_WITHIN)


def _answer(ref: Any, within: float = _ANSWER_WITHIN) -> Any:
    # Not `ray.get`: it warns in processes of async actors, although this thread is no loop's.
    return ref.future().result(within)
