"""Makes the helpers of the runtime's tests importable, and runs tests on either kind of loop."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from functools import partial

import pytest
import runtime_util


@pytest.fixture(params=runtime_util.LOOPS)
def run(request: pytest.FixtureRequest) -> runtime_util.Run:
    """Runs a test's coroutine, on asyncio's loop and on uvloop's."""
    return partial(runtime_util.run, kind=request.param)
