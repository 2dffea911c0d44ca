"""What a client may send, and what it is told about the rest (research rows T7, V1..V26)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pulsing import _core
from pulsing.core._shown import shown
from pulsing.serving._errors import RequestError
from pulsing.serving._request import GenerateRequest, unsupported

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> GenerateRequest:
    return GenerateRequest.from_body("chat.completions", json.dumps({"messages": USER, **fields}).encode())


def completion(**fields: Any) -> GenerateRequest:
    return GenerateRequest.from_body("completions", json.dumps({"prompt": "hi", **fields}).encode())


def refused(body: Any, api: str = "chat.completions") -> RequestError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        GenerateRequest.from_body(api, raw)
    assert caught.value.status == 400
    assert len(caught.value.message) <= 1024
    return caught.value


_TEXTS = [
    "",
    "hi",
    "é \u2028 日本 \U0001f600",
    'a "quoted" \\ back\nslash \t / \x7f',
    "x" * 200,
    "x" * 70 + '"' + "y" * 70,
]
_SCALARS = [*_TEXTS, True, False, None, 0, -1, 7, 10**17, 10**18, -(10**30), 0.5, -1e-7, 1e300, 12345678.125]


def _random_value(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(4) if depth < 4 else 0
    if kind == 1:
        return [_random_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 2:
        return {dice.choice(["a", "b", "role", "é"]): _random_value(dice, depth + 1) for _ in range(dice.randrange(4))}
    return dice.choice(_SCALARS)


class TestReadJson:
    def test_whatever_is_read_is_what_json_makes_of_it(self) -> None:
        dice = random.Random(5)
        taken = 0
        for turn in range(4000):
            value = {"k": _random_value(dice, 0), "messages": _random_value(dice, 0)}
            separators = (",", ":") if turn % 2 else (" , ", "\n:\t")
            text = json.dumps(value, separators=separators, ensure_ascii=bool(turn % 3)).encode()
            if turn % 4 == 0:
                at = dice.randrange(len(text))
                text = text[:at] + dice.choice([b'"', b"\\", b"{", b"]", b"0", b"\n", b"\xff", b""]) + text[at + 1 :]
            read = _core.read_json(text)
            if read is not None:
                taken += 1
                # Types too, which == does not tell: 1, 1.0 and True.
                assert repr(read) == repr(json.loads(text)), text
        assert taken > 1500

    @pytest.mark.parametrize(
        "text",
        [
            b"[]",
            b'"x"',
            b"",
            b"{",
            b'{"a":1}x',
            b'{"a":NaN}',
            b'{"a":12345678901234567890}',
            b'{"a":"\\ud800"}',
            b'{"a":"\x01"}',
            b'{"a":"\xff"}',
            b'{"\\u0061":1}',
            b"\xef\xbb\xbf{}",
            '{"a":1}'.encode("utf-16"),
            b'{"a":' + b"[" * 100_000,
        ],
    )
    def test_what_json_has_to_look_at_is_left_to_it(self, text: bytes) -> None:
        assert _core.read_json(text) is None

    def test_later_members_of_a_name_count_and_numbers_keep_their_kind(self) -> None:
        read = _core.read_json(b'{"a":1,"b":-0,"a":1.0,"c":1e999,"d":1E2}')
        assert repr(read) == "{'a': 1.0, 'b': 0, 'c': inf, 'd': 100.0}"


class TestBody:
    @pytest.mark.parametrize(
        "raw", [b'{"model":', b"", b"[1]", b'"text"', b'{"temperature": NaN}', b"\xff\xfe", b"[" * 100_000]
    )
    def test_what_is_no_json_object_is_refused(self, raw: bytes) -> None:
        refused(raw)

    def test_null_is_absent(self) -> None:
        fields = dict.fromkeys(
            [
                "stream",
                "logprobs",
                "stop",
                "tools",
                "seed",
                "max_tokens",
                "n",
                "temperature",
                "top_p",
                "logit_bias",
                "user",
            ]
        )
        assert chat(**fields).needs == frozenset()

    def test_fields_of_other_vendors_pass_and_stay_readable(self) -> None:
        request = chat(foo=1, thinking={"x": 1}, store=False, parallel_tool_calls=True, metadata={"a": "b"})
        assert request.needs == frozenset()
        assert request.body["foo"] == 1

    def test_an_error_never_repeats_a_large_value(self) -> None:
        refused({"messages": "x" * 2_000_000})
        refused({"messages": USER, "stop": [1] * 1_000_000})
        assert len(shown({"k": "v" * 10_000})) <= 100


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            (None, "messages"),
            ([], "messages"),
            ("hi", "messages"),
            (["hi"], "messages[0]"),
            ([{"role": "robot", "content": "hi"}], "messages[0].role"),
            ([{"content": "hi"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
            ([{"role": "user", "content": [{"type": "thinking"}]}], "messages[0].content[0]"),
            (
                [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
                "messages[0].content[1]",
            ),
            ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
            ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ],
    )
    def test_a_wrong_one_is_named(self, messages: Any, param: str) -> None:
        assert refused({"messages": messages}).param == param

    def test_content_parts_become_one_text_in_order(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        request = chat(messages=[{"role": "user", "content": parts}, {"role": "user", "content": []}])
        assert [message["content"] for message in request.messages] == ["ab", ""]

    def test_roles_are_those_templates_know(self) -> None:
        request = chat(
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": "2+2"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
                        {"id": "c2", "type": "function", "function": {"name": "raw", "arguments": "not json"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
            ]
        )
        assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool"]
        calls = request.messages[2]["tool_calls"]
        assert [call["function"]["arguments"] for call in calls] == [{"a": 2}, "not json"]
        assert request.messages[2]["content"] == ""
        assert request.messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "4"}

    def test_only_an_empty_assistant_message_is_fine(self) -> None:
        assert chat(messages=[{"role": "assistant", "content": ""}]).messages == ({"role": "assistant", "content": ""},)


class TestValues:
    @pytest.mark.parametrize("make", [chat, completion])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -1),
            ("temperature", 2.1),
            ("temperature", "hot"),
            ("temperature", True),
            ("top_p", -0.1),
            ("top_p", 1.1),
            ("top_k", -2),
            ("top_k", 1.5),
            ("min_p", 2),
            ("n", 0),
            ("n", 129),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("repetition_penalty", 0),
            ("seed", 1.5),
            ("max_tokens", -1),
            ("max_tokens", "many"),
            ("stop", [""]),
            ("stop", ""),
            ("stop", 5),
            ("stop", [1]),
            ("logit_bias", {"a": 1}),
            ("logit_bias", {"5": 101}),
            ("logit_bias", [5]),
            ("chat_template_kwargs", 5),
            ("response_format", "json"),
        ],
    )
    def test_a_bad_value_is_refused_alike_in_both_apis(self, make: Any, name: str, value: Any) -> None:
        with pytest.raises(RequestError) as caught:
            make(**{name: value})
        assert caught.value.status == 400
        assert caught.value.param == name

    @pytest.mark.parametrize("make", [chat, completion])
    def test_the_edges_are_taken(self, make: Any) -> None:
        request = make(
            temperature=0, top_p=0, top_k=-1, n=128, presence_penalty=-2, frequency_penalty=2, seed=-5, max_tokens=1
        )
        assert (request.temperature, request.top_p, request.top_k, request.n, request.seed) == (0, 0, None, 128, -5)

    def test_the_newer_limit_wins(self) -> None:
        assert chat(max_tokens=5, max_completion_tokens=9).max_tokens == 9
        assert chat(max_tokens=5).max_tokens == 5
        assert chat().max_tokens is None
        assert completion().max_tokens == 16
        assert completion(max_tokens=0).max_tokens == 0
        assert refused({"messages": USER, "max_tokens": 0}).param == "max_tokens"

    def test_stop_is_one_or_many(self) -> None:
        assert chat(stop="a").stop == ("a",)
        assert chat(stop=["a", "b", "a"]).stop == ("a", "b")
        assert chat(stop=[]).stop == ()

    def test_logprobs(self) -> None:
        assert chat(logprobs=True, top_logprobs=3).top_logprobs == 3
        assert completion(logprobs=0).logprobs
        assert not completion().logprobs
        assert refused({"messages": USER, "top_logprobs": 3}).param == "top_logprobs"
        assert refused({"messages": USER, "logprobs": True, "top_logprobs": 21}).param == "top_logprobs"
        assert refused({"prompt": "a", "logprobs": 6}, "completions").param == "logprobs"


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ("a", ("a",)),
            (["a", "b"], ("a", "b")),
            ([1, 2, 3], ((1, 2, 3),)),
            ([[1, 2], [3]], ((1, 2), (3,))),
            ("", ("",)),
        ],
    )
    def test_all_four_forms(self, prompt: Any, expected: Any) -> None:
        assert completion(prompt=prompt).prompts == expected

    @pytest.mark.parametrize("prompt", [None, [], {}, 5, [True], [["a"]], [[]], [-1], ["\udfff"]])
    def test_anything_else_is_refused(self, prompt: Any) -> None:
        error = refused({"prompt": prompt}, "completions")
        assert error.param is not None
        assert error.param.startswith("prompt")

    def test_choices_count_prompts_and_n(self) -> None:
        assert completion(prompt=["a", "b"], n=3).choices == 6
        assert chat(n=2).choices == 2


class TestNeeds:
    @pytest.mark.parametrize(
        ("fields", "need"),
        [
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"ignore_eos": True}, "ignore_eos"),
            ({"min_tokens": 3}, "min_tokens"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"logit_bias": {"5": -100}}, "logit_bias"),
            ({"n": 2}, "n"),
            ({"best_of": 3}, "best_of"),
            ({"seed": 0}, "seed"),
            ({"temperature": 0}, "temperature"),
            ({"guided_json": {}}, "guided_json"),
        ],
    )
    def test_what_changes_the_output_is_asked_for(self, fields: dict[str, Any], need: str) -> None:
        assert need in chat(**fields).needs

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": []},
            {"tools": [{"type": "function"}], "tool_choice": "none"},
            {"response_format": {"type": "text"}},
            {"n": 1, "best_of": 1},
            {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "logit_bias": {}},
            {"modalities": ["text"], "ignore_eos": False, "min_tokens": 0, "repetition_penalty": 1.0},
        ],
    )
    def test_what_changes_nothing_is_not(self, fields: dict[str, Any]) -> None:
        assert chat(**fields).needs == frozenset()

    def test_template_variables(self) -> None:
        request = chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
        assert request.template_args == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5, "stop": "x"}])
def test_s2_a_workers_message_is_read_as_its_parts_are(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": USER, **fields}).encode()
    said: Any = {"request_id": "r1", "deadline": 2.5, "continue_text": "so far", "handoff": b"there"}
    for api in ("chat.completions", "completions"):
        head = _core.encode_request("generate", api=api, continue_tokens=[3, 4], **said)
        wire = _core.WorkerRequest.decode(head, [body])
        assert (wire.kind, wire.api) == ("generate", api)
        assert wire.surroundings() == {"api": api, "continue_tokens": (3, 4), **said}
    parts = GenerateRequest.from_body("chat.completions", body, continue_tokens=(3, 4), **said)
    assert GenerateRequest.within({**wire.surroundings(), "api": "chat.completions"}, body) == parts


@pytest.mark.parametrize(
    ("asked", "words", "param"),
    [
        ({"prompt": [1, 2]}, "prompts of token ids; send one text or", "prompt"),
        ({"prompt": ["a", "b"]}, "several prompts in one request; send one text or", "prompt"),
        ({"seed": 1, "n": 2}, "n, seed; leave it out or", "n"),
    ],
)
def test_what_an_engine_has_not_is_told_in_the_clients_words(asked: dict[str, Any], words: str, param: str) -> None:
    error = unsupported("some", completion(**asked).needs - {"max_tokens"})
    assert error.message == f"the some engine does not support {words} use another worker"
    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter")
