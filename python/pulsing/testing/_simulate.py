"""`simulate`: a scenario as a test function that any test runner can call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, overload

from pulsing.testing._network import LIMIT, Network
from pulsing.testing._seed import from_environment

Scenario = Callable[..., Coroutine[Any, Any, None]]


@overload
def simulate(scenario: Scenario, /) -> Callable[..., None]: ...
@overload
def simulate(
    *, seed: int | None = None, seeds: int | Sequence[int] | None = None, limit: float = LIMIT
) -> Callable[[Scenario], Callable[..., None]]: ...
def simulate(
    scenario: Scenario | None = None,
    /,
    *,
    seed: int | None = None,
    seeds: int | Sequence[int] | None = None,
    limit: float = LIMIT,
) -> Any:
    """Makes ``async def test(net, ...)`` a plain test function, which runs it on a network of its own.

    Further parameters remain the test's: fixtures, parametrization. ``PULSING_TEST_SEED`` replaces the seeds
    given here.

    Args:
        scenario: The test, when used without parentheses.
        seed: The seed of every run; None: a random one each time.
        seeds: Run it once for each of these seeds, or for 0 to n-1.
        limit: Seconds of the network's time that one run may take.

    Raises:
        TypeError: `seed` and `seeds` both; or what is decorated is no async function with a parameter for the network.
    """
    if seed is not None and seeds is not None:
        raise TypeError("simulate() takes seed or seeds, not both")
    chosen: Sequence[int | None] = [seed] if seeds is None else range(seeds) if isinstance(seeds, int) else seeds

    def decorate(scenario: Scenario) -> Callable[..., None]:
        signature = inspect.signature(scenario)
        parameters = list(signature.parameters.values())
        if not inspect.iscoroutinefunction(scenario) or not parameters:
            raise TypeError(
                f"simulate() decorates an async function whose first parameter is the network, not {scenario!r}"
            )

        @functools.wraps(scenario)
        def test(*args: Any, **kwargs: Any) -> None:
            asked = from_environment()
            for one in chosen if asked is None else [asked]:
                Network.run(lambda net: scenario(net, *args, **kwargs), seed=one, limit=limit)

        # A test runner asks for the parameters by name: the network is not among what it has to supply.
        test.__dict__.pop("__wrapped__", None)
        test.__dict__["__signature__"] = signature.replace(parameters=parameters[1:])
        return test

    return decorate if scenario is None else decorate(scenario)
