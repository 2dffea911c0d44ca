"""The smallest Worker there can be: what a Router costs shows best in front of it."""

import asyncio
import re
from collections.abc import AsyncIterator

from pulsing.serving import Delta, GenerateRequest, Usage, Worker


async def words(text: str) -> AsyncIterator[str]:
    """As many words as a prompt tells the mock engine too; each has a turn of the loop, as tokens of an engine have."""
    command = re.search(r"mock:(\S+)", text[:1000])
    values = dict(re.findall(r"(\w+)=(\d+)", command[1])) if command else {}
    pause = int(values.get("pause", 0)) / 1000
    for _ in range(int(values.get("tokens", 1))):
        await asyncio.sleep(pause)
        yield "word "


class TrivialWorker(Worker):
    """Answers every request with the same words."""

    def __init__(self) -> None:
        super().__init__("mock", capacity=10_000)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """One delta a word, the last one with finish reason and usage."""
        count = 0
        async for word in words(request.last_text):
            count += 1
            yield Delta(word)
        yield Delta(finish_reason="stop", usage=Usage(8, count))
