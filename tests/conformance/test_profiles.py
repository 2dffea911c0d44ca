"""The official openai client in front of every kind of backend: actor Workers, and engines that stray (S3)."""

from collections.abc import Iterator
from typing import Any

import clients
import openai
import pytest
from house import BACKENDS, House
from profiles import ARGUMENTS, TEXT

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EVERY = pytest.mark.parametrize("backend", BACKENDS)


class OpenAi:
    """openai-python."""

    def __init__(self, house: House) -> None:
        self.client = openai.OpenAI(base_url=house.url, api_key="none", max_retries=0)

    def _chunks(self, model: str, prompt: str, **more: Any) -> list[Any]:
        stream = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            stream=True,
            stream_options={"include_usage": True},
            **more,
        )
        return list(stream)

    def text(self, model: str, prompt: str, *, stream: bool) -> tuple[str, str, tuple[int, int] | None]:
        if not stream:
            answer = self.client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
            (choice,) = answer.choices
            assert answer.usage is not None
            counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
            return choice.message.content or "", choice.finish_reason, counts
        chunks = self._chunks(model, prompt)
        usage = chunks[-1].usage if not chunks[-1].choices else None
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].delta.content is None, "text and reason share no chunk"
        text = "".join(choice.delta.content or "" for choice in choices)
        return text, choices[-1].finish_reason, usage and (usage.prompt_tokens, usage.completion_tokens)

    def call(self, model: str, *, stream: bool) -> tuple[str, str, str]:
        if not stream:
            answer = self.client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "tool"}], tools=[clients.TOOL]
            )
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function"
            return call.id, call.function.name, call.function.arguments
        chunks = self._chunks(model, "tool", tools=[clients.TOOL])
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        pieces = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        assert {piece.index for piece in pieces} == {0}
        assert [piece.id for piece in pieces[1:]] == [None] * (len(pieces) - 1)
        arguments = "".join(piece.function.arguments or "" for piece in pieces)
        return pieces[0].id, pieces[0].function.name, arguments

    def failure(self, model: str, prompt: str, *, stream: bool) -> str:
        with pytest.raises(openai.OpenAIError) as failed:
            self.text(model, prompt, stream=stream)
        return str(failed.value)


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[OpenAi]:
    ours = OpenAi(house)
    with ours.client:
        yield ours


@EVERY
@BOTH
def test_text(client: OpenAi, backend: str, stream: bool) -> None:
    clients.check_text(client, backend, stream=stream)


@EVERY
@BOTH
def test_tool_calls(client: OpenAi, backend: str, stream: bool) -> None:
    clients.check_call(client, backend, stream=stream)


@EVERY
@pytest.mark.parametrize("command", ["cut", "error"])
def test_a_broken_stream_is_an_error(client: OpenAi, backend: str, command: str) -> None:
    clients.check_broken(client, backend, command)


@EVERY
@BOTH
def test_a_prompt_that_is_too_long_is_a_400(client: OpenAi, backend: str, stream: bool) -> None:
    clients.check_refused(client, backend, stream=stream)


@EVERY
def test_the_stream_helper_of_the_client_accepts_every_chunk(client: OpenAi, backend: str) -> None:
    prompt = clients.says("text", backend)
    with client.client.chat.completions.stream(model=backend, messages=[{"role": "user", "content": prompt}]) as stream:
        final = stream.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (TEXT, "stop")


@EVERY
def test_responses_are_made_of_chats(client: OpenAi, backend: str) -> None:
    plain = client.client.responses.create(model=backend, input=clients.says("text", backend))
    assert (plain.output_text, plain.status) == (TEXT, "completed")
    with client.client.responses.stream(model=backend, input=clients.says("text", backend)) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert (final.output_text, names[0], names[-1]) == (TEXT, "response.created", "response.completed")
    assert plain.usage is not None
    assert plain.usage.output_tokens == 3
    assert (final.usage is None) == (backend == "transformers"), "asked for where the engine tells it"
    tool: Any = {"type": "function", **clients.TOOL["function"], "strict": False}
    called = client.client.responses.create(model=backend, input="tool", tools=[tool])
    (call,) = called.output
    assert call.type == "function_call"
    assert (call.name, call.arguments.replace(" ", "")) == ("add", "".join(ARGUMENTS))


@EVERY
def test_a_response_that_breaks_is_an_error(client: OpenAi, backend: str) -> None:
    with (
        client.client.responses.create(model=backend, input=clients.says("cut", backend), stream=True) as stream,
        pytest.raises(openai.OpenAIError),
    ):
        list(stream)
