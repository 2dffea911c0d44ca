"""The smallest Worker there can be: what a Router costs shows best in front of it."""

from collections.abc import AsyncIterator

from pulsing.serving import Delta, GenerateRequest, Usage, Worker


class TrivialWorker(Worker):
    """Answers every request with the same words.

    Args:
        tokens: Words in an answer, one delta each.
    """

    def __init__(self, tokens: int = 1) -> None:
        super().__init__("trivial", capacity=10_000)
        self.tokens = tokens

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """One delta a word, the last with finish reason and usage."""
        for _ in range(self.tokens - 1):
            yield Delta("word ")
        yield Delta("word", finish_reason="stop", usage=Usage(8, self.tokens))
