"""The mock engine as an actor Worker: the same commands, the same answers, the same tally."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator

from pulsing.serving import Delta, GenerateRequest, RequestError, Usage, Worker


class DrillWorker(Worker):
    """Answers as `mock_engine.rs` does.

    Args:
        tally_port: Where ``GET /mock`` is answered with what was served.
        places: Requests that it takes at once.
    """

    supports = Worker.supports
    continues = "greedy"

    def __init__(self, tally_port: int, places: int = 10_000) -> None:
        super().__init__("mock", capacity=places, max_waiting=10_000)
        self.fingerprint = "mock"
        self.tally_port = tally_port
        self.tally = {"running": 0, "served": 0, "left": 0, "left_at": 0}

    async def load(self) -> None:
        """Opens the tally."""
        self.server = await asyncio.start_server(self._tell, "127.0.0.1", self.tally_port)

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(self.tally).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Counts, as fast as the request says. It goes on where another Worker stopped."""
        command = re.search(r"mock:(\S+)", request.last_text[:1000])
        values = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", command[1])} if command else {}
        tokens, pause = values.get("tokens", 1), values.get("pause", 0) / 1000
        self.tally["running"] += 1
        try:
            await asyncio.sleep(values.get("first", 0) / 1000)
            if (status := values.get("status", 200)) != 200:
                raise RequestError(status, "failed as told")
            first = len(request.continue_tokens)
            for number in range(first, tokens):
                await asyncio.sleep(pause)
                yield Delta(f"{number} ", token_ids=(number,))
            yield Delta(finish_reason="stop", usage=Usage(8, tokens - first))
            self.tally["served"] += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.tally["left"] += 1
            self.tally["left_at"] = time.time_ns() // 1000
            raise
        finally:
            self.tally["running"] -= 1
