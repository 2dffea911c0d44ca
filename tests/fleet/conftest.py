"""Each test gets its own fleet, and leaves none behind."""

import pathlib
from collections.abc import Iterator

import pytest
from fleet_support import Fleet


@pytest.fixture
def fleet(tmp_path: pathlib.Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()
