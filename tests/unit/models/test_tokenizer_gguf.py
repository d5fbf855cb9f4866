"""GGUF vocabularies against golden ids; the fixtures' ids were computed by llama.cpp (llama-cpp-python 0.3.36)."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.errors import CheckpointError
from phloem.models.gguf_file import GgufFile
from phloem.models.tokenizer import Tokenizer, tokenizer_from_gguf
from phloem.models.tokenizer_gguf import PRE_TOKENIZERS

DATA = Path(__file__).parent / "data"


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text("utf-8"))


def byte_level(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    fixture = load("pre_tokenizers.json")
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": fixture["tokens"],
        "tokenizer.ggml.merges": fixture["merges"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(fixture["tokens"]) - 3),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentence_piece(**changes: Any) -> dict[str, Any]:
    fixture = load("sentence_piece.json")
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": fixture["tokens"],
        "tokenizer.ggml.scores": fixture["scores"],
        "tokenizer.ggml.token_type": fixture["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(demo_model).metadata, demo_model.name)


def test_demo_ids_equal_the_golden_ones(demo: Tokenizer) -> None:
    for case in load("demo_tokens.json"):
        assert demo.encode(case["text"], False) == case["ids"], case["text"]


def test_demo_ids_give_their_text_back(demo: Tokenizer) -> None:
    for case in load("demo_tokens.json"):
        assert demo.decode(case["ids"], skip_special=False) == case["text"]
        assert b"".join(demo.token_bytes(i) for i in case["ids"]) == case["text"].encode()


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(demo: Tokenizer, work: str) -> None:
    text = "word " * 200_000
    ids = demo.encode(text)
    is_over = threading.Event()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not is_over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    if work == "encode":
        assert demo.encode(text) == ids
    else:
        assert demo.decode(ids) == text
    during = ticks - before
    is_over.set()
    thread.join()
    assert during >= 10


def test_demo_knows_its_end_of_turn_and_adds_no_bos(demo: Tokenizer) -> None:
    assert demo.eos_ids == {demo.token_id("<|im_end|>")}
    assert demo.encode("a") == demo.encode("a", False)
    assert demo.vocab_size == 49152
    assert demo.token_bytes(-1) == demo.token_bytes(49152) == b""


@pytest.mark.parametrize("group", load("pre_tokenizers.json")["groups"], ids=lambda group: group["names"][0])
def test_each_pre_tokenizer_splits_as_its_model_does(group: dict[str, Any]) -> None:
    texts = load("pre_tokenizers.json")["texts"]
    for name in group["names"]:
        tokenizer = tokenizer_from_gguf(byte_level(name), "file")
        for text, ids in zip(texts, group["ids"], strict=True):
            assert tokenizer.encode(text, False) == ids, (name, text)
            assert tokenizer.decode(ids, False) == text


def test_every_known_pre_tokenizer_has_golden_ids() -> None:
    assert {name for group in load("pre_tokenizers.json")["groups"] for name in group["names"]} == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_piece_ids_equal_the_golden_ones(prefixed: bool) -> None:
    fixture = load("sentence_piece.json")
    tokenizer = tokenizer_from_gguf(sentence_piece(add_space_prefix=prefixed), "file")
    for text, ids in zip(fixture["texts"], fixture["ids" if prefixed else "ids_without_prefix"], strict=True):
        assert tokenizer.encode(text, False) == ids, text


def test_sentence_piece_bytes_and_text() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece(), "file")
    ids = tokenizer.encode("the fox 😀", False)
    assert tokenizer.decode(ids) == "the fox 😀"
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the fox 😀".encode()


@pytest.mark.parametrize("pre", [None, "no-such", ""])
def test_an_unknown_pre_tokenizer_is_refused_with_the_known_names(pre: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is .*known are gpt-2.*smollm"):
        tokenizer_from_gguf(byte_level(pre), "file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a zzzzz"]}, "tokenizer.ggml.merges holds 'a zzzzz'"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type must hold 700 numbers"),
        ({"bos_token_id": 999999}, "tokenizer.ggml.bos_token_id must be a token id below 700"),
    ],
)
def test_a_contradictory_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        tokenizer_from_gguf(byte_level(**changes), "file")


@given(
    key=st.sampled_from(
        (
            *("model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id"),
            *("eot_token_id", "unknown_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
        )
    ),
    value=st.none()
    | st.integers(-2, 1 << 65)
    | st.floats()
    | st.booleans()
    | st.lists(st.text(max_size=3), max_size=3)
    | st.sampled_from([np.array([1, 2]), np.array([[0.5]]), {"a": 1}, "qwen2", "llama"]),
    pieces=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_any_metadata_give_a_tokenizer_or_a_checkpoint_error(key: str, value: Any, pieces: bool) -> None:
    metadata = sentence_piece() if pieces else byte_level()
    with contextlib.suppress(CheckpointError):
        tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{key}": value}, "file").encode("some text")


def test_sentence_piece_without_scores_is_refused() -> None:
    with pytest.raises(CheckpointError, match="scores"):
        tokenizer_from_gguf(sentence_piece(scores=[1.0]), "file")


def test_bos_is_added_where_the_file_or_the_kind_says_so_and_never_twice() -> None:
    assert tokenizer_from_gguf(byte_level(), "file").encode("a")[0] != 0
    forced = tokenizer_from_gguf(byte_level(add_bos_token=True, add_eos_token=True), "file")
    assert forced.encode("a") == [0, *forced.encode("a", False), 2]
    assert forced.encode("<|endoftext|>a") == [0, *forced.encode("a", False), 2]
    assert tokenizer_from_gguf(byte_level("llama-bpe"), "file").encode("a")[0] == 0
    assert tokenizer_from_gguf(byte_level("llama-bpe", add_bos_token=False), "file").encode("a")[0] != 0
    assert tokenizer_from_gguf(sentence_piece(), "file").encode("a")[0] == 1


def test_a_template_that_writes_bos_gives_one_bos() -> None:
    metadata = byte_level("llama-bpe") | {
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    }
    ids = tokenizer_from_gguf(metadata, "file").apply_chat_template([{"role": "user", "content": "hi"}]).tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_end_ids_are_the_union_of_metadata_and_template() -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ '<|im_end|>' }}\n{% endfor %}"
    metadata = byte_level(eos_token_id=0, eot_token_id=5, eom_token_id=None) | {"tokenizer.chat_template": template}
    assert tokenizer_from_gguf(metadata, "file").eos_ids == {0, 5, 2}
    named = byte_level() | {"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_template": "D"}
    tokenizer = tokenizer_from_gguf(named, "file")
    assert tokenizer.render_chat([{"role": "user"}]) == "D"
    assert tokenizer.render_chat([{"role": "user"}], tools=[{"type": "function"}]) == "T"
    assert tokenizer_from_gguf(named, "file", "given").render_chat([{"role": "user"}]) == "given"
