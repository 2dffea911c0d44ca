"""What nodes of either version serve while they are replaced one after the other."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pulsing as pul

VERSION = os.environ.get("PULSING_UPGRADE_SIDE", "unknown")


@pul.remote
class Echo:
    """Says which version it runs."""

    async def echo(self, value: Any) -> tuple[Any, str]:
        await asyncio.sleep(0.002)
        return value, VERSION

    async def items(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number
            await asyncio.sleep(0.001)
