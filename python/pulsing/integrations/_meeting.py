"""Who is in a job's cluster, as far as newcomers need to know: the state of the rendezvous, without Ray and clocks."""

from __future__ import annotations

from dataclasses import dataclass

BEAT = 2.0
"""Seconds between two signs of life of a node."""
STALE = 3 * BEAT
"""Silence in seconds after which a node may be given up by those who cannot reach it."""
FORGET = 60.0
"""Silence after which a node is no longer named; as long, or longer, a process may hold the interpreter's lock."""
LEASE = 20.0
"""Seconds without a sign of any node after which the rendezvous ends; one that was silent for longer brings it back."""
LINGER = 5.0
"""The same when the last node left in order: for programs that shut down and begin again."""
CLAIM = 20.0
"""Seconds that the first node may take from being chosen until it has started."""
MOST_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """What a newcomer is told.

    Args:
        seeds: Nodes to join, those heard of last first.
        first: It is to begin the cluster. Without seeds and without this: ask again.
    """

    seeds: tuple[str, ...] = ()
    first: bool = False


class Meeting:
    """Chooses one first node among those that come at once, and names living ones to all others.

    Args:
        now: Seconds on a clock that does not jump.
        restarted: It was begun anew: nodes may exist that it has not heard of.
    """

    def __init__(self, now: float, restarted: bool = False) -> None:
        self._heard: dict[str, float] = {}
        self._claim: tuple[str, float] | None = None
        self._contact = now
        self._left_in_order = False
        self._not_before = now + 2 * BEAT if restarted else now

    def enter(self, who: str, away: tuple[str, ...], now: float) -> Entry:
        """`who`, any text that is its own, wants in; it could not reach `away` just now."""
        self._touch(now)
        seeds = self.seeds(now, away)
        if seeds or now < self._not_before:
            return Entry(seeds)
        if self._claim is None or self._claim[0] == who or now - self._claim[1] > CLAIM:
            self._claim = who, now
            return Entry(first=True)
        return Entry()

    def begin(self, who: str, addr: str, now: float) -> bool:
        """The chosen one has started, at `addr`; False: it took too long and another one was chosen."""
        if self._claim is None or self._claim[0] != who:
            return False
        self._claim = None
        self.beat(addr, now)
        return True

    def beat(self, addr: str, now: float) -> tuple[str, ...]:
        """The node at `addr` lives; returns others of the cluster that were heard of lately."""
        self._touch(now)
        self._heard[addr] = now
        fresh = [one for one, heard in self._heard.items() if now - heard < STALE and one != addr]
        return tuple(sorted(fresh, key=self._heard.__getitem__, reverse=True)[:MOST_SEEDS])

    def leave(self, addr: str, now: float) -> None:
        """The node at `addr` leaves in order."""
        self._touch(now)
        if self._heard.pop(addr, None) is not None:
            self._left_in_order = not self._heard

    def seeds(self, now: float, away: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Nodes to join. A silent one counts until whoever asks has found it away: its Python may be busy."""
        self._heard = {addr: heard for addr, heard in self._heard.items() if now - heard < FORGET}
        known = [addr for addr, heard in self._heard.items() if now - heard < STALE or addr not in away]
        return tuple(sorted(known, key=self._heard.__getitem__, reverse=True)[:MOST_SEEDS])

    def over(self, now: float) -> bool:
        """Whether nobody needs it any more."""
        return now - self._contact > (LINGER if self._left_in_order else LEASE)

    def _touch(self, now: float) -> None:
        self._contact = now
        self._left_in_order = False
