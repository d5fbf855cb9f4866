"""AsyncProgram and AsyncState: a text that grows by what the program writes and what the model generates.

Owns a state's token ids, text and variables. Must not know how the model is reached (backend).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from secrets import randbits
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from phloem.engine.async_engine import AsyncEngine
from phloem.engine.generation import GeneratedSequence, Score, Usage
from phloem.errors import EngineUnavailableError, InvalidRequestError
from phloem.programs.backend import Backend, EngineBackend, kept_ids
from phloem.programs.chat import Chat
from phloem.programs.server_backend import ServerBackend
from phloem.types import FinishReason, SamplingParams

DEFAULT_PARAMS = SamplingParams(max_tokens=128)
Rule = Literal["mean", "total"]


class _Open(NamedTuple):
    role: str


class _Close(NamedTuple):
    role: str


class AsyncProgram:
    """Where states begin: a model, default sampling, and a seed for everything that is drawn.

    `target` is an AsyncEngine or the URL of a server. States that draw at the same place must not draw the same, so
    each `gen` gets a seed of its own, made from `seed` and the state's way from `start` through its forks: two runs
    with one seed give the same answers, in whatever order their requests come to the model. `share` False lets no two
    calls share K/V: only good for measuring what sharing saves.
    """

    def __init__(
        self,
        target: AsyncEngine | Backend | str,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        seed: int | None = None,
        api_key: str = "",
        share: bool = True,
    ) -> None:
        if isinstance(target, str):
            self.backend: Backend = ServerBackend(target, api_key=api_key, share=share)
        elif isinstance(target, AsyncEngine):
            self.backend = EngineBackend(target, share=share)
        else:
            self.backend = target
        self.params = params
        self.seed = randbits(63) if seed is None else seed
        self.usage = Usage()
        """Tokens of all calls so far."""
        self._num_started = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections to a server; an engine stays open, it belongs to the caller."""
        await self.backend.close()

    def start(self, text: str = "") -> AsyncState:
        """A new state that begins with `text`."""
        self._num_started += 1
        state = AsyncState(self, (self._num_started,))
        state.append(text)
        return state


class AsyncState:
    """One line of thought: text, its token ids, and the variables that `gen` and `select` have named.

    Token ids only grow. Each piece of text between two calls of the model is tokenised by itself, and generated
    tokens are kept as drawn, so whatever was computed for a state is found again by all that come after it and by all
    its forks. A piece should not end with a space: models expect it at the front of the next word.
    """

    def __init__(self, program: AsyncProgram, path: tuple[int, ...]) -> None:
        self.program = program
        self.variables: dict[str, str] = {}
        self.details: dict[str, GeneratedSequence | list[Score]] = {}
        """What is known of each variable: the sequence of a `gen`, the scores of a `select`'s choices in order."""
        self._path = path
        self._num_calls = 0
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._pending: list[str | _Open | _Close] = []
        self._chat = Chat()
        self._role = ""
        self._busy = False

    def __getitem__(self, name: str) -> str:
        return self.variables[name]

    def __iadd__(self, text: str) -> Self:
        self.append(text)
        return self

    @property
    def text(self) -> str:
        """All text so far; what the template puts around turns is in it from the next call of the model on."""
        return "".join(self._pieces) + "".join(piece for piece in self._pending if isinstance(piece, str))

    def append(self, text: str) -> None:
        """Add text; nothing is sent to the model yet."""
        if text:
            self._pending.append(text)

    # --- chat turns ---

    @contextmanager
    def turn(self, role: str) -> Iterator[None]:
        """A turn of the chat: what is added inside the `with` block is its content."""
        if self._role:
            raise InvalidRequestError(f"the {self._role!r} turn is still open: turns do not nest")
        self._role = role
        self._pending.append(_Open(role))
        try:
            yield
        finally:
            self._pending.append(_Close(role))
            self._role = ""

    def system(self, text: str) -> None:
        """A whole system turn."""
        with self.turn("system"):
            self.append(text)

    def user(self, text: str) -> None:
        """A whole user turn."""
        with self.turn("user"):
            self.append(text)

    def assistant(self, text: str) -> None:
        """A whole assistant turn, given (an example, say)."""
        with self.turn("assistant"):
            self.append(text)

    def tool(self, text: str) -> None:
        """A whole tool turn: the result of a call."""
        with self.turn("tool"):
            self.append(text)

    async def reply(self, name: str | None = None, params: SamplingParams | None = None, **overrides: Any) -> str:
        """A whole assistant turn, generated. Arguments as for `gen`."""
        with self.turn("assistant"):
            return await self.gen(name, params, **overrides)

    # --- the model ---

    async def gen(self, name: str | None = None, params: SamplingParams | None = None, **overrides: Any) -> str:
        """Let the model go on; return its text, which is kept in the state and under `name`.

        `params` (or the program's) with single fields replaced by `overrides`, as in `gen(max_tokens=20, stop="\\n")`.
        The stop string or token is not kept, unless `include_stop`. Raises PhloemError and its kinds.
        """
        with self._alone():
            await self._flush()
            own = self._resolve(params, overrides)
            sequence, usage = await self.program.backend.generate(self._token_ids, own)
            self.program.usage = self.program.usage.plus(usage)
            if sequence.error is not None:
                raise sequence.error
            if sequence.finish_reason is FinishReason.ABORT:
                raise EngineUnavailableError("the generation was aborted")
            self._token_ids += await kept_ids(self.program.backend, sequence, own)
            self._keep(sequence.text, name, sequence)
        return sequence.text

    async def select(self, choices: Sequence[str], name: str | None = None, *, by: Rule = "mean") -> str:
        """Let the model choose: the text to which it gives the highest logprob, per token (`mean`) or in `total`.

        Ties go to the first. What is cached of the state is not computed again: a choice costs its own tokens and one
        row. The choice is kept in the state and under `name`.
        """
        if not choices:
            raise InvalidRequestError("there is nothing to choose from", param="choices")
        with self._alone():
            await self._flush()
            backend = self.program.backend
            if not self._token_ids:
                raise InvalidRequestError("the prompt is empty: add text before the first choice", param="prompt")
            ids = [await backend.encode(choice, False) for choice in choices]
            if not all(ids):
                raise InvalidRequestError("a choice is empty: at least one token is needed", param="choices")
            scores, usage = await backend.score(self._token_ids, ids)
            self.program.usage = self.program.usage.plus(usage)
            values = [score.mean if by == "mean" else score.total for score in scores]
            best = max(range(len(values)), key=values.__getitem__)
            self._token_ids += ids[best]
            self._keep(choices[best], name, scores)
        return choices[best]

    # --- branches ---

    async def fork(self, n: int) -> list[AsyncState]:
        """n states that go on from here, each its own way. Nothing is computed; the text so far is tokenised."""
        with self._alone():
            await self._flush()
            self._num_calls += 1
            return [self._copy((*self._path, self._num_calls, i)) for i in range(n)]

    def join(self, branches: Sequence[AsyncState], best: AsyncState | None = None) -> dict[str, list[str]]:
        """What each branch has under each name, in the order of the branches ("" where it has none).

        With `best` this state goes on from where that branch stands, with its text, tokens and variables.
        """
        names = dict.fromkeys(name for branch in branches for name in branch.variables)
        found = {name: [branch.variables.get(name, "") for branch in branches] for name in names}
        if best is not None:
            self._adopt(best)
        return found

    def _adopt(self, other: AsyncState) -> None:
        self.variables |= other.variables
        self.details |= other.details
        self._token_ids = list(other._token_ids)
        self._pieces = list(other._pieces)
        self._pending = list(other._pending)
        self._chat = other._chat.copy()
        self._role = other._role

    def _copy(self, path: tuple[int, ...]) -> AsyncState:
        branch = AsyncState(self.program, path)
        branch._adopt(self)
        return branch

    # --- inside ---

    def _keep(self, text: str, name: str | None, detail: GeneratedSequence | list[Score]) -> None:
        self._pieces.append(text)
        self._chat.add(text)
        if name is not None:
            self.variables[name] = text
            self.details[name] = detail

    def _resolve(self, params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
        """Sampling of one `gen`, with its own seed unless the caller names one."""
        self._num_calls += 1
        values = dict(overrides)
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        own = replace(self.program.params if params is None else params, **values)
        return own if own.seed is not None else replace(own, seed=self._seed())

    def _seed(self) -> int:
        place = repr((self.program.seed, self._path, self._num_calls)).encode()
        return int.from_bytes(blake2b(place, digest_size=8).digest(), "big") >> 1

    async def _flush(self) -> None:
        """Tokenise what was added since the last call of the model. If that fails, it is all as before."""
        backend, chat, piece = self.program.backend, self._chat.copy(), ""
        for item in self._pending:
            if isinstance(item, str):
                chat.add(item)
                piece += item
            elif isinstance(item, _Open):
                piece += await chat.open(item.role, backend.render_chat)
            else:
                piece += chat.close()
        if piece:
            # A template writes BOS itself, where the model wants one.
            is_plain_start = not self._token_ids and isinstance(self._pending[0], str)
            self._token_ids += await backend.encode(piece, is_plain_start)
            self._pieces.append(piece)
        self._chat = chat
        self._pending = []

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise InvalidRequestError("this state waits for the model already; fork it to go two ways at once")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
