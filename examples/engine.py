"""A Worker of your own: one class with one async generator, served by a Router over OpenAI's API."""

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator

import pulsing as pul
from pulsing.serving import Router, Worker
from pulsing.serving.worker import Delta, GenerateRequest, Usage


class Shout(Worker):
    """Answers with the last message in capitals, a word a piece."""

    engine = "shout"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        words = str(request.messages[-1]["content"]).upper().split()
        for at, word in enumerate(words):
            yield Delta(word if at == 0 else f" {word}")
        yield Delta(finish_reason="stop", usage=Usage(prompt_tokens=len(words), completion_tokens=len(words)))


def ask(port: int, text: str) -> str:
    body = {"model": "shout", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        content: str = json.load(response)["choices"][0]["message"]["content"]
    return content


async def main(port: int) -> None:
    system = await pul.init()
    await system.spawn(Shout("shout"), name="worker", public=True)
    await system.spawn(Router(http_host="127.0.0.1", http_port=port, model_name="shout"), name="router", public=True)
    print(await asyncio.to_thread(ask, port, "hello from an engine of my own"))
    await pul.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8080))
