"""Grammars walked by a model that knows nothing: whatever is drawn from the mask, the answer fits."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from phloem.engine.grammar import Grammar, GrammarCompiler, GrammarMasker, check_repeats, choice_regex, json_schema
from phloem.errors import InvalidRequestError
from tests.server.fake_engine import END, VOCAB, FakeTokenizer

WORDS = (VOCAB + 31) // 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "kind": {"const": "person"},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FakeTokenizer())


def allowed(masker: GrammarMasker, num_words: int = WORDS) -> list[int]:
    mask = np.full(num_words, 0xFFFFFFFF, dtype=np.uint32)
    masker.fill(mask)
    ids: list[int] = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return ids


def walk(masker: GrammarMasker, rng: np.random.Generator, limit: int = 2000) -> str | None:
    """Draw evenly from the mask until the end; None when the limit comes first."""
    drawn: list[int] = []
    for _ in range(limit):
        ids = allowed(masker)
        assert ids, "there is always something to draw"
        assert max(ids) < VOCAB
        token = int(rng.choice(ids))
        masker.accept(token)
        if token == END or token in FakeTokenizer.eos_ids:
            assert masker.finished
            return bytes(drawn).decode()
        drawn.append(token)
    return None


def outside_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', "s", text)


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_give_valid_answers(compiler: GrammarCompiler, seed: int) -> None:
    (masker,) = compiler.maskers(json_schema(PERSON, "x"), 1, "x")
    text = walk(masker, np.random.default_rng(seed))
    assert text is not None
    value = json.loads(text)
    assert value.keys() == {"name", "age", "tags", "kind"}
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"a", "b"}
    assert not re.search(r"\s{2}", outside_strings(text))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-c]{2,5}(x|y)"), "[a-c]{2,5}(x|y)"),
        (choice_regex(["yes", "no", 'with "quotes"\n']), '(yes|no|with "quotes"\n)'),
        (Grammar("ebnf", 'root ::= "a" item+\nitem ::= "1" | "2"'), "a[12]+"),
    ],
)
def test_other_kinds(compiler: GrammarCompiler, grammar: Grammar, pattern: str) -> None:
    for seed in range(10):
        (masker,) = compiler.maskers(grammar, 1, "x")
        text = walk(masker, np.random.default_rng(seed))
        assert text is not None
        assert re.fullmatch(pattern, text)


def test_states_are_independent_and_the_cache_is_used(compiler: GrammarCompiler) -> None:
    first, second = compiler.maskers(Grammar("regex", "ab"), 2, "x")
    first.accept(ord("a"))
    assert allowed(first) == [ord("b")]
    assert allowed(second) == [ord("a")]
    (third,) = compiler.maskers(Grammar("regex", "ab"), 1, "x")
    assert allowed(third) == [ord("a")]


def test_a_wrong_token_ends_the_answer_and_raises_nothing(compiler: GrammarCompiler) -> None:
    (masker,) = compiler.maskers(Grammar("regex", "ab"), 1, "x")
    masker.accept(ord("z"))
    assert masker.finished
    assert masker.error
    assert set(allowed(masker)) == FakeTokenizer.eos_ids


def test_masks_wider_than_the_tokenizer_forbid_the_rest(compiler: GrammarCompiler) -> None:
    (masker,) = compiler.maskers(Grammar("regex", "."), 1, "x")
    assert max(allowed(masker, WORDS + 4)) < VOCAB


def test_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(FakeTokenizer(), cache_size=3)
    for number in range(10):
        compiler.maskers(Grammar("regex", f"a{number}"), 1, "x")
    assert len(compiler._cache) == 3


@pytest.mark.parametrize("pattern", ["a{19999}", "(ab){100}", "[{9999}]", r"\{99999\}", "a{0}", "a" * 50_000, "x{2,}"])
def test_reasonable_repeats_pass(pattern: str) -> None:
    check_repeats(pattern, "x")


@pytest.mark.parametrize(
    "pattern", ["a{20001}", "(a{200}){200}", "(a{10}b{10000}){3}", "((a{30}){30}){30}", "(.*a){1,99999}"]
)
def test_huge_repeats_do_not(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="counted repeats"):
        check_repeats(pattern, "x")


def test_patterns_deep_in_a_schema_are_checked() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"items": [{"pattern": "(a{999}){999}"}]}}}
    with pytest.raises(InvalidRequestError):
        json_schema(schema, "x")
    with pytest.raises(InvalidRequestError):
        json_schema({"patternProperties": {"a{99999}": {}}}, "x")
