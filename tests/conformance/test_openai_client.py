"""What the official openai client makes of our answers: strict clients are the judges (S3)."""

import asyncio
from collections.abc import Awaitable, Callable

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from scripted_workers import client


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def with_client(test: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> Callable[[], None]:
    async def run() -> None:
        async with client() as ours:
            await asyncio.wait_for(test(ours), 30)

    def sync() -> None:
        asyncio.run(run())

    sync.__name__ = test.__name__
    sync.__doc__ = test.__doc__
    return sync


@with_client
async def test_a_plain_chat(ours: openai.AsyncOpenAI) -> None:
    answer = await ours.chat.completions.create(model="alias", messages=user("Grüße 😀 日本"))
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Grüße 😀 日本", "assistant", "stop")
    assert (answer.model, answer.object) == ("alias", "chat.completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 3, 7)
    assert answer._request_id


@with_client
async def test_a_streamed_chat_equals_the_plain_one(ours: openai.AsyncOpenAI) -> None:
    stream = await ours.chat.completions.create(model="org/tiny", messages=user("long é 😀 x"), stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "long é 😀 x"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].choices[0].delta.content is None
    assert {(one.id, one.created, one.model) for one in chunks} == {(chunks[0].id, chunks[0].created, "org/tiny")}


@with_client
async def test_usage_comes_last_and_only_when_asked_for(ours: openai.AsyncOpenAI) -> None:
    stream = await ours.chat.completions.create(
        model="alias", messages=user("a b"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 6
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 2


@with_client
async def test_the_clients_own_stream_helper_is_content(ours: openai.AsyncOpenAI) -> None:
    async with ours.chat.completions.stream(model="alias", messages=user("one two three")) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "one two three"
    assert final.choices[0].finish_reason == "stop"


@with_client
async def test_tool_calls_whole_and_in_pieces(ours: openai.AsyncOpenAI) -> None:
    answer = await ours.chat.completions.create(model="alias", messages=user("tool"))
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "add", '{"a":1}')
    async with ours.chat.completions.stream(model="alias", messages=user("tool")) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "add", '{"a":1}')


@with_client
async def test_logprobs_whole_and_in_pieces(ours: openai.AsyncOpenAI) -> None:
    answer = await ours.chat.completions.create(model="alias", messages=user("logprobs é"), logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.token for item in logprobs.content] == ["logprobs ", "é"]
    stream = await ours.chat.completions.create(model="alias", messages=user("logprobs é"), logprobs=True, stream=True)
    seen = [
        item.token
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for item in chunk.choices[0].logprobs.content or []
    ]
    assert seen == ["logprobs ", "é"]


@with_client
async def test_completions_with_several_prompts(ours: openai.AsyncOpenAI) -> None:
    answer = await ours.completions.create(model="alias", prompt=["one two", "three"])
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "one two", "stop"),
        (1, "three", "stop"),
    ]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 11
    stream = await ours.completions.create(model="alias", prompt="long a b", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "long a b"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


@with_client
async def test_models_are_listed_and_retrieved(ours: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await ours.models.list()).data] == ["alias", "org/tiny"]
    assert (await ours.models.retrieve("org/tiny")).owned_by == "pulsing"
    with pytest.raises(openai.NotFoundError):
        await ours.models.retrieve("nope")


@with_client
async def test_errors_are_the_classes_the_client_knows(ours: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="alias, org/tiny") as missing:
        await ours.chat.completions.create(model="nope", messages=user("x"))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await ours.chat.completions.create(model="alias", messages=user("x"), temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 5 tokens") as long:
            await ours.chat.completions.create(model="alias", messages=user("fail 400"), stream=stream)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.InternalServerError) as broken:
            await ours.chat.completions.create(model="alias", messages=user("fail 500"), stream=stream)
        assert broken.value.response.headers["x-should-retry"] == "false"
        assert broken.value.request_id


@with_client
async def test_a_stream_that_breaks_is_an_error_not_a_short_answer(ours: openai.AsyncOpenAI) -> None:
    stream = await ours.chat.completions.create(model="alias", messages=user("break"), stream=True)
    with pytest.raises(openai.APIError, match="engine broke"):
        async for _ in stream:
            pass


@with_client
async def test_fields_of_other_vendors_and_nulls_pass(ours: openai.AsyncOpenAI) -> None:
    answer = await ours.chat.completions.create(
        model="alias",
        messages=user("x"),
        user="me",
        extra_body={"foo": 1, "thinking": {"x": 1}, "stop": None, "seed": None, "tools": None, "max_tokens": None},
    )
    assert answer.choices[0].message.content == "x"


@with_client
async def test_embeddings_are_the_same_as_numbers_and_as_bytes(ours: openai.AsyncOpenAI) -> None:
    # Without a format the client asks for base64 and decodes it itself.
    packed = await ours.embeddings.create(model="alias", input=["ab", "c"])
    plain = await ours.embeddings.create(model="alias", input=["ab", "c"], encoding_format="float")
    for answer in (packed, plain):
        assert [one.index for one in answer.data] == [0, 1]
        assert [one.embedding for one in answer.data] == [
            pytest.approx([2, 1 / 3], rel=1e-6),
            pytest.approx([1, 1 / 3], rel=1e-6),
        ]
        assert (answer.object, answer.model, answer.usage.total_tokens) == ("list", "alias", 2)
    with pytest.raises(openai.BadRequestError, match="at most 2048"):
        await ours.embeddings.create(model="alias", input=["x"] * 2049)


@with_client
async def test_a_response_keeps_what_was_asked_and_refuses_what_needs_a_memory(ours: openai.AsyncOpenAI) -> None:
    answer = await ours.responses.create(
        model="alias", input=[{"role": "user", "content": "a b"}], instructions="be brief", metadata={"k": "v"}
    )
    assert (answer.output_text, answer.instructions, answer.metadata) == ("a b", "be brief", {"k": "v"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.store) == (4, 2, False)
    cut = await ours.responses.create(model="alias", input="long answer")
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    for refused in ({"store": True}, {"previous_response_id": "resp_1"}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError) as error:
            await ours.responses.create(model="alias", input="x", extra_body=refused)
        assert error.value.param in ("store", "previous_response_id", "tools[0]")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        await ours.responses.retrieve("resp_1")
    with pytest.raises(openai.APIError, match="engine broke"):
        async for _ in await ours.responses.create(model="alias", input="break", stream=True):
            pass


@with_client
async def test_what_a_worker_cannot_do_is_a_400_that_names_it(ours: openai.AsyncOpenAI) -> None:
    asked: list[tuple[str, dict[str, object]]] = [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("presence_penalty", {"presence_penalty": 1}),
        ("echo", {"extra_body": {"echo": True}}),
        ("modalities", {"extra_body": {"modalities": ["text", "audio"]}}),
    ]
    for name, fields in asked:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=f"does not support {name}") as refused:
                await ours.chat.completions.create(model="alias", messages=user("x"), stream=stream, **fields)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
