"""The incremental detokeniser against a one-shot decode, over byte-level vocabularies and any grouping of tokens."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phloem.engine.detokenizer import IncrementalDetokenizer
from phloem.types import SamplingParams

SPECIAL = 256
TEXTS = ["hello", "naïve café", "日本語", "👩‍👩‍👧‍👦 family", "e\u0301 combining", "한국어", "žluťoučký kůň"]


class ByteTokenizer:
    """256 single bytes, one control token, then some tokens of several bytes that cut characters apart."""

    special_ids = frozenset({SPECIAL})

    def __init__(self, extra: tuple[bytes, ...] = ()) -> None:
        self._extra = extra

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"<|end|>" if token_id == SPECIAL else self._extra[token_id - 257]


def run(tokens: list[int], cuts: list[int], tokenizer: ByteTokenizer, **params: object) -> tuple[list[str], str | None]:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    bounds = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    pieces = [detokenizer.push(tokens[start:end], False).text for start, end in itertools.pairwise(bounds)]
    last = detokenizer.push([], True)
    return [*pieces, last.text], last.stop_reason


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cut at the earliest end of any stop string; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@given(
    data=st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda text: text.encode())),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
@example(data=b"\xf0\x9f\x98", cuts=[1, 2])
@example(data=b"\xed\xa0\x80\xe2\x28\xa1\xf0\x90a", cuts=[1, 2, 3, 4, 5])
def test_pieces_join_to_the_one_shot_decode(data: bytes, cuts: list[int]) -> None:
    pieces, _ = run(list(data), cuts, ByteTokenizer())
    assert "".join(pieces) == data.decode("utf-8", "replace")


@given(
    text=st.text(alphabet="abcé😀", max_size=24),
    stops=st.lists(st.text(alphabet="abcé😀", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_are_found_alike_however_tokens_fall(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    pieces, reason = run(list(text.encode()), cuts, ByteTokenizer(), stop=tuple(stops), include_stop=include)
    assert ("".join(pieces), reason) == oracle(text, stops, include)


@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_is_held_longer_than_needed(text: str, stops: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(stop=tuple(stops)))
    sent = seen = ""
    for character in text:
        piece = detokenizer.push([ord(character)], False)
        sent, seen = sent + piece.text, seen + character
        if piece.stop_reason is not None:
            return
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_over_many_tokens_arrive_whole(text: str) -> None:
    pieces, _ = run(list(text.encode()), list(range(100)), ByteTokenizer())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_token_may_hold_the_end_of_one_character_and_the_start_of_the_next() -> None:
    first, second = "é".encode(), "ü".encode()
    tokenizer = ByteTokenizer(extra=(first[1:] + second[:1],))
    pieces, _ = run([first[0], 257, second[1]], [1, 2, 3], tokenizer)
    assert pieces == ["", "é", "ü", ""]


def test_special_tokens_are_skipped_or_kept_as_asked() -> None:
    tokens = [*b"a", SPECIAL, *b"b"]
    assert "".join(run(tokens, [], ByteTokenizer())[0]) == "ab"
    assert "".join(run(tokens, [], ByteTokenizer(), skip_special_tokens=False)[0]) == "a<|end|>b"


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "a<|end|>")])
def test_the_stop_token_shows_only_when_asked(include: bool, expected: str) -> None:
    for skip in (True, False):
        params = SamplingParams(include_stop=include, skip_special_tokens=skip)
        detokenizer = IncrementalDetokenizer(ByteTokenizer(), params)
        assert detokenizer.push([*b"a", SPECIAL], True, ends_with_stop_token=True).text == expected
        assert detokenizer.num_tokens == 2


def test_tokens_after_a_stop_string_are_not_taken() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(stop=("c",)))
    assert detokenizer.push(list(b"abcdef"), False) == ("ab", "c")
    assert detokenizer.num_tokens == 3
    assert detokenizer.push(list(b"xyz"), True) == ("", "c")


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(stop=("b",), min_tokens=4))
    assert detokenizer.push(list(b"abab"), False) == ("aba", "b")


def test_incomplete_bytes_at_the_end_become_one_replacement_character() -> None:
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams())
    assert detokenizer.push([0xF0, 0x9F, 0x98], False).text == ""
    assert detokenizer.push([], True).text == "\ufffd"


def test_cost_per_token_does_not_grow_with_the_text() -> None:
    stop = "a" * 1000 + "b"
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), SamplingParams(stop=(stop,)))
    start = time.perf_counter()
    for _ in range(20_000):
        detokenizer.push([97], False)
    assert detokenizer.push([], True).text == "a" * 1000
    assert time.perf_counter() - start < 2.0
