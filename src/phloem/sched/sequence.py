"""Sequence: one running or waiting continuation of a prompt, as the scheduler sees it.

Owns the counters that chase each other (`num_computed` after `num_tokens`) and the token buffer. Must not know
the cache or the policy: a sequence holds a cursor id, never a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from phloem.kv.manager import Probe
from phloem.types import Float32Array, Int32Array, LogitRow, Pooling, Request, TokenDelta, TokenLogprob

Float64Array = NDArray[np.float64]

_MASK64 = (1 << 64) - 1


class Status(Enum):
    """Where a sequence is. WAITING includes retracted ones."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def derive_seed(seed: int, index: int) -> int:
    """Seed of the index-th sequence of a request: the request's own for 0, mixed for the others (splitmix64)."""
    if index == 0:
        return seed & _MASK64
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence.

    `tokens[:num_tokens]` is prompt and output; `cursor` stands after the first `num_computed` of them
    (their K/V is in the tree, pending or complete). `max_total` is the length at which it ends. Where
    the request asks for prompt logprobs or an embedding, the rows of positions from `num_scored` to
    `score_until` are still to be looked at, whether their K/V is cached or not; `pooled` is the sum of those seen.
    `admission` orders running sequences by when they were admitted, `arrival` all by when they came.
    `path` stands for the way through the tree to the cursor: the longer the common path of two running sequences, the
    longer the common beginning of theirs.
    """

    request: Request
    index: int
    seed: int
    arrival: int
    namespace_id: int
    tokens: Int32Array
    num_prompt: int
    num_tokens: int
    max_total: int
    client_id: int
    ending_ids: frozenset[int]
    draw: LogitRow
    status: Status = Status.WAITING
    cursor: int = -1
    num_computed: int = 0
    num_scored: int = 0
    score_until: int = 0
    pooled: Float64Array | None = None
    table_row: int = -1
    path: bytes = b""
    admission: int = -1
    waiting_slot: int = -1
    num_prompt_rows: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    probe: Probe | None = None
    want_id: int = 0

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def max_output(self) -> int:
        return self.max_total - self.num_prompt

    @property
    def is_scoring(self) -> bool:
        """True while prompt positions remain whose logprobs or hidden states were asked for."""
        return self.num_scored < self.score_until

    @property
    def is_decoding(self) -> bool:
        """True when only the last token lacks K/V and its row's logits are wanted."""
        return (
            self.num_tokens - self.num_computed == 1
            and self.max_total > self.num_prompt
            and self.num_scored >= self.score_until
        )

    @property
    def needs_rows(self) -> bool:
        """True while rows remain before the next token can be drawn."""
        return self.num_computed < self.num_tokens or self.is_scoring

    @property
    def next_row(self) -> int:
        """First position whose row must still be computed: at least the last token's, for its logits."""
        return self.first_row_after(self.num_computed)

    def first_row_after(self, num_cached: int) -> int:
        """What `next_row` is once so many tokens have their K/V."""
        return min(num_cached, self.num_scored if self.is_scoring else self.num_tokens - 1)

    @property
    def embedding(self) -> Float32Array | None:
        """Mean of the pooled rows; None before all were seen."""
        if self.pooled is None or self.is_scoring:
            return None
        num_rows = self.num_prompt if self.request.pooling is Pooling.MEAN else 1
        return (self.pooled / num_rows).astype(np.float32)

    def pool(self, hidden: Float32Array) -> None:
        """Take hidden states of the next rows. Summed row by row in float64, so that chunks do not matter."""
        before = np.zeros(hidden.shape[1]) if self.pooled is None else self.pooled
        self.pooled = np.add.reduce(np.concatenate([before[None], hidden], dtype=np.float64), axis=0)
        self.num_scored += len(hidden)

    def note_prompt_rows(self, count: int) -> None:
        """So many rows of the prompt were scheduled; the tokens without a row of their own came from the cache."""
        self.num_prompt_rows += count
        self.cached_tokens = max(0, self.num_prompt - self.num_prompt_rows)

    def take_news(self) -> TokenDelta:
        """A delta without tokens: the counters as they are, and the prompt logprobs since the last one."""
        delta = TokenDelta(
            self.request.request_id,
            self.index,
            [],
            num_prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
        )
        if self.prompt_logprobs:
            delta.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        return delta

    def append_token(self, token_id: int) -> None:
        """Add one drawn token; amortised O(1)."""
        if self.num_tokens == len(self.tokens):
            grown = np.empty(min(self.max_total, 2 * self.num_tokens + 16), dtype=np.int32)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def draw_row(self, row: int) -> LogitRow:
        """The logit row of the next token. One record serves all draws of the sequence: it holds until the next."""
        draw, params = self.draw, self.request.params
        draw.row = row
        draw.position = self.num_tokens
        draw.history = self.tokens[: self.num_tokens]
        if params.min_tokens:
            is_short = self.num_output < params.min_tokens
            draw.banned = tuple(sorted(self.request.eos_token_ids | self.request.stop_token_ids)) if is_short else ()
        return draw

    def score_row(self, row: int, position: int) -> LogitRow:
        """The logit row that scores the prompt's token at `position`."""
        return LogitRow(
            row=row,
            position=position,
            seed=self.seed,
            params=self.request.params,
            history=self.tokens[:position],
            num_prompt=self.num_prompt,
            target=int(self.tokens[position]),
        )


def make_sequence(
    request: Request, index: int, *, arrival: int, namespace_id: int, client_id: int, max_total: int
) -> Sequence:
    """Build the index-th sequence of a request."""
    num_prompt = len(request.prompt)
    tokens = np.empty(min(max_total, num_prompt + 64), dtype=np.int32) if max_total > num_prompt else request.prompt
    tokens[:num_prompt] = request.prompt
    num_scored, score_until = max(0, request.score_from - 1), num_prompt - 1 if request.score_from else 0
    if request.pooling is not None:
        num_scored, score_until = (0 if request.pooling is Pooling.MEAN else num_prompt - 1), num_prompt
    params = request.params
    seed = derive_seed(params.seed or 0, index)
    masker = request.masker[index] if request.masker else None
    return Sequence(
        request=request,
        index=index,
        seed=seed,
        arrival=arrival,
        namespace_id=namespace_id,
        tokens=tokens,
        num_prompt=num_prompt,
        num_tokens=num_prompt,
        max_total=max_total,
        client_id=client_id,
        ending_ids=request.stop_token_ids if params.ignore_eos else request.stop_token_ids | request.eos_token_ids,
        draw=LogitRow(-1, num_prompt, seed, params, tokens[:num_prompt], num_prompt, masker=masker),
        num_scored=num_scored,
        score_until=score_until,
    )
