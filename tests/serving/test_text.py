"""Text that grows piece by piece reads the same however it was cut (research rows S1, S2, S4)."""

from __future__ import annotations

import itertools
import random

import pytest

from pulsing.serving._text import ByteDetokenizer, StopFilter, WindowDetokenizer

TEXTS = ["日本語 😀 é", "plain", "", "a\u0301\u200d👩‍👩‍👧", "x\ufffdy"]


def compositions(size: int) -> list[list[int]]:
    """All ways to cut a text of this size, as lists of piece lengths."""
    cuts = itertools.product((False, True), repeat=max(0, size - 1))
    result = []
    for cut in cuts:
        pieces, length = [], 1
        for here in cut:
            if here:
                pieces.append(length)
                length = 1
            else:
                length += 1
        result.append([*pieces, length] if size else [])
    return result


def split(text: str, lengths: list[int]) -> list[str]:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(text[at : at + length])
        at += length
    return pieces


def filtered(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    cutter = StopFilter(stops)
    outs = [cutter.feed(piece) for piece in pieces]
    stopped = cutter.stopped
    outs.append(cutter.flush())
    return "".join(outs), stopped, outs


def by_letters(text: str, stops: list[str]) -> tuple[str, bool]:
    """What a stop means, said in the plainest way: the first one to be complete ends the text before itself."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(len(stop) for stop in met)], True
    return text, False


class TestStopFilter:
    @pytest.mark.parametrize(
        ("text", "stops"),
        [
            ("x ab cd y", ["ab cd"]),
            ("aaab", ["aab"]),
            ("abcdbc", ["abcd", "bc"]),
            ("abababc", ["ababc"]),
            ("no stop here", ["zzz"]),
            ("ends with a", ["ab"]),
            ("STOP", ["STOP"]),
            ("xSTOP", ["STOP", "TOP"]),
            ("日本語。終", ["。終"]),
        ],
    )
    def test_every_split_gives_the_same_text(self, text: str, stops: list[str]) -> None:
        expected = by_letters(text, stops)
        for lengths in compositions(len(text)):
            out, stopped, _ = filtered(split(text, lengths), stops)
            assert (out, stopped) == expected, lengths

    def test_random_texts_match_the_plain_definition(self) -> None:
        rng = random.Random(1)
        for _ in range(3000):
            text = "".join(rng.choices("abc", k=rng.randint(0, 14)))
            stops = ["".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
            pieces, at = [], 0
            while at < len(text):
                size = rng.randint(1, 4)
                pieces.append(text[at : at + size])
                at += size
            out, stopped, _ = filtered(pieces, stops)
            assert (out, stopped) == by_letters(text, stops), (text, stops, pieces)

    def test_a_stop_string_across_tokens_is_held_back(self) -> None:
        out, stopped, pieces = filtered(["x a", "b c", "d y"], ["ab cd"])
        assert out == "x "
        assert stopped
        assert pieces == ["x ", "", "", ""]

    def test_text_that_is_no_beginning_of_a_stop_is_given_out_at_once(self) -> None:
        cutter = StopFilter(["###"])
        assert cutter.feed("hello ") == "hello "
        assert cutter.feed("#1") == "#1"
        assert cutter.feed("#") == ""
        assert cutter.flush() == "#"

    def test_nothing_comes_after_a_stop(self) -> None:
        cutter = StopFilter(["."])
        assert cutter.feed("a.b") == "a"
        assert cutter.feed("c") == ""
        assert cutter.flush() == ""


class TestByteDetokenizer:
    @pytest.mark.parametrize("text", TEXTS)
    def test_whole_characters_only_and_the_same_bytes(self, text: str) -> None:
        raw = text.encode()
        tokenizer = ByteDetokenizer(lambda token: bytes((token,)))
        pieces = [tokenizer.feed(byte) for byte in raw]
        pieces.append(tokenizer.flush())
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text

    def test_an_incomplete_tail_is_flushed_once(self) -> None:
        tokenizer = ByteDetokenizer(lambda token: bytes((token,)))
        assert "".join(tokenizer.feed(byte) for byte in "é😀".encode()[:-1]) == "é"
        assert tokenizer.flush() == "\ufffd"


class TestWindowDetokenizer:
    @staticmethod
    def sentencepiece(ids: list[int]) -> str:
        """Decodes like SentencePiece: bytes, and the first token's leading space is dropped."""
        return bytes(ids).decode("utf-8", "replace").removeprefix(" ")

    @pytest.mark.parametrize("text", [*TEXTS, " two  words ", "word word"])
    def test_equals_decoding_everything(self, text: str) -> None:
        context = list(b"prompt")
        tokenizer = WindowDetokenizer(self.sentencepiece, context)
        pieces = [tokenizer.feed(byte) for byte in text.encode()]
        pieces.append(tokenizer.flush())
        assert "".join(pieces) == text

    def test_no_character_is_given_out_in_halves(self) -> None:
        tokenizer = WindowDetokenizer(self.sentencepiece)
        assert [tokenizer.feed(byte) for byte in "aé語".encode()] == ["a", "", "é", "", "", "語"]

    def test_bytes_that_are_no_text_are_not_held_for_ever(self) -> None:
        tokenizer = WindowDetokenizer(self.sentencepiece)
        given = [tokenizer.feed(0xFF) for _ in range(100)]
        assert sum(len(piece) for piece in given) > 60
        assert len("".join(given) + tokenizer.flush()) == 100
