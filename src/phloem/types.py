"""Shared nouns of the engine: what a request asks, what a step computes, what comes back.

Owns plain records only. Must not know torch, the cache, the scheduler or HTTP: every package may import
this module, and it imports only `errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.errors import InvalidRequestError, PhloemError

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]

UNLIMITED = 1 << 31


class Namespace(NamedTuple):
    """What must never share cached K/V: a typed key, never a joined string."""

    model: str = ""
    adapter: str = ""
    cache_salt: str = ""


DEFAULT_NAMESPACE = Namespace()


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted request gets exactly one of these per sequence."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(StrEnum):
    """How the hidden states of a prompt become one vector."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn, as validated numbers.

    Penalties: `repetition_penalty` looks at prompt and output, `presence_penalty` and
    `frequency_penalty` at the output only. `top_k` 0 or -1 means off. `seed` None draws a fresh seed.
    `logprobs` is the number of alternatives to report beside the chosen token (None: no logprobs).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Raise InvalidRequestError naming the field that is out of range."""
        checks = (
            ("max_tokens", self.max_tokens is None or 0 <= self.max_tokens < UNLIMITED, "an integer from 0 to 2^31-1"),
            ("min_tokens", 0 <= self.min_tokens < UNLIMITED, "an integer of at least 0"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_k", self.top_k >= -1, "an integer of at least -1 (0 and -1: off)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 to 1"),
            ("typical_p", 0.0 < self.typical_p <= 1.0, "a number above 0 and at most 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "a number from 0.01 to 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "a number from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "a number from -2 to 2"),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "a 64-bit integer"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "an integer from 0 to 20"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
                "an integer from 0 to 20",
            ),
        )
        for name, holds, expected in checks:
            if not holds:
                raise InvalidRequestError(f"{name} must be {expected}, got {getattr(self, name)!r}", param=name)
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    f"logit_bias values must be from -100 to 100, got {bias!r} for token {token}", param="logit_bias"
                )


class TokenMasker(Protocol):
    """Grammar state of one sequence; lives on the engine thread (see `phloem.engine.grammar`)."""

    def fill(self, bitmask: NDArray[np.uint32]) -> None:
        """Write the allowed next tokens as bits: token t is bit t % 32 of word t // 32."""

    def accept(self, token_id: int) -> None:
        """Advance by one drawn token."""

    @property
    def finished(self) -> bool:
        """True when the grammar accepts no further token but the end."""


@dataclass(slots=True)
class Request:
    """One generation job as the engine accepts it: a prompt and how to continue it.

    `prompt` is int32 token ids, already validated to lie inside the vocabulary. n > 1 is n sequences
    of one request: same prompt, seeds derived from (seed, index); they share the prompt by the
    ordinary prefix match. `deadline_s` and `arrival_s` are on the engine's monotonic clock.
    `score_from` >= 1 asks for the logprobs of prompt tokens from that position on (with
    `params.prompt_logprobs` alternatives each); 0 asks for none. `pooling` asks for the prompt's embedding
    instead: then `params.max_tokens` is 0, and so is `score_from`. `client` is whom the work is charged to.
    """

    request_id: str
    prompt: Int32Array
    params: SamplingParams
    namespace: Namespace = DEFAULT_NAMESPACE
    n: int = 1
    priority: int = 0
    client: str = ""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    masker: tuple[TokenMasker, ...] = ()
    score_from: int = 0
    pooling: Pooling | None = None


@dataclass(slots=True)
class LogitRow:
    """One row of a step whose logits are needed, and what to do with them.

    `position` is that of the token to be drawn (position of the row plus one); the random number of
    the draw is a function of (seed, position) alone. `history` is a view of the prompt and output
    tokens before it, the first `num_prompt` of them the prompt. `target` >= 0 scores that token
    instead of drawing one (prompt logprobs).
    """

    row: int
    position: int
    seed: int
    params: SamplingParams
    history: Int32Array
    num_prompt: int
    target: int = -1
    banned: tuple[int, ...] = ()
    masker: TokenMasker | None = None


@dataclass(slots=True)
class StepPlan:
    """One forward pass, complete: the runner needs nothing else.

    R rows in S sequences; the rows of sequence s are [seq_row_start[s], seq_row_start[s + 1]) and
    have consecutive positions. A row at position p attends the slots slot_table[seq_table_row[s], 0..p].
    First every row of a layer writes its K/V to write_slots (-1: its K/V is already there, write
    nothing), then all rows attend; so a sequence may read slots that another one writes in this step.
    `hidden_rows` are those whose hidden states, after the final norm, are wanted.
    """

    step_id: int
    token_ids: Int32Array
    positions: Int32Array
    write_slots: Int32Array
    seq_row_start: Int32Array
    seq_table_row: Int32Array
    slot_table: Int32Array
    logit_rows: list[LogitRow]
    hidden_rows: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_table_row)


class TopLogprobs(NamedTuple):
    """Alternatives of one position, most likely first; ties by the lower id."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(slots=True)
class StepResult:
    """What a step returns, one entry per LogitRow of the plan, in order.

    `logprobs` are natural logarithms of the model's own distribution (before temperature and
    truncation, after nothing), of the drawn token or of `target`. Never NaN or infinite.
    `hidden` is [number of hidden rows, hidden size], in their order.
    """

    step_id: int
    token_ids: Int32Array
    logprobs: Float32Array
    top: list[TopLogprobs | None]
    hidden: Float32Array = field(default_factory=lambda: np.empty((0, 0), np.float32))


class ModelRunner(Protocol):
    """Executes step plans. Implementations: native CPU, torch, and NullRunner for tests."""

    @property
    def vocab_size(self) -> int: ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one forward pass. May raise; then no K/V written by the plan counts as valid."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob of one token and its alternatives, as reported to the client."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenDelta:
    """News of one sequence after a step: new tokens, or its end, or both.

    Exactly one delta per sequence has a `finish_reason`. `stop_reason` is the stop token id or stop
    string that ended it, None when an end-of-text token or a limit did. `cached_tokens` is the number
    of prompt tokens whose K/V were in the tree when the request was first scheduled. `embedding` comes with the end.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: PhloemError | None = None
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    embedding: Float32Array | None = None


@dataclass(slots=True)
class TextDelta:
    """A TokenDelta after detokenising: text that is safe to send (whole characters, no stop string).

    `num_output_tokens` counts the tokens of this sequence so far, stop token included.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: PhloemError | None = None
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    num_output_tokens: int = 0
    embedding: Float32Array | None = None
