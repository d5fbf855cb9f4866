"""Running engine requests for a route: submit several as one, merge their news, collect whole answers, count usage.

Owns the life of the streams: whatever happens, each is closed. Must not know any route's JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from phloem.engine.grammar import GrammarMasker
from phloem.errors import EngineUnavailableError, InvalidRequestError, PhloemError
from phloem.server.client_names import Names, client_names
from phloem.server.context import ServerContext
from phloem.server.engine_api import Stream
from phloem.types import FinishReason, Float32Array, Request, TextDelta, TokenLogprob

_MERGE_BUFFER = 64


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request. A prompt that several choices share counts once."""

    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    _prompts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def count(self, delta: TextDelta) -> None:
        """Take a delta into account; deltas of one sequence may come in any number."""
        self.completion_tokens += len(delta.token_ids)
        if delta.num_prompt_tokens and (delta.index == 0 or delta.request_id not in self._prompts):
            self._prompts[delta.request_id] = (delta.num_prompt_tokens, delta.cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(cached for _, cached in self._prompts.values())

    def as_openai(self) -> dict[str, Any]:
        """The `usage` object of the OpenAI API."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(slots=True)
class Answer:
    """One whole sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    embedding: Float32Array | None = None


class Generation:
    """Engine requests that answer one HTTP request. Choice number = position of its request x n + its index.

    `names` are what the client calls the fields that the engine's checks may find wrong.
    """

    def __init__(
        self, context: ServerContext, job_id: str, requests: Sequence[Request], names: Names | None = None
    ) -> None:
        self._context = context
        self._names = names or {}
        self._job_id = job_id
        self._clock = context.metrics.clock(sum(request.n for request in requests))
        self.requests = list(requests)
        self.usage = Usage()
        self._positions = {request.request_id: position for position, request in enumerate(requests)}
        self._streams: list[Stream] = []

    @property
    def num_choices(self) -> int:
        return sum(request.n for request in self.requests)

    async def start(self) -> None:
        """Submit all requests, or none of them: errors come from here, before anything was answered."""
        engine = self._context.engine
        try:
            with client_names(self._names):
                for request in self.requests:
                    self._streams.append(await engine.submit(request))
        except BaseException:
            await self.close()
            raise
        self._context.jobs[self._job_id] = tuple(request.request_id for request in self.requests)

    async def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._context.jobs.pop(self._job_id, None)
        for stream in self._streams:
            await stream.aclose()

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """(choice, delta) as they come. Raises the error of a sequence that failed; closes all streams at its end."""
        try:
            source = self._merged() if len(self._streams) > 1 else self._single()
            async with aclosing(source) as items:
                async for delta in items:
                    raise_failure(delta)
                    self.usage.count(delta)
                    position = self._positions[delta.request_id]
                    raise_grammar_failure(self.requests[position], delta)
                    choice = position * self.requests[position].n + delta.index
                    self._clock.tick(choice, delta)
                    yield choice, delta
        finally:
            await self.close()

    async def _single(self) -> AsyncGenerator[TextDelta, None]:
        async for delta in self._streams[0]:
            yield delta

    async def _merged(self) -> AsyncGenerator[TextDelta, None]:
        """News of all streams through one bounded queue, so that a slow reader holds back all of them."""
        news: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue(_MERGE_BUFFER)

        async def pump(stream: Stream) -> None:
            try:
                async for delta in stream:
                    await news.put(delta)
            except Exception as error:
                await news.put(error)
            else:
                await news.put(None)

        tasks = [asyncio.create_task(pump(stream)) for stream in self._streams]
        try:
            remaining = len(tasks)
            while remaining:
                item = await news.get()
                if item is None:
                    remaining -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def collect(self) -> list[Answer]:
        """All choices, whole."""
        answers = [Answer() for _ in range(self.num_choices)]
        pieces: list[list[str]] = [[] for _ in answers]
        async with aclosing(self.deltas()) as items:
            async for choice, delta in items:
                extend(answers[choice], delta)
                pieces[choice].append(delta.text)
        for answer, texts in zip(answers, pieces, strict=True):
            answer.text = "".join(texts)
        return answers


def extend(answer: Answer, delta: TextDelta) -> None:
    """Add all of a delta but its text to an answer."""
    answer.token_ids += delta.token_ids
    answer.logprobs += delta.logprobs or ()
    answer.prompt_logprobs += delta.prompt_logprobs or ()
    answer.num_prompt_tokens = delta.num_prompt_tokens or answer.num_prompt_tokens
    answer.cached_tokens = delta.cached_tokens or answer.cached_tokens
    if delta.finish_reason is not None:
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        answer.embedding = delta.embedding


def raise_failure(delta: TextDelta) -> None:
    """Raise what a sequence failed with; an abort from outside is an error for the one who waits."""
    if delta.error is not None:
        raise delta.error
    if delta.finish_reason is FinishReason.ERROR:
        raise PhloemError("the request failed")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineUnavailableError("the request was aborted by an operator")


def raise_grammar_failure(request: Request, delta: TextDelta) -> None:
    """Raise where a sequence ended because its grammar became too complex while it ran."""
    if delta.finish_reason is FinishReason.STOP and request.masker:
        masker = request.masker[delta.index]
        if isinstance(masker, GrammarMasker) and masker.error:
            raise InvalidRequestError(f"the grammar of the answer became too complex: {masker.error}")
