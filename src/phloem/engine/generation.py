"""Whole generations: prompts of any form in, finished sequences out; batches, best-of, fork and score.

Owns the records Handle, Generation and Score and the pacing of batches. Must not know threads, HTTP or the scheduler:
it needs an engine that checks and takes requests and gives a stream for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar
from uuid import uuid4

import numpy as np

from phloem.engine.output import RequestOutput
from phloem.errors import InvalidRequestError, PhloemError, QueueFullError
from phloem.models.tokenizer import Tokenizer
from phloem.types import (
    FinishReason,
    Int32Array,
    Namespace,
    Request,
    SamplingParams,
    TextDelta,
    TokenLogprob,
)

T = TypeVar("T")

_QUEUE_FULL_RETRY_S = 0.05


class Handle(NamedTuple):
    """A place in the tree: the tokens that lead to it, in their namespace.

    It holds no memory. What is continued from it reuses the K/V that is still cached and recomputes what is not.
    """

    namespace: Namespace
    token_ids: Int32Array


Prompt = str | Sequence[int] | Int32Array | Sequence[Mapping[str, Any]] | Handle
"""A text, token ids, the messages of a chat, or a handle of something generated before."""


DEFAULT_PARAMS = SamplingParams()
"""Sampling when none is given: temperature 1, up to the end of the text or of the context."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; see `AsyncEngine.generate` for their meaning and defaults."""

    n: int
    best_of: int | None
    namespace: Namespace
    priority: int
    progress: bool


class Usage(NamedTuple):
    """Tokens of one or more sequences. Without a cache, `num_prompt_tokens` rows would have been prefilled."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were prefilled."""
        return self.num_prompt_tokens - self.num_cached_tokens

    def plus(self, other: Usage) -> Usage:
        """The sum of both."""
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One continuation of a prompt.

    `token_ids` are all tokens drawn, the stop token or those of the stop string included; `text` leaves those out
    (unless `include_stop`). `error` is set when, and only when, `finish_reason` is `error`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    error: PhloemError | None = None

    @property
    def mean_logprob(self) -> float | None:
        """Mean logprob of the tokens; None unless logprobs were asked for and a token was drawn."""
        return sum(item.logprob for item in self.logprobs) / len(self.logprobs) if self.logprobs else None


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt: its sequences, in order of index, or best first where `best_of` was given."""

    namespace: Namespace
    prompt_token_ids: Int32Array
    sequences: tuple[GeneratedSequence, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def error(self) -> PhloemError | None:
        """The first error of a sequence; None when all ended well."""
        return next((sequence.error for sequence in self.sequences if sequence.error is not None), None)

    def handle(self, index: int = 0) -> Handle:
        """The place after the last token of a sequence, to `fork` from."""
        return _handle(self.namespace, self.prompt_token_ids, self.sequences[index].token_ids)


@dataclass(frozen=True, slots=True)
class Score:
    """Logprobs of a continuation, token by token, under the model's own distribution."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Logprob of the whole continuation."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """Logprob per token: comparable between continuations of different length."""
        return sum(self.logprobs) / len(self.logprobs)


class NewsStream(Protocol):
    """News of one request, and what it has said so far."""

    output: RequestOutput

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    async def __anext__(self) -> TextDelta: ...

    def abort(self) -> None: ...

    async def aclose(self) -> None: ...


class RequestEngine(Protocol):
    """What this module asks of an engine; `AsyncEngine` fulfils it."""

    tokenizer: Tokenizer

    @property
    def max_queued(self) -> int: ...

    def check(self, request: Request) -> Request: ...

    async def submit(self, request: Request) -> NewsStream: ...


class GenerationStream(AsyncIterator[TextDelta]):
    """News of one prompt's sequences as they come, and the whole of it at the end.

    Close it (`async with aclosing(stream)`): closing early aborts what still runs.
    """

    def __init__(self, stream: NewsStream) -> None:
        self._stream = stream
        self._request = stream.output.request
        self._deltas: list[list[TextDelta]] = [[] for _ in range(self._request.n)]

    async def __anext__(self) -> TextDelta:
        delta = await self._stream.__anext__()
        self._deltas[delta.index].append(delta)
        return delta

    def abort(self) -> None:
        """Abort the sequences that still run. Idempotent; to be called on the event loop."""
        self._stream.abort()

    async def aclose(self) -> None:
        """The same, for `aclosing`."""
        self.abort()

    def handle(self, index: int = 0) -> Handle:
        """The place that a sequence has reached, while it runs or after its end."""
        token_ids = [token_id for delta in self._deltas[index] for token_id in delta.token_ids]
        return _handle(self._request.namespace, self._request.prompt, token_ids)

    async def result(self) -> Generation:
        """Read to the end and return the whole generation."""
        async for _ in self:
            pass
        sequences = tuple(_sequence(deltas) for deltas in self._deltas)
        usage = Usage()
        for sequence in sequences:
            usage = usage.plus(Usage(len(self._request.prompt), sequence.cached_tokens, len(sequence.token_ids)))
        return Generation(self._request.namespace, self._request.prompt, sequences, usage)


async def open_stream(
    engine: RequestEngine, prompt: Prompt, params: SamplingParams, *, n: int, namespace: Namespace, priority: int
) -> GenerationStream:
    """Queue one prompt and return its stream. Waits while the queue is full; raises InvalidRequestError."""
    request = engine.check(make_request(engine.tokenizer, prompt, params, n=n, namespace=namespace, priority=priority))
    return GenerationStream(await _submit(engine, request))


async def generate(
    engine: RequestEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    n: int,
    best_of: int | None,
    namespace: Namespace,
    priority: int,
    progress: bool,
) -> list[Generation]:
    """All generations, in the order of the prompts.

    Every prompt is checked before any is queued, so InvalidRequestError leaves nothing half done. A sequence that
    fails later carries its error, and the others go on.
    """
    num_drawn = n if best_of is None else best_of
    if num_drawn < n:
        raise InvalidRequestError(f"best_of must be at least n ({n}), got {best_of}", param="best_of")
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequestError(f"expected one params for each of {len(prompts)} prompts, got {len(each)}")
    requests = []
    for prompt, own in zip(prompts, each, strict=True):
        drawn = own if best_of is None or own.logprobs is not None else replace(own, logprobs=0)
        request = make_request(engine.tokenizer, prompt, drawn, n=num_drawn, namespace=namespace, priority=priority)
        requests.append(engine.check(request))

    async def run(request: Request, own: SamplingParams) -> Generation:
        generation = await _run(engine, request)
        return generation if best_of is None else _best(generation, n, keep_logprobs=own.logprobs is not None)

    jobs = [run(request, own) for request, own in zip(requests, each, strict=True)]
    return await _paced(engine, jobs, num_drawn, progress)


async def score(
    engine: RequestEngine,
    prompt: Prompt,
    continuations: Sequence[str | Sequence[int]],
    *,
    namespace: Namespace,
    priority: int = 0,
) -> tuple[list[Score], Usage]:
    """Logprobs of each continuation after the prompt, and what it cost.

    A continuation is tokenised by itself and its ids put after the prompt's. The prompt is computed at most once, and
    not at all where it is cached; then each continuation costs as many rows as it has tokens, and one.
    """
    head = prompt_ids(engine.tokenizer, prompt)
    if not len(head):
        raise InvalidRequestError("the prompt is empty: at least one token is needed", param="prompt")
    if isinstance(prompt, Handle):
        namespace = prompt.namespace
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, seed=0)
    requests = []
    for continuation in continuations:
        ids = engine.tokenizer.encode(continuation, False) if isinstance(continuation, str) else continuation
        if not len(ids):
            raise InvalidRequestError("a continuation is empty: at least one token is needed", param="continuations")
        request = Request(
            request_id=f"score-{uuid4().hex}",
            prompt=np.concatenate([head, np.asarray(ids, dtype=np.int32)]),
            params=params,
            namespace=namespace,
            priority=priority,
            score_from=len(head),
        )
        requests.append(engine.check(request))
    results = await _paced(engine, [_run_score(engine, request) for request in requests], 1, False)
    usage = Usage()
    for _, cost in results:
        usage = usage.plus(cost)
    return [item for item, _ in results], usage


def make_request(
    tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams, *, n: int, namespace: Namespace, priority: int
) -> Request:
    """An engine request with a fresh id; a handle brings its own namespace."""
    return Request(
        request_id=f"gen-{uuid4().hex}",
        prompt=prompt_ids(tokenizer, prompt),
        params=params,
        namespace=prompt.namespace if isinstance(prompt, Handle) else namespace,
        n=n,
        priority=priority,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=tokenizer.eos_ids,
    )


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> Int32Array:
    """Token ids (int32) of a prompt of any form. Raises InvalidRequestError where the chat template refuses it."""
    if isinstance(prompt, Handle):
        return prompt.token_ids
    if isinstance(prompt, str):
        return np.array(tokenizer.encode(prompt), dtype=np.int32)
    if len(prompt) and isinstance(prompt[0], Mapping):
        text = tokenizer.render_chat([dict(message) for message in prompt if isinstance(message, Mapping)])
        return np.array(tokenizer.encode(text, False), dtype=np.int32)
    try:
        return np.asarray(prompt, dtype=np.int32)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(
            "a prompt must be a text, a list of token ids, a list of chat messages or a handle", param="prompt"
        ) from None


def extend(tokenizer: Tokenizer, handle: Handle, text: str) -> Handle:
    """The place after `text`, which is tokenised by itself: the ids before it stay as they are."""
    ids = np.array(tokenizer.encode(text, False), dtype=np.int32) if text else np.empty(0, dtype=np.int32)
    return Handle(handle.namespace, np.concatenate([handle.token_ids, ids]))


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """True for one prompt, False for a list of them."""
    if isinstance(prompts, str | Handle):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)


async def gather_or_cancel(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all jobs, in order. When one raises, the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _paced(engine: RequestEngine, jobs: Sequence[Coroutine[Any, Any, T]], n: int, progress: bool) -> list[T]:
    """Run jobs of n sequences each; at most half of the engine's queue is taken, so that others get in."""
    window = asyncio.Semaphore(max(1, engine.max_queued // (2 * n)))

    with _progress_bar(len(jobs), progress) as advance:

        async def paced(job: Coroutine[Any, Any, T]) -> T:
            async with window:
                result = await job
            advance()
            return result

        try:
            return await gather_or_cancel(paced(job) for job in jobs)
        finally:
            for job in jobs:
                job.close()


async def _submit(engine: RequestEngine, request: Request) -> NewsStream:
    while True:
        try:
            return await engine.submit(request)
        except QueueFullError:
            if request.n > engine.max_queued:
                raise
            await asyncio.sleep(_QUEUE_FULL_RETRY_S)


async def _run(engine: RequestEngine, request: Request) -> Generation:
    async with aclosing(GenerationStream(await _submit(engine, request))) as stream:
        return await stream.result()


async def _run_score(engine: RequestEngine, request: Request) -> tuple[Score, Usage]:
    found: list[TokenLogprob] = []
    cached = 0
    async with aclosing(await _submit(engine, request)) as stream:
        async for delta in stream:
            if delta.error is not None:
                raise delta.error
            cached = delta.cached_tokens
            found += [item for item in delta.prompt_logprobs or () if item is not None]
    ids = request.prompt[request.score_from :]
    if len(found) != len(ids):
        raise PhloemError(f"the request was aborted: {len(found)} of {len(ids)} tokens were scored")
    score = Score(tuple(ids.tolist()), tuple(item.logprob for item in found))
    return score, Usage(len(request.prompt), cached, 0)


def _sequence(deltas: list[TextDelta]) -> GeneratedSequence:
    """Join the news of one sequence; tokens that came after a stop string are left out."""
    last = deltas[-1]
    assert last.finish_reason is not None
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)[: last.num_output_tokens]
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(item for delta in deltas for item in delta.logprobs or ())[: len(token_ids)]
    return GeneratedSequence(
        text="".join(delta.text for delta in deltas),
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        cached_tokens=last.cached_tokens,
        error=last.error,
    )


def _best(generation: Generation, n: int, *, keep_logprobs: bool) -> Generation:
    """The n sequences of highest mean logprob, best first; ties by index, failed ones last."""

    def rank(sequence: GeneratedSequence) -> tuple[bool, float]:
        mean = sequence.mean_logprob
        return sequence.error is not None or mean is None, -(mean or 0.0)

    best = sorted(generation.sequences, key=rank)[:n]
    if not keep_logprobs:
        best = [replace(sequence, logprobs=None) for sequence in best]
    return replace(generation, sequences=tuple(best))


def _handle(namespace: Namespace, prompt: Int32Array, token_ids: Sequence[int]) -> Handle:
    return Handle(namespace, np.concatenate([prompt, np.array(token_ids, dtype=np.int32)]))


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on standard error that the yielded function moves by one."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
