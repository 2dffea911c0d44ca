"""LangChain and LiteLLM before every kind of backend. They bring versions of their own: an environment apart (S3)."""

import asyncio
import json
import os
from typing import Any

import clients
import pytest
from house import BACKENDS, House
from profiles import TEXT

# It would ask the internet for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import langchain_openai
import litellm
from langchain_core.messages import AIMessage, AIMessageChunk

# Their own plans with one another; none of it is ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class LangChain:
    """langchain-openai."""

    def __init__(self, house: House) -> None:
        self.url = house.url

    def _model(self, model: str, **more: Any) -> langchain_openai.ChatOpenAI:
        return langchain_openai.ChatOpenAI(
            model=model, base_url=self.url, api_key="none", max_retries=0, stream_usage=True, **more
        )

    def _answer(self, runnable: Any, prompt: str, *, stream: bool) -> AIMessage:
        if not stream:
            answer = runnable.invoke(prompt)
            assert isinstance(answer, AIMessage)
            return answer
        whole: AIMessageChunk | None = None
        for chunk in runnable.stream(prompt):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        return whole

    def text(self, model: str, prompt: str, *, stream: bool) -> tuple[str, str, tuple[int, int] | None]:
        answer = self._answer(self._model(model), prompt, stream=stream)
        usage = answer.usage_metadata
        counts = None if usage is None else (usage["input_tokens"], usage["output_tokens"])
        return str(answer.content), str(answer.response_metadata["finish_reason"]), counts

    def call(self, model: str, *, stream: bool) -> tuple[str, str, str]:
        answer = self._answer(self._model(model).bind_tools([clients.TOOL]), "tool", stream=stream)
        (call,) = answer.tool_calls
        return call["id"] or "", call["name"], json.dumps(call["args"])

    def failure(self, model: str, prompt: str, *, stream: bool) -> str:
        with pytest.raises(Exception) as failed:  # noqa: PT011 - whichever it makes of it
            self.text(model, prompt, stream=stream)
        return str(failed.value)


class LiteLlm:
    """litellm's SDK, as against any OpenAI-compatible server."""

    def __init__(self, house: House) -> None:
        self.url = house.url

    def _ask(self, model: str, prompt: str, **more: Any) -> Any:
        return litellm.completion(
            model=f"openai/{model}",
            api_base=self.url,
            api_key="none",
            max_retries=0,
            messages=[{"role": "user", "content": prompt}],
            **more,
        )

    def _answer(self, model: str, prompt: str, *, stream: bool, **more: Any) -> Any:
        if not stream:
            return self._ask(model, prompt, **more)
        chunks = list(self._ask(model, prompt, stream=True, stream_options={"include_usage": True}, **more))
        return litellm.stream_chunk_builder(chunks)

    def text(self, model: str, prompt: str, *, stream: bool) -> tuple[str, str, tuple[int, int] | None]:
        answer = self._answer(model, prompt, stream=stream)
        (choice,) = answer.choices
        counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
        # Where no usage came it counts by itself.
        told = None if stream and model == "transformers" else counts
        return choice.message.content, choice.finish_reason, told

    def call(self, model: str, *, stream: bool) -> tuple[str, str, str]:
        answer = self._answer(model, "tool", stream=stream, tools=[clients.TOOL])
        (call,) = answer.choices[0].message.tool_calls
        return call.id, call.function.name, call.function.arguments

    def failure(self, model: str, prompt: str, *, stream: bool) -> str:
        with pytest.raises(Exception) as failed:  # noqa: PT011 - whichever it makes of it
            self.text(model, prompt, stream=stream)
        return str(failed.value)


@pytest.fixture(scope="module", params=[LangChain, LiteLlm])
def client(house: House, request: pytest.FixtureRequest) -> clients.Client:
    made: clients.Client = request.param(house)
    return made


EVERY = pytest.mark.parametrize("backend", BACKENDS)


@EVERY
@BOTH
def test_text(client: clients.Client, backend: str, stream: bool) -> None:
    clients.check_text(client, backend, stream=stream)


@EVERY
@BOTH
def test_tool_calls(client: clients.Client, backend: str, stream: bool) -> None:
    clients.check_call(client, backend, stream=stream)


@EVERY
@pytest.mark.parametrize("command", ["cut", "error"])
def test_a_broken_stream_is_an_error(client: clients.Client, backend: str, command: str) -> None:
    clients.check_broken(client, backend, command)


@EVERY
@BOTH
def test_a_prompt_that_is_too_long_is_a_400(client: clients.Client, backend: str, stream: bool) -> None:
    clients.check_refused(client, backend, stream=stream)


def test_litellm_knows_a_long_prompt_by_its_text(house: House) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        LiteLlm(house)._ask("vllm", "long")


def test_embeddings_of_both(house: House) -> None:
    langchain = langchain_openai.OpenAIEmbeddings(
        model="actor", base_url=house.url, api_key="none", check_embedding_ctx_length=False
    )
    (one,) = langchain.embed_documents(["abc"])
    lite = litellm.embedding(model="openai/actor", api_base=house.url, api_key="none", input=["abc"])
    assert one == pytest.approx([3, 1 / 3], rel=1e-6) == lite.data[0]["embedding"]


def test_langchain_over_responses(house: House) -> None:
    model = langchain_openai.ChatOpenAI(model="tgi", base_url=house.url, api_key="none", use_responses_api=True)
    assert model.invoke("text").text == TEXT
    assert "".join(chunk.text for chunk in model.stream("text")) == TEXT
    (call,) = model.bind_tools([clients.TOOL]).invoke("tool").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1})


def test_asynchronous_calls_of_both(house: House) -> None:
    async def ask() -> tuple[str, str]:
        first = LangChain(house)._model("actor").ainvoke("a b")
        second = litellm.acompletion(
            model="openai/tgi",
            api_base=house.url,
            api_key="none",
            messages=[{"role": "user", "content": "text"}],
        )
        one, two = await asyncio.gather(first, second)
        return str(one.content), str(two.choices[0].message.content)

    assert asyncio.run(ask()) == ("a b", TEXT)
