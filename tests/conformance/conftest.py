"""The tests of one file share one Router."""

from collections.abc import Iterator

import house as houses
import pytest


# Not for the whole session: its threads would be there in other folders' tests.
@pytest.fixture(scope="module")
def house() -> Iterator[houses.House]:
    with houses.house() as serving:
        yield serving
