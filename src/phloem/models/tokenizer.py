"""Tokenizer: text to token ids and back, chat messages to a prompt, and the ids that end a turn.

Owns how a tokeniser is loaded from a Hugging Face-format folder or GGUF metadata. Must not know models or HTTP, and
needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from phloem.errors import CheckpointError, InvalidRequestError
from phloem.models.chat_template import ChatTemplate
from phloem.models.tokenizer_gguf import build_vocabulary, special_id
from phloem.types import Int32Array

_SPACE = "▁"
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokeniser. Safe to use from several threads; encoding releases the GIL.

    `prefix` and `suffix` are the ids that `encode` puts around a text (BOS, EOS). `eos_ids` is the union of what all
    sources name: the tokeniser, generation_config, config, and what the chat template writes after an answer.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        prefix: tuple[int, ...] = (),
        suffix: tuple[int, ...] = (),
        eos_ids: frozenset[int] = frozenset(),
        template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._decoding = _decoding(backend)
        self.prefix = prefix
        self.suffix = suffix
        self.template = template or ChatTemplate({}, {})
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), max(self._added, default=-1) + 1)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.eos_ids = eos_ids | self._turn_end()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special` puts BOS in front (and EOS behind) where the model wants it, but never a second BOS.
        """
        # The call for batches, since it alone lets other threads run meanwhile: a long text takes seconds.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special:
            return ids
        start = () if tuple(ids[: len(self.prefix)]) == self.prefix else self.prefix
        return [*start, *ids, *self.suffix]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD."""
        text: str = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token stands for inside a text: parts of a character, if need be. Empty if unknown."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_id(self, text: str) -> int | None:
        """Id of the token that is written `text` in the vocabulary."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The chat as the model's template writes it; see `ChatTemplate.render`."""
        return self.template.render(messages, tools, add_generation_prompt, **kwargs)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Int32Array:
        """Token ids (int32) of the rendered chat. The template writes BOS if the model wants it: none is added."""
        text = self.render_chat(messages, tools, add_generation_prompt, **kwargs)
        return np.array(self.encode(text, add_special=False), np.int32)

    @cached_property
    def _bytes(self) -> list[bytes]:
        tokens = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * self.vocab_size
        for text, i in tokens.items():
            table[i] = text.encode() if i in self._added else _to_bytes(text, self._decoding)
        return table

    def _turn_end(self) -> frozenset[int]:
        """The special token that the chat template writes right after an answer: it ends the model's turn."""
        probe = "turn-end-probe"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": probe}]
        try:
            tail = self.render_chat(messages, add_generation_prompt=False).rpartition(probe)[2].lstrip()
        except InvalidRequestError:  # no template, or one that wants other messages
            return frozenset()
        found = (i for i in self.special_ids if tail.startswith(self._added[i].content))
        best = max(found, key=lambda i: len(self._added[i].content), default=None)
        return frozenset() if best is None else frozenset((best,))


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str, chat_template: str | None = None) -> Tokenizer:
    """Build the tokeniser of a GGUF file; `chat_template` replaces the file's own.

    Raises CheckpointError as `build_vocabulary` does.
    """
    vocabulary = build_vocabulary(metadata, source)
    tokens = vocabulary.tokens
    ids = {
        name: special_id(metadata, name, len(tokens), source)
        for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
    }
    prefix = "tokenizer.chat_template"
    sources = {
        key.removeprefix(prefix).lstrip(".") or "default": metadata[key] for key in metadata if key.startswith(prefix)
    }
    variables = (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))
    special = {name: tokens[token_id] for name, key in variables if (token_id := ids[key]) is not None}
    sources = {name: text for name, text in sources.items() if isinstance(text, str)}
    return Tokenizer(
        vocabulary.backend,
        prefix=vocabulary.prefix,
        suffix=vocabulary.suffix,
        eos_ids=frozenset(i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None),
        template=ChatTemplate({"default": chat_template} if chat_template else sources, special),
    )


def tokenizer_from_folder(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """Load tokenizer.json and the files beside it; `chat_template` replaces the folder's own.

    Raises CheckpointError naming the file that is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder.name}/tokenizer.json is missing (slow-tokenizer files alone are not served)")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{folder.name}/tokenizer.json is damaged: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    config = read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
    prefix, suffix = _surroundings(backend)
    prefix = _flagged(backend, prefix, config.get("add_bos_token"), special.get("bos_token"))
    suffix = _flagged(backend, suffix, config.get("add_eos_token"), special.get("eos_token"))
    sources = {"default": chat_template} if chat_template else _template_sources(folder, config)
    return Tokenizer(
        backend,
        prefix=prefix,
        suffix=suffix,
        eos_ids=_folder_eos_ids(folder, backend, special),
        template=ChatTemplate(sources, special),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if there is no such file; CheckpointError if it is broken."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.parent.name}/{path.name} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any], token_map: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens as text; they may be written as text or as an object with `content`."""
    special = {}
    for name in _TOKEN_NAMES:
        value = config.get(name) or token_map.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special


def _surroundings(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _flagged(backend: Backend, present: tuple[int, ...], flag: Any, token: str | None) -> tuple[int, ...]:
    """Let add_bos_token or add_eos_token, where it is set, outrank the post-processor."""
    token_id = None if token is None else backend.token_to_id(token)
    if flag is False and present == (token_id,):
        return ()
    if flag is True and not present and token_id is not None:
        return (token_id,)
    return present


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from .jinja files before tokenizer_config.json."""
    sources: dict[str, str] = {}
    listed = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        sources |= {item["name"]: item["template"] for item in listed if isinstance(item, dict) and len(item) >= 2}
    elif isinstance(listed, dict):
        sources |= {str(name): str(text) for name, text in listed.items()}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        if path.is_file():
            sources[name] = path.read_text("utf-8")
    return sources


def _folder_eos_ids(folder: Path, backend: Backend, special: Mapping[str, str]) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        if not all(item is None or (isinstance(item, int) and item >= 0) for item in listed):
            raise CheckpointError(f"{folder.name}/{name}: eos_token_id must be an id or a list of ids, got {value!r}")
        ids.update(item for item in listed if item is not None)
    if "eos_token" in special:
        token_id = backend.token_to_id(special["eos_token"])
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def _decoding(backend: Backend) -> str:
    """How the backend spells bytes: `bytes` (GPT-2's alphabet), `pieces` (SentencePiece) or `text`."""
    described = backend.decoder.__getstate__().decode() if backend.decoder is not None else ""
    if '"ByteLevel"' in described:
        return "bytes"
    return "pieces" if '"ByteFallback"' in described or '"Metaspace"' in described or _SPACE in described else "text"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _to_bytes(text: str, decoding: str) -> bytes:
    if decoding == "bytes":
        try:
            return bytes(_ALPHABET[character] for character in text)
        except KeyError:  # an entry that is not spelt in the alphabet stands for itself
            return text.encode()
    if decoding == "pieces":
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes((int(text[3:5], 16),))
        return text.replace(_SPACE, " ").encode()
    return text.encode()
