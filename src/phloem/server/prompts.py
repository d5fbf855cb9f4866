"""From what a client sends as a prompt to token ids: forms of `prompt`, length checks, tokenising off the event loop.

Owns the border between text and ids. Must not know sampling or streaming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phloem.errors import ContextLengthError, InvalidRequestError
from phloem.server.context import ServerContext
from phloem.server.engine_api import Engine, Tokenizer
from phloem.types import Int32Array

MAX_PROMPTS = 1024
_MAX_BYTES_PER_TOKEN = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and its text where the client gave one."""

    token_ids: Int32Array
    text: str | None = None

    def as_text(self, tokenizer: Tokenizer) -> str:
        """The text that `echo` repeats."""
        return self.text if self.text is not None else tokenizer.decode(self.token_ids.tolist(), False)


def split_prompts(prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """Check the four forms (text, texts, ids, lists of ids) and return a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequestError(
            f"{param} must be a text, a list of texts, a list of token ids or a list of such lists, not empty",
            param=param,
        )
    if isinstance(prompt[0], int):
        _check_ids(prompt, param)
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"{param} may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", param=param)
    for position, item in enumerate(prompt):
        if isinstance(item, list):
            _check_ids(item, f"{param}[{position}]")
        elif not isinstance(item, str):
            name = f"{param}[{position}]"
            raise InvalidRequestError(f"{name} must be a text or a list of token ids", param=name)
    return prompt


def _check_ids(ids: list[Any], param: str) -> None:
    if not ids:
        raise InvalidRequestError(f"{param} is empty: at least one token is needed", param=param)
    if not all(type(item) is int for item in ids):
        raise InvalidRequestError(f"{param} must hold token ids (integers) only", param=param)


async def encode_prompts(
    context: ServerContext, prompts: list[str | list[int]], *, add_special: bool = True, param: str = "prompt"
) -> list[Prompt]:
    """Tokenise on the pool. Raises ContextLengthError before tokenising what cannot fit anyway."""
    engine = context.engine
    for prompt in prompts:
        check_length(engine, prompt, param)

    def encode_all() -> list[Prompt]:
        return [encode_one(engine, prompt, add_special=add_special, param=param) for prompt in prompts]

    return await context.in_pool(encode_all)


def encode_one(engine: Engine, prompt: str | list[int], *, add_special: bool, param: str) -> Prompt:
    """One prompt to ids. Blocks; raises InvalidRequestError for an empty one or ids outside the vocabulary."""
    if isinstance(prompt, str):
        ids = engine.tokenizer.encode(prompt, add_special)
        text: str | None = prompt
    else:
        ids, text = prompt, None
        if not 0 <= min(ids) <= max(ids) < engine.vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequestError(
                f"token id {bad} is outside the vocabulary (0 to {engine.vocab_size - 1})", param=param
            )
    if not ids:
        raise InvalidRequestError("the prompt is empty: at least one token is needed", param=param)
    return Prompt(np.array(ids, dtype=np.int32), text)


def check_length(engine: Engine, prompt: str | list[int], param: str = "prompt") -> None:
    """Refuse what is longer than any prompt that fits, without tokenising it."""
    limit = engine.max_model_len
    if isinstance(prompt, str):
        if len(prompt) > limit * _MAX_BYTES_PER_TOKEN:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} characters, more than any text of {limit} tokens, which is the context "
                "length; shorten the prompt",
                param=param,
            )
    elif len(prompt) > limit:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, and the context length is {limit} tokens; shorten the prompt",
            param=param,
        )
