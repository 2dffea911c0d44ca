"""When a failed actor is started again (R9)."""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pulsing.core._checks import check_count, check_seconds
from pulsing.core._shown import shown

if TYPE_CHECKING:
    from pulsing.core._config import SystemConfig

_POLICIES = {"never": "never", "on_failure": "on_failure", "on-failure": "on_failure", "always": "always"}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A restart policy, checked.

    Args:
        policy: "never"; "on_failure" (also "on-failure"): after an exception; "always": also when the actor ends itself
            by raising SystemExit.
        max_restarts: Restarts allowed within `window`; one more failure stops the actor.
        min_backoff: Seconds before the first restart of a series.
        max_backoff: Longest wait in seconds.
        window: Seconds over which restarts are counted.
        unsaid: Names of the numbers that nobody has chosen: a system's own settings come in their place.

    Raises:
        TypeError, ValueError: Unknown policy, or numbers that make no sense.
    """

    policy: str = "never"
    max_restarts: int = 3
    min_backoff: float = 0.1
    max_backoff: float = 30.0
    window: float = 300.0
    unsaid: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in _POLICIES:
            raise ValueError(f"restart_policy={shown(self.policy)}: expected 'never', 'on_failure' or 'always'")
        object.__setattr__(self, "policy", _POLICIES[self.policy])
        check_count("max_restarts", self.max_restarts, 0)
        check_seconds("min_backoff", self.min_backoff)
        check_seconds("max_backoff", self.max_backoff)
        if not 0 <= self.min_backoff <= self.max_backoff:
            raise ValueError(
                f"min_backoff={self.min_backoff}, max_backoff={self.max_backoff}: expected 0 <= min <= max"
            )
        check_seconds("restart_window", self.window, above=True)

    @classmethod
    def of(
        cls,
        policy: str,
        max_restarts: int | None,
        min_backoff: float | None,
        max_backoff: float | None,
        window: float | None,
    ) -> Self:
        """A policy some of whose numbers may be None: not said."""
        numbers = {
            "max_restarts": max_restarts,
            "min_backoff": min_backoff,
            "max_backoff": max_backoff,
            "window": window,
        }
        said: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
        for name in ("min_backoff", "max_backoff"):
            if name in said:
                check_seconds(name, said[name])
        # One that is said must not fall foul of one that is not.
        if "min_backoff" in said and "max_backoff" not in said:
            said["max_backoff"] = max(said["min_backoff"], cls.__dataclass_fields__["max_backoff"].default)
        elif "max_backoff" in said and "min_backoff" not in said:
            said["min_backoff"] = min(said["max_backoff"], cls.__dataclass_fields__["min_backoff"].default)
        return cls(policy, unsaid=frozenset(numbers.keys() - said.keys()), **said)

    def under(self, config: SystemConfig) -> RestartPolicy:
        """The policy on a system with these settings."""
        if not self.unsaid:
            return self
        return _filled(self, config.max_restarts, config.min_backoff, config.max_backoff, config.restart_window)

    @property
    def restarts(self) -> bool:
        """Whether an exception restarts the actor."""
        return self.policy != "never"


@functools.lru_cache(64)
def _filled(
    policy: RestartPolicy, max_restarts: int, min_backoff: float, max_backoff: float, window: float
) -> RestartPolicy:
    """`policy` with a system's numbers for those it does not say. Many actors have the same."""
    theirs = {
        "max_restarts": max_restarts,
        "min_backoff": min_backoff,
        "max_backoff": max_backoff,
        "window": window,
    }
    chosen: dict[str, Any] = {name: theirs[name] for name in policy.unsaid}
    return dataclasses.replace(policy, unsaid=frozenset(), **chosen)


def check_limits(mailbox: int | None, max_concurrency: int | None) -> None:
    """Checks what one actor may hold at a time.

    Args:
        mailbox: Messages that may wait; None: not said.
        max_concurrency: Handlers that may interleave; None: not said.

    Raises:
        TypeError, ValueError: Numbers that make no sense.
    """
    if mailbox is not None:
        check_count("mailbox", mailbox, 16, 1_000_000, "messages")
    if max_concurrency is not None:
        check_count("max_concurrency", max_concurrency, 1)


class RestartBudget:
    """Counts the restarts of one actor."""

    __slots__ = ("_policy", "_times")

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._times: list[float] = []

    def next_delay(self, now: float) -> float | None:
        """Seconds until the next restart, or None if the budget is spent."""
        policy = self._policy
        while self._times and now - self._times[0] > policy.window:
            self._times.pop(0)
        if len(self._times) >= policy.max_restarts:
            return None
        delay = min(policy.max_backoff, policy.min_backoff * 2.0 ** len(self._times))
        self._times.append(now)
        # Actors that failed together must not come back together.
        return delay * random.uniform(0.5, 1.0)
