"""AsyncEngine: the engine as a coroutine sees it. Requests go in, text comes out.

Owns the open streams, on the event loop. Must not know HTTP, nor touch what the engine thread owns but by commands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Literal, Unpack, cast, overload

from phloem.config import EngineConfig
from phloem.engine import generation
from phloem.engine.admission import check_request
from phloem.engine.core import EngineCore
from phloem.engine.generation import (
    DEFAULT_PARAMS,
    GenerateOptions,
    Generation,
    GenerationStream,
    Handle,
    Prompt,
    Score,
)
from phloem.engine.loading import EngineParts, load_parts
from phloem.engine.output import RequestOutput
from phloem.errors import InvalidRequestError, PhloemError
from phloem.types import DEFAULT_NAMESPACE, FinishReason, Namespace, Request, SamplingParams, TextDelta, TokenDelta

State = Literal["loading", "ready", "draining", "stopped", "failed"]


class TextStream(AsyncIterator[TextDelta]):
    """News of one request. Ends after each sequence had its terminal answer.

    Whoever reads it closes it (`async with aclosing(stream)`): closing it early aborts the request. Cancelling a wait
    for the next item loses nothing, so a reader may wait with a time limit.
    """

    def __init__(self, engine: AsyncEngine, output: RequestOutput) -> None:
        self._engine = engine
        self.output = output
        self.news: asyncio.Queue[TextDelta] = asyncio.Queue()

    async def __anext__(self) -> TextDelta:
        if self.output.finished and self.news.empty():
            raise StopAsyncIteration
        return await self.news.get()

    def abort(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        self._engine.forget(self.output.request.request_id)

    async def aclose(self) -> None:
        """The same, for `aclosing`."""
        self.abort()


class AsyncEngine:
    """Serves requests from coroutines of one event loop."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.tokenizer = parts.tokenizer
        self.model_name = parts.model_name
        self.max_model_len = parts.scheduler.max_model_len
        self._kv_tokens = parts.scheduler.manager.num_slots
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, TextStream] = {}
        self._core = EngineCore(parts.scheduler, parts.runner, self._deliver, self._on_failure)
        self._core.start()

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[str, float], None] | None = None) -> AsyncEngine:
        """Load the model and start the engine thread. Blocks; raises StartupError."""
        return cls(load_parts(config, progress))

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one token."""
        return min(self.max_model_len - 1, self._kv_tokens)

    @property
    def max_queued(self) -> int:
        """Most sequences that may wait."""
        return self._parts.scheduler.max_waiting

    @property
    def vocab_size(self) -> int:
        return self._parts.runner.vocab_size

    def describe(self) -> dict[str, object]:
        """Facts that do not change while the engine runs: model, device, sizes, configuration."""
        return dict(self._parts.description)

    def state(self) -> State:
        """Whether requests are taken."""
        return self._core.state

    def stats(self) -> dict[str, float]:
        """Counters as of the last step; never blocks."""
        return dict(self._core.snapshot)

    def check(self, request: Request) -> Request:
        """The request with its seed resolved. Raises InvalidRequestError (and its kinds) where it cannot be served."""
        return check_request(
            request, vocab_size=self.vocab_size, max_model_len=self.max_model_len, kv_tokens=self._kv_tokens
        )

    async def submit(self, request: Request) -> TextStream:
        """Queue a request and return its stream.

        Raises InvalidRequestError (and its kinds), QueueFullError or EngineUnavailableError; then nothing is queued.
        """
        request = self.check(request)
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        now_s = time.monotonic()
        timeout_s = self._parts.config.request_timeout_s
        deadline_s = request.deadline_s
        if timeout_s > 0.0:
            deadline_s = min(now_s + timeout_s, deadline_s if deadline_s is not None else float("inf"))
        request = replace(request, arrival_s=now_s, deadline_s=deadline_s)
        self._loop = asyncio.get_running_loop()
        stream = TextStream(self, RequestOutput(request, self.tokenizer))
        self._streams[request.request_id] = stream
        try:
            await asyncio.wrap_future(self._core.submit(request))
        except asyncio.CancelledError:
            self.forget(request.request_id)
            raise
        except PhloemError:
            del self._streams[request.request_id]
            raise
        return stream

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams = ..., **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
        *,
        n: int = 1,
        best_of: int | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        priority: int = 0,
        progress: bool = False,
    ) -> Generation | list[Generation]:
        """Continue one prompt (one Generation) or a list of them (a list in the same order).

        Each prompt gets `n` sequences: the first n, or with `best_of` those of highest mean logprob among so many.
        `params` may be one for each prompt. `progress` shows a bar on standard error. Every prompt is checked before
        any is queued; a sequence that fails later carries its error, and the others go on.
        """
        single = generation.is_single(prompts)
        found = await generation.generate(
            self,
            [cast("Prompt", prompts)] if single else cast("Sequence[Prompt]", prompts),
            params,
            n=n,
            best_of=best_of,
            namespace=namespace,
            priority=priority,
            progress=progress,
        )
        return found[0] if single else found

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        n: int = 1,
        namespace: Namespace = DEFAULT_NAMESPACE,
        priority: int = 0,
    ) -> GenerationStream:
        """Queue one prompt and return its news as they come; close the stream early to abort it."""
        return await generation.open_stream(self, prompt, params, n=n, namespace=namespace, priority=priority)

    async def fork(
        self, handle: Handle, n: int, params: SamplingParams = DEFAULT_PARAMS, *, text: str = "", priority: int = 0
    ) -> Generation:
        """n continuations from the place of a finished or running sequence.

        They start from its very token ids, so all K/V that is still cached is reused, in the same namespace. `text`
        goes between: it is tokenised by itself.
        """
        place = generation.extend(self.tokenizer, handle, text)
        (found,) = await generation.generate(
            self, [place], params, n=n, best_of=None, namespace=handle.namespace, priority=priority, progress=False
        )
        return found

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> list[Score]:
        """Logprobs of each continuation after the prompt, in order.

        The prompt is computed at most once. A continuation is tokenised by itself, so its ids follow the prompt's.
        """
        scores, _ = await generation.score(self, prompt, continuations, namespace=namespace)
        return scores

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets terminal answers. False when it is not live."""
        return await asyncio.wrap_future(self._core.abort(request_id))

    async def flush_cache(self, namespace: Namespace | None = None) -> dict[str, int]:
        """Drop cached K/V: all of it, or that of one namespace. Running requests keep theirs until they end."""
        manager = self._parts.scheduler.manager
        freed = await asyncio.wrap_future(
            self._core.call(lambda: manager.flush(None if namespace is None else manager.namespace_id(namespace)))
        )
        return {"pages_freed": freed}

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the live ones; then stop. True when all of them finished in time."""
        self._core.drain()
        ends_s = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < ends_s and self._core.state == "draining":
            await asyncio.sleep(0.02)
        finished = not self._streams
        await asyncio.to_thread(self._core.stop)
        return finished

    @property
    def num_live(self) -> int:
        """Requests whose stream is open."""
        return len(self._streams)

    def close(self) -> None:
        """Stop at once. Idempotent; blocks until the engine thread has ended."""
        self._core.stop()

    def forget(self, request_id: str) -> None:
        """The reader of a stream went away: abort what still runs."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._core.abort(request_id)

    # --- from the engine thread to the event loop ---

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        self._on_loop(lambda: self._dispatch(deltas))

    def _on_failure(self, error: PhloemError) -> None:
        self._on_loop(lambda: self._fail_all(error))

    def _on_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _dispatch(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            text = stream.output.push(delta)
            if text is None:
                continue
            if text.finish_reason is FinishReason.STOP and delta.finish_reason is None:
                self._core.abort(delta.request_id, delta.index)
            stream.news.put_nowait(text)
            if stream.output.finished:
                del self._streams[delta.request_id]

    def _fail_all(self, error: PhloemError) -> None:
        for stream in self._streams.values():
            for text in stream.output.fail(error):
                stream.news.put_nowait(text)
        self._streams.clear()
