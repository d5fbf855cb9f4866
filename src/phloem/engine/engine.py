"""Engine: the engine for scripts and notebooks, where a call blocks until its result is there.

Owns an AsyncEngine and the loop that it runs on. Must not know how requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from phloem.config import EngineConfig
from phloem.engine.async_engine import AsyncEngine
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
from phloem.engine.loop_thread import LoopThread
from phloem.models.tokenizer import Tokenizer
from phloem.types import DEFAULT_NAMESPACE, Namespace, SamplingParams, TextDelta

T = TypeVar("T")


class Engine:
    """One loaded model, called from any thread. Use it as a context manager, or `close` it.

    Calls from several threads run together in one batch. All generation methods raise InvalidRequestError (and its
    kinds) before anything is computed, and EngineUnavailableError when the engine has stopped.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._loop = LoopThread("phloem-calls")
        self.async_engine = AsyncEngine(parts)

    @classmethod
    def load(cls, config: EngineConfig | str, progress: Callable[[str, float], None] | None = None) -> Self:
        """Load a model, given as a configuration or as a path alone. Blocks; raises StartupError."""
        return cls(load_parts(config if isinstance(config, EngineConfig) else EngineConfig(model=config), progress))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template."""
        return self.async_engine.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams = ..., **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...

    def generate(
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

        See `AsyncEngine.generate`.
        """
        options: GenerateOptions = {
            "n": n,
            "best_of": best_of,
            "namespace": namespace,
            "priority": priority,
            "progress": progress,
        }
        return self.run(self.async_engine.generate(cast("Sequence[Prompt]", prompts), params, **options))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        n: int = 1,
        namespace: Namespace = DEFAULT_NAMESPACE,
        priority: int = 0,
    ) -> BlockingStream:
        """News of one prompt as they come: iterate over it, and leave its `with` block to abort it early."""
        stream = self.run(self.async_engine.stream(prompt, params, n=n, namespace=namespace, priority=priority))
        return BlockingStream(self._loop, stream)

    def fork(
        self, handle: Handle, n: int, params: SamplingParams = DEFAULT_PARAMS, *, text: str = "", priority: int = 0
    ) -> Generation:
        """n continuations from a handle's place, after `text`. See `AsyncEngine.fork`."""
        return self.run(self.async_engine.fork(handle, n, params, text=text, priority=priority))

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> list[Score]:
        """Logprobs of each continuation after the prompt. See `AsyncEngine.score`."""
        return self.run(self.async_engine.score(prompt, continuations, namespace=namespace))

    def flush_cache(self, namespace: Namespace | None = None) -> dict[str, int]:
        """Drop cached K/V that no request uses: all of it, or that of one namespace."""
        return self.run(self.async_engine.flush_cache(namespace))

    def stats(self) -> dict[str, float]:
        """Counters as of the last step."""
        return self.async_engine.stats()

    def describe(self) -> dict[str, object]:
        """Facts that do not change: model, device, sizes."""
        return self.async_engine.describe()

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that uses `async_engine`, and wait for it."""
        return self._loop.run(job)

    def close(self) -> None:
        """Stop at once and free the threads. Idempotent."""
        self.async_engine.close()
        self._loop.close()


class BlockingStream(Iterator[TextDelta]):
    """A GenerationStream for a caller that blocks. Aborts what still runs when closed or forgotten."""

    def __init__(self, loop: LoopThread, stream: GenerationStream) -> None:
        self._loop = loop
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._loop.post(self._stream.abort)

    def __next__(self) -> TextDelta:
        try:
            return self._loop.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Abort the sequences that still run. Idempotent."""
        self._loop.post(self._stream.abort)

    def handle(self, index: int = 0) -> Handle:
        """The place that a sequence has reached, while it runs or after its end."""
        return self._stream.handle(index)

    def result(self) -> Generation:
        """Read to the end and return the whole generation."""
        return self._loop.run(self._stream.result())
