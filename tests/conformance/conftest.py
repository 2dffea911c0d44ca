"""The clients' tests share one Router."""

from collections.abc import Iterator

import house as houses
import pytest


@pytest.fixture(scope="session")
def house() -> Iterator[houses.House]:
    with houses.house() as serving:
        yield serving
