"""Program, State and Branches: the same as their async namesakes, for code that blocks.

Owns the way from a blocking call to the event loop. Must not know what the calls do: see `async_program`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from phloem.engine.engine import Engine
from phloem.engine.generation import GeneratedSequence, Score, Usage, gather_or_cancel
from phloem.engine.loop_thread import LoopThread
from phloem.programs.async_program import DEFAULT_PARAMS, AsyncProgram, AsyncState, Rule
from phloem.types import SamplingParams

T = TypeVar("T")
R = TypeVar("R")
Run = Callable[[Coroutine[Any, Any, Any]], Any]

MAX_THREADS = 64


class Program:
    """Where states begin. `target` is an Engine or the URL of a server; the rest as for `AsyncProgram`."""

    def __init__(
        self,
        target: Engine | str,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        seed: int | None = None,
        api_key: str = "",
        share: bool = True,
    ) -> None:
        self._loop = None if isinstance(target, Engine) else LoopThread("phloem-program")
        self._run: Run = target.run if self._loop is None else self._loop.run  # type: ignore[union-attr]
        inner = target.async_engine if isinstance(target, Engine) else target
        self._inner = AsyncProgram(inner, params, seed=seed, api_key=api_key, share=share)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def usage(self) -> Usage:
        """Tokens of all calls so far."""
        return self._inner.usage

    @property
    def seed(self) -> int:
        """Seed of everything that is drawn; give it to another Program to draw the same."""
        return self._inner.seed

    def start(self, text: str = "") -> State:
        """A new state that begins with `text`."""
        return State(self._inner.start(text), self._run)

    def group(self, states: Sequence[State]) -> Branches:
        """States of this program, wherever they come from, to be called at once."""
        return Branches(states, self._run)

    def map(self, function: Callable[[State, T], R], items: Sequence[T]) -> list[R]:
        """`function(state, item)` for each item, at once, each with a new state; results in order."""
        states = [self.start() for _ in items]
        return _in_threads(function, states, items)

    def close(self) -> None:
        """Close connections to a server; an Engine stays open, it belongs to the caller. Idempotent."""
        if self._loop is not None and not self._loop.closed:
            self._loop.run(self._inner.close())
            self._loop.close()


class State:
    """One line of thought; see `AsyncState`. Different states may be used from different threads."""

    def __init__(self, inner: AsyncState, run: Run) -> None:
        self._inner = inner
        self._run = run

    def __getitem__(self, name: str) -> str:
        return self._inner[name]

    def __iadd__(self, text: str) -> Self:
        self._inner.append(text)
        return self

    @property
    def text(self) -> str:
        """All text so far."""
        return self._inner.text

    @property
    def variables(self) -> dict[str, str]:
        """What `gen` and `select` have named."""
        return self._inner.variables

    @property
    def details(self) -> dict[str, GeneratedSequence | list[Score]]:
        """What is known of each variable: the sequence of a `gen`, the scores of a `select`'s choices in order."""
        return self._inner.details

    def append(self, text: str) -> None:
        """Add text."""
        self._inner.append(text)

    def turn(self, role: str) -> AbstractContextManager[None]:
        """A turn of the chat: what is added inside the `with` block is its content."""
        return self._inner.turn(role)

    def system(self, text: str) -> None:
        """A whole system turn."""
        self._inner.system(text)

    def user(self, text: str) -> None:
        """A whole user turn."""
        self._inner.user(text)

    def assistant(self, text: str) -> None:
        """A whole assistant turn, given."""
        self._inner.assistant(text)

    def tool(self, text: str) -> None:
        """A whole tool turn: the result of a call."""
        self._inner.tool(text)

    def reply(self, name: str | None = None, params: SamplingParams | None = None, **overrides: Any) -> str:
        """A whole assistant turn, generated."""
        text: str = self._run(self._inner.reply(name, params, **overrides))
        return text

    def gen(self, name: str | None = None, params: SamplingParams | None = None, **overrides: Any) -> str:
        """Let the model go on; return its text. See `AsyncState.gen`."""
        text: str = self._run(self._inner.gen(name, params, **overrides))
        return text

    def select(self, choices: Sequence[str], name: str | None = None, *, by: Rule = "mean") -> str:
        """Let the model choose. See `AsyncState.select`."""
        choice: str = self._run(self._inner.select(choices, name, by=by))
        return choice

    def fork(self, n: int) -> Branches:
        """n states that go on from here, each its own way."""
        return Branches([State(inner, self._run) for inner in self._run(self._inner.fork(n))], self._run)

    def join(self, branches: Sequence[State], best: State | None = None) -> dict[str, list[str]]:
        """What each branch has under each name; with `best` this state goes on from there. See `AsyncState.join`."""
        inner = [branch._inner for branch in branches]
        return self._inner.join(inner, None if best is None else best._inner)


class Branches(Sequence[State]):
    """States that go on at once: a call on all of them runs in one batch."""

    def __init__(self, states: Sequence[State], run: Run) -> None:
        self._states = list(states)
        self._run = run

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> State: ...

    @overload
    def __getitem__(self, index: slice) -> Branches: ...

    def __getitem__(self, index: int | slice) -> State | Branches:
        if isinstance(index, slice):
            return Branches(self._states[index], self._run)
        return self._states[index]

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __iadd__(self, text: str) -> Self:
        for state in self._states:
            state.append(text)
        return self

    def gen(self, name: str | None = None, params: SamplingParams | None = None, **overrides: Any) -> list[str]:
        """`gen` on each; texts in order."""
        return self._at_once(state._inner.gen(name, params, **overrides) for state in self._states)

    def reply(self, name: str | None = None, params: SamplingParams | None = None, **overrides: Any) -> list[str]:
        """`reply` on each; texts in order."""
        return self._at_once(state._inner.reply(name, params, **overrides) for state in self._states)

    def select(self, choices: Sequence[str], name: str | None = None, *, by: Rule = "mean") -> list[str]:
        """`select` on each; choices in order."""
        return self._at_once(state._inner.select(choices, name, by=by) for state in self._states)

    def fork(self, n: int) -> Branches:
        """n states from each: all of the first, then all of the second, and so on."""
        groups = self._run(gather_or_cancel(state._inner.fork(n) for state in self._states))
        return Branches([State(inner, self._run) for group in groups for inner in group], self._run)

    def map(self, function: Callable[[State], R]) -> list[R]:
        """`function(state)` for each, at once, in threads: for branches that go different ways. Results in order."""
        return _in_threads(lambda state, _: function(state), self._states, self._states)

    def _at_once(self, jobs: Iterator[Coroutine[Any, Any, str]]) -> list[str]:
        texts: list[str] = self._run(gather_or_cancel(jobs))
        return texts


def _in_threads(function: Callable[[State, T], R], states: Sequence[State], items: Sequence[T]) -> list[R]:
    if not states:
        return []
    with ThreadPoolExecutor(min(len(states), MAX_THREADS)) as pool:
        return list(pool.map(function, states, items))
