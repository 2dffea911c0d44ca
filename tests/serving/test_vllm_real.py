"""A real small model through vLLM's engine: one engine for all tests of this file (it takes half a minute to start)."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import vllm_kit
from router_kit import http, ready, system, until

from pulsing.core import ActorSystem
from pulsing.serving import (
    Delta,
    GenerateRequest,
    RequestError,
    Router,
    TokenizeRequest,
    TransformersWorker,
    VllmWorker,
)

# torch, transformers and vLLM warn of one another's plans; none of it is ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

T = TypeVar("T")
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CONVERSATIONS = [
    FRANCE,
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Name a colour."}],
    [*FRANCE, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Tell me about that city."}],
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,  # the arguments follow the schema
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# An answer that does not end by itself.
LONG = {"messages": FRANCE, "ignore_eos": True, "temperature": 0}


@dataclass
class House:
    """One node, one worker, and the loop they live on."""

    runner: asyncio.Runner
    node: ActorSystem
    worker: VllmWorker
    model: Path
    expected: list[str]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def ask(self, api: str = "chat.completions", **body: Any) -> list[Delta]:
        return self.run(collect(self.worker, api, **body))

    @property
    def in_engine(self) -> int:
        """Requests that the engine's client holds."""
        assert self.worker._engine is not None
        return int(self.worker._engine.llm.get_num_unfinished_requests())


async def collect(
    worker: VllmWorker, api: str = "chat.completions", *, done: str = "", ids: tuple[int, ...] = (), **body: Any
) -> list[Delta]:
    request = GenerateRequest.from_body(api, json.dumps(body).encode(), continue_text=done, continue_tokens=ids)
    return [delta async for delta in worker.generate(request)]


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def reasons(deltas: list[Delta]) -> dict[int, str]:
    found = [(delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason]
    assert len(found) == len(dict(found)), "a choice ends once"
    return dict(found)


def usage(deltas: list[Delta]) -> tuple[int, int]:
    (one,) = [delta.usage for delta in deltas if delta.usage is not None]
    assert deltas[-1].usage is not None, "the last delta carries it"
    return one.prompt_tokens, one.completion_tokens


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    environment = pytest.MonkeyPatch()
    for name, value in vllm_kit.ENVIRONMENT.items():
        environment.setenv(name, value)
    folder = tmp_path_factory.mktemp("vllm")
    model = vllm_kit.convert(folder / "SmolLM2")
    asked, answers = folder / "asked.json", folder / "answers.json"
    asked.write_text(json.dumps({"conversations": CONVERSATIONS, "max_tokens": 40}))
    # vLLM's own answer comes from a process of its own, which starts beside ours.
    reference = subprocess.Popen([sys.executable, vllm_kit.__file__, "chat", str(model), str(asked), str(answers)])
    with asyncio.Runner() as runner:
        worker = VllmWorker(str(model), tool_call_parser="hermes", **vllm_kit.ENGINE)
        serving = system()
        node = runner.run(serving.__aenter__())
        try:
            runner.run(node.spawn(worker, name="worker", public=True))
            assert runner.run(asyncio.to_thread(reference.wait, 240)) == 0
            runner.run(until("a ready engine", lambda: worker.state != "loading", 240))
            assert worker.state == "ready", worker.load_report()
            yield House(runner, node, worker, model, json.loads(answers.read_text()))
        finally:
            reference.kill()
            runner.run(serving.__aexit__(None, None, None))
            environment.undo()


def test_greedy_text_equals_vllms_own_chat(house: House) -> None:
    assert "Paris" in house.expected[0]
    for conversation, expected in zip(CONVERSATIONS, house.expected, strict=True):
        assert text(house.ask(messages=conversation, temperature=0, max_tokens=40)) == expected


def test_what_a_worker_says_of_itself(house: House) -> None:
    report = house.worker.load_report()
    assert (report.state, report.max_model_len, report.capacity) == ("ready", 1024, 8)
    assert house.worker.engine_version().split(".")[0].isdigit()
    assert house.worker.metadata()["engine"] == "vllm"
    assert house.worker.model == "SmolLM2"


def test_vllm_reads_the_settings_that_the_worker_makes(house: House) -> None:
    import vllm.envs

    del house
    settings = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": True,
    }
    assert {name: getattr(vllm.envs, name) for name in settings} == settings


def test_an_answer_streams_ends_and_is_counted(house: House) -> None:
    deltas = house.ask(messages=FRANCE, temperature=0, max_tokens=24)
    assert text(deltas) == "The capital of France is Paris."
    assert len([delta for delta in deltas if delta.text]) > 4  # token by token
    assert reasons(deltas) == {0: "stop"}
    # 37 tokens as the template writes the chat; seven words and signs and the end token.
    assert usage(deltas) == (37, 8)
    cut = house.ask(messages=FRANCE, temperature=0, max_tokens=3)
    assert (text(cut), reasons(cut), usage(cut)) == ("The capital of", {0: "length"}, (37, 3))


def test_stop_strings_are_cut_out_before_anyone_sees_them(house: House) -> None:
    deltas = house.ask(messages=FRANCE, temperature=0, max_tokens=24, stop=["is Par", "never"])
    assert text(deltas) == "The capital of France "
    assert reasons(deltas) == {0: "stop"}


def test_characters_of_several_tokens_arrive_whole(house: House) -> None:
    deltas = house.ask(
        messages=[{"role": "user", "content": "Repeat exactly: 日本語 😀 é"}], temperature=0, max_tokens=40
    )
    assert "日本語" in text(deltas)
    assert all("\ufffd" not in delta.text for delta in deltas)


def test_choices_and_seeds(house: House) -> None:
    body = {"messages": FRANCE, "n": 3, "seed": -7, "temperature": 1.5, "max_tokens": 12}
    first, second = house.ask(**body), house.ask(**body)
    assert set(reasons(first)) == {0, 1, 2}
    assert [text(first, i) for i in range(3)] == [text(second, i) for i in range(3)]
    assert len({text(first, i) for i in range(3)}) > 1
    assert usage(first)[0] == 37  # the prompt is counted once


def test_tokens_are_those_that_the_engine_reads(house: House) -> None:
    def tokens(**body: Any) -> Any:
        return house.run(house.worker.tokenize(TokenizeRequest.from_body(json.dumps(body).encode())))

    of_chat = tokens(messages=FRANCE, return_token_strs=True)
    assert usage(house.ask(messages=FRANCE, max_tokens=1))[0] == len(of_chat.ids) == len(of_chat.texts)
    assert len(tokens(messages=FRANCE, add_generation_prompt=False).ids) < len(of_chat.ids)
    assert house.worker.detokenize(list(tokens(prompt="Paris é").ids)).endswith("Paris é")
    with pytest.raises(RequestError, match="vocabulary"):
        house.worker.detokenize([10**7])


def test_what_sampling_fields_do(house: House) -> None:
    paris = house.worker._engine.tokenizer.encode(" Paris", add_special_tokens=False)  # type: ignore[union-attr]
    assert len(paris) == 1
    banned = {"logit_bias": {str(paris[0]): -100}, "messages": FRANCE, "temperature": 0, "max_tokens": 16}
    assert " Paris" not in text(house.ask(**banned))
    assert " Paris" not in text(house.ask(messages=FRANCE, temperature=0, max_tokens=16, bad_words=["Paris"]))
    plain = text(house.ask(**LONG, max_tokens=60))
    for field, value in (("frequency_penalty", 2), ("presence_penalty", 2), ("repetition_penalty", 1.8)):
        assert text(house.ask(**LONG, max_tokens=60, **{field: value})) != plain, field
    # All of these leave only the best token.
    for narrow in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-6}, {"min_p": 1}):
        deltas = house.ask(messages=FRANCE, max_tokens=24, seed=2**64 - 1, **({"temperature": 2} | narrow))
        assert text(deltas) == "The capital of France is Paris.", narrow
    stopped = house.ask(messages=FRANCE, temperature=0, max_tokens=24, stop_token_ids=paris)
    assert text(stopped) == "The capital of France is"
    assert reasons(stopped) == {0: "stop"}
    assert usage(house.ask(messages=FRANCE, temperature=0, max_tokens=20, min_tokens=20)) == (37, 20)
    # Null is absent, whatever vLLM's own classes think of it.
    nulls = dict.fromkeys(("stop", "seed", "min_tokens", "tools", "logit_bias", "response_format", "n", "top_k"))
    assert text(house.ask(messages=FRANCE, temperature=0, max_tokens=24, **nulls)) == "The capital of France is Paris."


def test_log_probabilities_of_chats_and_completions(house: House) -> None:
    deltas = house.ask(messages=FRANCE, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2)
    entries = [entry for delta in deltas if delta.logprobs for entry in delta.logprobs["content"]]
    assert "".join(entry["token"] for entry in entries) == text(deltas)
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == max(other["logprob"] for other in entry["top_logprobs"])
    deltas = house.ask("completions", prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=1)
    pieces = [delta.logprobs for delta in deltas if delta.logprobs]
    tokens = [token for piece in pieces for token in piece["tokens"]]
    offsets = [offset for piece in pieces for offset in piece["text_offset"]]
    assert "".join(tokens) == text(deltas)
    assert offsets == [sum(map(len, tokens[:at])) for at in range(len(tokens))]


def test_structured_answers(house: House) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = json.loads(text(house.ask(messages=FRANCE, temperature=0, max_tokens=60, response_format=form)))
    assert set(answer) == {"city", "large"}
    assert isinstance(answer["large"], bool)
    choice = house.ask(messages=FRANCE, temperature=1, structured_outputs={"choice": ["Oslo", "Rome"]})
    assert text(choice) in ("Oslo", "Rome")
    with pytest.raises(RequestError) as refused:
        house.ask(messages=FRANCE, structured_outputs={"regex": "("})
    assert refused.value.status == 400


def test_tool_calls_are_read_by_vllms_parsers(house: House) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        deltas = house.ask(messages=FRANCE, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=80)
        calls = [call for delta in deltas if delta.tool_calls for call in delta.tool_calls]
        assert {call["index"] for call in calls} == {0}
        assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["get_weather"]
        assert calls[0]["id"]
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        assert isinstance(json.loads(arguments)["city"], str)
        assert reasons(deltas) == {0: reason}
    # Tools that must not be called change nothing.
    plain = house.ask(messages=FRANCE, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=24)
    assert text(plain) == "The capital of France is Paris."


def test_completions_of_texts_and_token_ids(house: House) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    deltas = house.ask("completions", prompt=prompts, max_tokens=4, temperature=0, n=2)
    assert set(reasons(deltas)) == {0, 1, 2, 3}
    assert "Paris" in text(deltas, 0)
    assert text(deltas, 0) == text(deltas, 1)
    assert "four" in text(deltas, 2)
    tokenizer = house.worker._engine.tokenizer  # type: ignore[union-attr]
    ids = tokenizer.encode(prompts[0])
    by_ids = house.ask("completions", prompt=ids, max_tokens=4, temperature=0)
    assert text(by_ids) == text(deltas, 0)
    assert usage(by_ids) == (len(ids), 4)
    nothing = house.ask("completions", prompt=prompts, max_tokens=0)
    assert reasons(nothing) == {0: "length", 1: "length"}
    assert usage(nothing)[1] == 0


def test_an_answer_is_continued_where_the_client_has_it(house: House) -> None:
    deltas = house.ask(messages=FRANCE, temperature=0, max_tokens=24, done="The capital of")
    assert text(deltas) == " France is Paris."
    limit = house.ask(messages=FRANCE, temperature=0, max_tokens=4, done="The capital of")
    assert (text(limit), reasons(limit)) == (" France", {0: "length"})
    with pytest.raises(RequestError, match="under frequency_penalty"):
        house.ask(messages=FRANCE, frequency_penalty=1, done="The capital of")


def test_s4_an_answer_that_is_cut_goes_on_as_if_it_had_not_been(house: House) -> None:
    assert house.worker.metadata()["continue"] == "greedy"
    assert len(house.worker.metadata()["fingerprint"]) == 24
    asked = {"messages": FRANCE, "temperature": 0, "max_tokens": 24}
    whole = house.ask(**asked)
    for cut in (1, 3, len(whole) - 1):
        had = whole[:cut]
        ids = tuple(token for delta in had for token in delta.token_ids)
        rest = house.ask(**asked, done=text(had), ids=ids)
        assert text(had) + text(rest) == text(whole)
        assert reasons(rest) == reasons(whole)
        assert len(ids) + usage(rest)[1] == usage(whole)[1]


@pytest.mark.parametrize("api", ["chat.completions", "completions"])
def test_s4_an_answer_with_stop_strings_goes_on_wherever_it_is_cut(house: House, api: str) -> None:
    prompt: dict[str, Any] = {"messages": FRANCE} if api == "chat.completions" else {"prompt": "One, two, three,"}
    asked = {**prompt, "temperature": 0, "max_tokens": 10}
    answer = text(house.ask(api, **asked))
    # Never met, though text is held back for them; of several tokens; inside a token; two that end together; at once.
    for stop in (
        [answer[4] + "zzz", answer[9:14] + "zz"],
        [answer[8:20]],
        [answer[13:15]],
        [answer[16:18], answer[14:18]],
        [answer[:3]],
    ):
        expected = house.ask(api, **asked, stop=stop)
        cuts = [cut for cut in range(1, len(expected)) if any(delta.token_ids for delta in expected[:cut])]
        assert cuts or not text(expected), stop
        for cut in cuts:
            had = expected[:cut]
            ids = tuple(token for delta in had for token in delta.token_ids)
            rest = house.ask(api, **asked, stop=stop, done=text(had), ids=ids)
            assert text(had) + text(rest) == text(expected), (stop, cut)
            assert reasons(rest) == reasons(expected), (stop, cut)
            assert len(ids) + usage(rest)[1] == usage(expected)[1], (stop, cut)
        assert house.in_engine == 0
    with pytest.raises(RequestError, match="not those of the text"):
        house.ask(api, **asked, stop="x", done="something else", ids=(5, 6))


@pytest.mark.parametrize(
    ("body", "word", "code"),
    [
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "maximum context length is 1024 tokens", True),
        ({"messages": [{"role": "user", "content": "word " * 200000}]}, "maximum context length is 1024 tokens", True),
        ({"messages": FRANCE, "logit_bias": {"99999": 1}}, "vocab", False),
        ({"messages": FRANCE, "response_format": {"type": "json_schema"}}, "json_schema", False),
        ({"messages": FRANCE, "tools": [{"type": "function"}], "tool_choice": "auto"}, "function", False),
        ({"messages": FRANCE, "tools": [WEATHER], "tool_choice": "nonesuch"}, "tool_choice", False),
        ({"messages": FRANCE, "kv_transfer_params": {"remote_host": "h"}}, "kv_transfer_params", False),
        ({"messages": FRANCE, "chat_template": "{{ messages }}"}, "chat_template", False),
        ({"messages": FRANCE, "bad_words": "x"}, "bad_words", False),
    ],
)
def test_what_cannot_be_answered_is_a_400_that_says_why(
    house: House, body: dict[str, Any], word: str, code: bool
) -> None:
    with pytest.raises(RequestError) as refused:
        house.ask(**body)
    assert refused.value.status == 400
    assert word in refused.value.message
    assert len(refused.value.message) < 1000
    assert (refused.value.code == "context_length_exceeded") == code
    assert house.in_engine == 0


def test_requests_that_run_at_once_are_one_batch_and_the_load_report_says_so(house: House) -> None:
    worker = house.worker
    engine = worker._engine
    assert engine is not None

    async def run() -> None:
        node = house.node
        router = Router("127.0.0.1", 0, "alias")
        await node.spawn(router, name="router")
        assert router.addr is not None
        await ready(router.addr, 1)
        body = {"model": "alias", **LONG, "max_tokens": 200}
        asked = [asyncio.create_task(http(router.addr, "POST", "/v1/chat/completions", body)) for _ in range(11)]
        # The engine's own count: eight sequences advance with each of its steps. The Router sends an eighth more, so
        # that no step lacks one, and keeps the rest in its queue.
        await until("a full batch", lambda: engine.load.running == 8 and engine.load.waiting == 1, 60)
        report = worker.load_report()
        assert (report.running, report.waiting, report.capacity) == (8, 1, 8)
        assert 0 < report.kv_usage <= 1
        assert 0 <= report.progress_age_ms < 30_000
        answers = await asyncio.gather(*asked)
        texts = {json.loads(content)["choices"][0]["message"]["content"] for _, _, content in answers}
        assert {status for status, _, _ in answers} == {200}
        assert len(texts) == 1
        await until("an idle worker", lambda: worker.load_report().running == 0)
        report = worker.load_report()
        assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0)
        await node.stop("router")

    house.run(run())


def test_a_client_that_leaves_frees_its_place_in_the_engine(house: House) -> None:
    worker = house.worker
    engine = worker._engine
    assert engine is not None

    async def run() -> None:
        async def endless(seen: asyncio.Event) -> None:
            request = GenerateRequest.from_body("chat.completions", json.dumps({**LONG, "max_tokens": 900}).encode())
            async for _ in worker.generate(request):
                seen.set()

        seen = [asyncio.Event() for _ in range(3)]
        asked = [asyncio.create_task(endless(one)) for one in seen]
        await asyncio.gather(*(one.wait() for one in seen))
        await until("three in the batch", lambda: engine.load.running == 3)
        # Two leave; the engine's own count falls while the third goes on.
        for one in asked[:2]:
            one.cancel()
        await until("one in the batch", lambda: engine.load.running == 1)
        assert not asked[2].done()
        asked[2].cancel()
        await asyncio.wait(asked)
        assert house.in_engine == 0

    house.run(run())


def test_a_router_serves_vllm_and_transformers_workers_under_one_name(house: House) -> None:
    async def run() -> None:
        async with system(house.node.addr) as second:
            other = TransformersWorker(str(house.model), device="cpu", threads=1)
            await second.spawn(other, name="worker", public=True)
            router = Router("127.0.0.1", 0, "alias", scheduler_type="round_robin")
            await house.node.spawn(router, name="router")
            assert router.addr is not None
            await until("the other engine", lambda: other.state == "ready", 120)
            await ready(router.addr, 2)
            before = [house.worker.load_report().processed, other.load_report().processed]
            body = {"model": "alias", "messages": FRANCE, "temperature": 0, "max_tokens": 24}
            for _ in range(4):
                status, _, content = await http(router.addr, "POST", "/v1/chat/completions", body)
                assert status == 200, content
                answer = json.loads(content)
                assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
                assert answer["usage"]["prompt_tokens"] == 37
            after = [house.worker.load_report().processed, other.load_report().processed]
            assert [now - then for now, then in zip(after, before, strict=True)] == [2, 2]
            await house.node.stop("router")

    house.run(run())


def test_a_worker_whose_engine_has_died_says_so(house: House) -> None:
    """The last one: it takes the engine away from the others."""
    (core,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
    core.kill()
    house.run(until("a failed worker", lambda: house.worker.state == "failed"))
    assert "engine process has ended by itself" in house.worker.load_report().detail
    with pytest.raises(RequestError) as refused:
        house.ask(messages=FRANCE)
    assert (refused.value.status, refused.value.code) == (503, "worker_failed")
