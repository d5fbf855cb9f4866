"""What a program asks of a model, and how an engine in this process answers it.

Owns the protocol and the token ids that a state keeps after an answer. Must not know states or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from phloem.engine import generation
from phloem.engine.async_engine import AsyncEngine
from phloem.engine.generation import GeneratedSequence, Score, Usage
from phloem.types import DEFAULT_NAMESPACE, FinishReason, Namespace, SamplingParams

Message = dict[str, Any]


class Backend(Protocol):
    """A model that continues and scores token ids. Methods raise PhloemError and its kinds."""

    async def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of a piece of text; `add_special` puts BOS in front where the model wants it."""

    async def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """Text of token ids."""

    async def render_chat(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The messages as the model's chat template writes them."""

    async def generate(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[GeneratedSequence, Usage]:
        """One continuation, whole."""

    async def score(
        self, token_ids: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> tuple[list[Score], Usage]:
        """Logprobs of each continuation; neither it nor `token_ids` is empty."""

    async def close(self) -> None:
        """Free what the backend itself opened."""


class EngineBackend:
    """An engine in this process. `share` False gives each call a cache of its own, to see what sharing saves."""

    def __init__(self, engine: AsyncEngine, *, share: bool = True) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._share = share

    async def encode(self, text: str, add_special: bool) -> list[int]:
        """In a thread, since a long text takes a while."""
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special)

    async def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """As the stream's detokeniser does it: bytes that form no character become U+FFFD."""
        hidden = self._tokenizer.special_ids if skip_special else frozenset()
        data = b"".join(self._tokenizer.token_bytes(i) for i in token_ids if i not in hidden)
        return data.decode("utf-8", "replace")

    async def render_chat(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self._tokenizer.render_chat(messages, None, add_generation_prompt)

    async def generate(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[GeneratedSequence, Usage]:
        found = await self._engine.generate(np.array(token_ids, dtype=np.int32), params, namespace=self._namespace())
        return found.sequences[0], found.usage

    async def score(
        self, token_ids: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> tuple[list[Score], Usage]:
        if self._share:
            return await generation.score(self._engine, token_ids, continuations, namespace=DEFAULT_NAMESPACE)
        each = await generation.gather_or_cancel(
            generation.score(self._engine, token_ids, [one], namespace=self._namespace()) for one in continuations
        )
        usage = Usage()
        for _, cost in each:
            usage = usage.plus(cost)
        return [scores[0] for scores, _ in each], usage

    async def close(self) -> None:
        """The engine belongs to the caller."""

    def _namespace(self) -> Namespace:
        return DEFAULT_NAMESPACE if self._share else Namespace(cache_salt=uuid4().hex)


async def kept_ids(backend: Backend, sequence: GeneratedSequence, params: SamplingParams) -> list[int]:
    """The ids that a state goes on with: those of the text it keeps.

    The tokens drawn, without the end-of-text or stop token. Where a stop string ended the answer inside a token, the
    tokens before that one stay as drawn and what is left of its text is encoded anew.
    """
    ids = list(sequence.token_ids)
    if sequence.finish_reason is not FinishReason.STOP or params.include_stop:
        return ids
    if not isinstance(sequence.stop_reason, str):
        return ids[:-1]
    for length in range(len(ids) - 1, 0, -1):
        head = await backend.decode(ids[:length], params.skip_special_tokens)
        if sequence.text.startswith(head):
            break
    else:
        length, head = 0, ""
    rest = sequence.text[len(head) :]
    return ids[:length] + (await backend.encode(rest, False) if rest else [])
