"""A Router in front of one scripted worker, for strict clients."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import openai

import pulsing as pul
from pulsing.serving import (
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    RequestError,
    Usage,
    Worker,
    start_router,
    stop_router,
)


class Script(Worker):
    """Answers by the last message: ``fail STATUS``, ``break``, ``tool``, ``logprobs``, or an echo, word by word."""

    supports = Worker.supports | {"n", "tools", "logprobs", "top_logprobs", "stream_options", "user"}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        text = request.messages[-1]["content"] if request.messages else str(request.prompts[0])
        command, _, argument = text.partition(" ")
        if command == "fail":
            raise RequestError(
                int(argument), "maximum context length is 5 tokens", "messages", "context_length_exceeded"
            )
        if command == "break":
            yield Delta("half of ")
            raise RuntimeError("the engine broke")
        if command == "tool":
            call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
            yield Delta(tool_calls=[call])
            for piece in ('{"a":', "1}"):
                yield Delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}])
            yield Delta(finish_reason="tool_calls", usage=Usage(4, 3))
            return
        words = text.split(" ")
        for number, word in enumerate(words):
            piece = word + (" " if number + 1 < len(words) else "")
            logprobs = None
            if command == "logprobs":
                item = {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []}
                logprobs = {"content": [item], "refusal": None}
            yield Delta(piece, logprobs=logprobs)
        yield Delta(finish_reason="length" if command == "long" else "stop", usage=Usage(4, len(words), 2))

    def embed(self, request: EmbedRequest) -> Embeddings:
        """The length of each input, and a third that no float of 32 bits holds exactly."""
        return Embeddings([[len(one), 1 / 3] for one in request.inputs], Usage(len(request.inputs), 0))


@contextlib.asynccontextmanager
async def client(model: str = "org/tiny") -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, in front of a Router, in front of a Script."""
    node = await pul.actor_system("127.0.0.1:0")
    try:
        runner = await start_router(node, "127.0.0.1", 0, "alias")
        await node.spawn(Script(model), name="worker")
        async with openai.AsyncOpenAI(base_url=f"http://{runner.addr}/v1", api_key="none", max_retries=0) as ours:
            for _ in range(1000):
                if len((await ours.models.list()).data) == 2:
                    break
                await asyncio.sleep(0.01)
            try:
                yield ours
            finally:
                await stop_router(runner, 1)
    finally:
        await node.shutdown()
