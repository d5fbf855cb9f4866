"""Logprobs in the two shapes of the OpenAI API: rich entries for chat, parallel lists for plain completions.

Owns how a token is written in JSON. Numbers are finite: nothing below FLOOR is reported as less.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from phloem.server.engine_api import Tokenizer
from phloem.types import TokenLogprob

FLOOR = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """The `logprobs` member of a chat choice."""
    return {"content": [_chat_entry(tokenizer, entry, num_top) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> dict[str, Any]:
    top = [_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top[:num_top]]
    return {**_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(float(logprob), FLOOR)


class CompletionLogprobs:
    """Builds the parallel lists of one choice, in one go or chunk by chunk: text offsets run through."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprob | None], first_id: int = -1) -> dict[str, Any]:
        """Lists for the next tokens. None is the first prompt token, `first_id`, which has no logprob."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token_id = first_id if entry is None else entry.token_id
            data = self._tokenizer.token_bytes(token_id)
            lists["tokens"].append(spell(data))
            lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return lists

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives, and always the chosen token."""
        pairs = [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]
        return {spell(self._tokenizer.token_bytes(token_id)): finite(logprob) for token_id, logprob in pairs}


def spell(data: bytes) -> str:
    """A token's text; one that is no whole text is written as its bytes, so that no two tokens look alike."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
