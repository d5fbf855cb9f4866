"""The ideal: how many prompt tokens a token-level cache of unlimited size would have reused.

Owns a plain radix set of token ids, written apart from the engine's own tree so that it can judge it. Must not know
servers; token ids come from the served model's tokeniser and chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from phloem.bench.client import OpenAIClient, ServerError
from phloem.bench.jobs import Exchange, Job
from phloem.models.load import load_model
from phloem.models.tokenizer import Tokenizer
from phloem.types import Int32Array


class PrefixSet:
    """All prefixes of the sequences added so far. Matching and adding cost O(length)."""

    def __init__(self) -> None:
        self._key: Int32Array = np.empty(0, np.int32)
        self._children: dict[int, PrefixSet] = {}

    def match(self, ids: Int32Array) -> int:
        """Length of the longest prefix of `ids` that is in the set."""
        node, done = self, 0
        while done < len(ids):
            child = node._children.get(int(ids[done]))
            if child is None:
                break
            common = _common(child._key, ids[done:])
            done += common
            if common < len(child._key):
                break
            node = child
        return done

    def add(self, ids: Int32Array) -> None:
        """Put every prefix of `ids` into the set."""
        node = self
        while len(ids):
            first = int(ids[0])
            child = node._children.get(first)
            if child is None:
                child = node._children[first] = PrefixSet()
                child._key = ids
                return
            common = _common(child._key, ids)
            if common < len(child._key):
                upper = node._children[first] = PrefixSet()
                upper._key, child._key = child._key[:common], child._key[common:]
                upper._children[int(child._key[0])] = child
                child = upper
            node, ids = child, ids[common:]


def _common(a: Int32Array, b: Int32Array) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class Encoder(Protocol):
    """The served model's tokeniser."""

    async def prompt_ids(self, job: Job) -> Int32Array:
        """Token ids of a job's prompt, chat template applied."""

    async def answer_ids(self, text: str) -> Int32Array:
        """Token ids of an answer."""


async def fill_ideal(exchanges: Sequence[Exchange], encoder: Encoder) -> int:
    """Set `ideal_tokens` of each record that succeeded: what was sent or answered before it was sent can be reused.

    A prompt counts from the moment it is sent (requests may share work that is still under way), an answer from its
    end. The last token of a prompt is always computed, and the last token of an answer never is. An answer is encoded
    from its text, so the ideal supposes that the text gives back the tokens that were drawn. Returns the number of
    prompt tokens by this encoder: where it differs from the server's own count, the ideal is off by as much.
    """
    done = [exchange for exchange in exchanges if not exchange.record.error]
    prompts = [await encoder.prompt_ids(exchange.job) for exchange in done]
    answers = [await encoder.answer_ids(exchange.text) for exchange in done]
    events = [(exchange.record.sent_s, 0, i) for i, exchange in enumerate(done)]
    events += [(exchange.record.end_s, 1, i) for i, exchange in enumerate(done)]
    known = PrefixSet()
    for _, is_end, index in sorted(events):
        ids = prompts[index]
        if is_end:
            known.add(np.concatenate([ids, answers[index][:-1]]))
        else:
            done[index].record.ideal_tokens = min(known.match(ids), len(ids) - 1)
            known.add(ids)
    return sum(map(len, prompts))


class ModelEncoder:
    """Encodes with a tokeniser in this process, as the engine that serves the model does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model: Path) -> ModelEncoder:
        """The tokeniser of a .gguf file or a Hugging Face-format folder. Raises CheckpointError."""
        return cls(load_model(model).tokenizer)

    async def prompt_ids(self, job: Job) -> Int32Array:
        if job.messages:
            return self._tokenizer.apply_chat_template(job.messages)
        return np.array(self._tokenizer.encode(job.prompt), np.int32)

    async def answer_ids(self, text: str) -> Int32Array:
        return np.array(self._tokenizer.encode(text, add_special=False), np.int32)


class ServerEncoder:
    """Asks the server's `/tokenize` route, which vLLM and phloem have. Raises ServerError where it does not answer."""

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client

    async def prompt_ids(self, job: Job) -> Int32Array:
        if job.messages:
            return await self._ids({"messages": job.messages, "add_generation_prompt": True})
        return await self._ids({"prompt": job.prompt})

    async def answer_ids(self, text: str) -> Int32Array:
        return await self._ids({"prompt": text, "add_special_tokens": False})

    async def _ids(self, body: dict[str, object]) -> Int32Array:
        answer = await self._client.call("POST", "/tokenize", {"model": self._client.model, **body})
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not ids:
            raise ServerError(f"{self._client.url} has no /tokenize route that takes messages; give --tokenizer")
        return np.array(ids, np.int32)
