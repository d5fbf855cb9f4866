"""Tokenisers of Hugging Face-format folders: special tokens, end ids from all places, templates from all places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import processors

from phloem.errors import CheckpointError, InvalidRequestError
from phloem.models.tokenizer import tokenizer_from_folder
from tests.helpers.models import CHAT_TEMPLATE, CORPUS, byte_level_tokenizer

CHAT = [{"role": "user", "content": "hi"}]


def make(folder: Path, bos: bool = False, **files: Any) -> Path:
    """tokenizer.json plus `files`, whose names stand for <name>.json."""
    backend = byte_level_tokenizer()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_ids_equal_transformers(tmp_path: Path) -> None:
    folder = make(tmp_path, bos=True, tokenizer_config={"bos_token": "<|endoftext|>"})
    ours = tokenizer_from_folder(folder)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in (*CORPUS, "<|im_start|>x<|im_end|>", "", " "):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("post_processor", "flag", "has_bos"),
    [(True, None, True), (True, False, False), (True, True, True), (False, None, False), (False, True, True)],
)
def test_add_bos_token_outranks_the_post_processor(
    tmp_path: Path, post_processor: bool, flag: bool | None, has_bos: bool
) -> None:
    config = {"bos_token": "<|endoftext|>"} | ({} if flag is None else {"add_bos_token": flag})
    ids = tokenizer_from_folder(make(tmp_path, post_processor, tokenizer_config=config)).encode("a")
    assert ids.count(0) == int(has_bos)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"eos_token_id": [7, 8, 9]}}, {7, 8, 9}),
        ({"generation_config": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}, {0}),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, {2}),
        (
            {
                "config": {"eos_token_id": 0},
                "generation_config": {"eos_token_id": [0, 9]},
                "tokenizer_config": {"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE},
            },
            {0, 9, 2},
        ),
    ],
)
def test_end_ids_come_from_every_source(tmp_path: Path, files: dict[str, Any], ids: set[int]) -> None:
    assert tokenizer_from_folder(make(tmp_path, **files)).eos_ids == ids


def test_templates_come_from_file_config_and_named_lists(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = make(tmp_path, tokenizer_config={"chat_template": "C"})
    assert tokenizer_from_folder(folder).render_chat(CHAT) == "C"
    make(folder, tokenizer_config={"chat_template": listed})
    assert tokenizer_from_folder(folder).render_chat(CHAT) == "D"
    assert tokenizer_from_folder(folder).render_chat(CHAT, tools) == "T"
    (folder / "chat_template.jinja").write_text("J")
    assert tokenizer_from_folder(folder).render_chat(CHAT) == "J"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("JT")
    assert tokenizer_from_folder(folder).render_chat(CHAT, tools) == "JT"
    assert tokenizer_from_folder(folder, "given").render_chat(CHAT) == "given"


def test_without_a_template_chats_are_refused_and_text_works(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(make(tmp_path))
    assert tokenizer.decode(tokenizer.encode("plain text")) == "plain text"
    with pytest.raises(InvalidRequestError, match=r"no chat template; give one with --chat-template"):
        tokenizer.render_chat(CHAT)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        tokenizer_from_folder(tmp_path)
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json must hold a JSON object"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        tokenizer_from_folder(tmp_path)
    make(tmp_path, tokenizer_config={}, generation_config={"eos_token_id": "x"})
    with pytest.raises(CheckpointError, match="eos_token_id must be an id"):
        tokenizer_from_folder(tmp_path)
