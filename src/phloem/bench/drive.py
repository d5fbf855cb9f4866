"""Drives a scheduler with NullRunner step by step and checks everything that must hold after each step.

Owns the answers as clients would see them. Raises AssertionError for the first thing that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phloem.errors import StepFailedError
from phloem.runner.null_runner import NullRunner, hidden_state, next_token
from phloem.sched.scheduler import Scheduler
from phloem.sched.sequence import derive_seed
from phloem.types import (
    FinishReason,
    Float32Array,
    Pooling,
    Request,
    SamplingParams,
    StepPlan,
    TokenDelta,
    TokenLogprob,
)

VOCAB = 1000


def make_request(request_id: str, prompt: Iterable[int], *, max_tokens: int | None = 4, **fields: Any) -> Request:
    """A request of these token ids; other keywords are fields of Request, or `params` and `seed`."""
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens, seed=fields.pop("seed", 0))
    return Request(request_id, np.fromiter(prompt, dtype=np.int32), params, **fields)


@dataclass
class Answer:
    """What one sequence has said so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    error: Exception | None = None
    embedding: Float32Array | None = None


class Drive:
    """A scheduler, its manager and a NullRunner under a virtual clock of one second a step."""

    def __init__(self, manager: Any, *, fail_at: Iterable[int] = (), vocab_size: int = VOCAB, **options: Any) -> None:
        options.setdefault("max_model_len", 4096)
        self.manager = manager
        self.scheduler = Scheduler(manager, **options)
        self.runner = NullRunner(num_slots=manager.num_slots, vocab_size=vocab_size, fail_at=frozenset(fail_at))
        self.vocab_size = vocab_size
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self.order_of_first_token: list[str] = []
        self.plans: list[StepPlan] | None = []
        """Every plan; set it to None where they would take too much memory."""

    def add(self, request: Request) -> None:
        """Queue a request now."""
        self.scheduler.add(request, now_s=self.now_s)
        self.requests[request.request_id] = request
        for index in range(request.n):
            self.answers[request.request_id, index] = Answer()

    def step(self) -> bool:
        """One step; False when there was nothing to compute."""
        self.now_s += 1.0
        plan = self.scheduler.schedule(now_s=self.now_s)
        if plan is None:
            deltas = self.scheduler.take_ended()
        else:
            self._check_plan(plan)
            if self.plans is not None:
                self.plans.append(plan)
            try:
                result = self.runner.step(plan)
            except RuntimeError:
                deltas = self.scheduler.fail(plan.step_id, StepFailedError("told to fail"))
            else:
                deltas = self.scheduler.update(result)
        self.manager.check_invariants()
        for delta in deltas:
            self._take(delta)
        return plan is not None

    def run(self, *, max_steps: int = 5000, until: Callable[[], bool] = lambda: False) -> None:
        """Step until nothing is left to do, or `until` holds."""
        steps = 0
        while self.scheduler.has_work and not until():
            self.step()
            steps += 1
            assert steps < max_steps, "the scheduler does not come to an end"
        if not self.scheduler.has_work:
            assert self.manager.stats().num_pages_protected == 0

    def answer(self, request_id: str, index: int = 0) -> Answer:
        """What a sequence has said."""
        return self.answers[request_id, index]

    def expected_tokens(self, request_id: str, index: int, count: int) -> list[int]:
        """The first `count` tokens of a run alone."""
        request = self.requests[request_id]
        tokens: list[int] = request.prompt.tolist()
        seed = derive_seed(request.params.seed or 0, index)
        for _ in range(count):
            tokens.append(next_token(np.array(tokens, dtype=np.int32), seed, self.vocab_size))
        return tokens[len(request.prompt) :]

    def check_answers(self) -> None:
        """Every sequence has one terminal answer, and its tokens are those of a run alone."""
        limit = self.scheduler.max_sequence_tokens
        for (request_id, index), answer in self.answers.items():
            assert answer.finish_reason is not None, f"{request_id}/{index} has no terminal answer"
            assert answer.token_ids == self.expected_tokens(request_id, index, len(answer.token_ids))
            request = self.requests[request_id]
            if answer.finish_reason is FinishReason.LENGTH:
                room = limit - len(request.prompt)
                wanted = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
                assert len(answer.token_ids) == wanted
                self._check_embedding(request, answer)

    @staticmethod
    def _check_embedding(request: Request, answer: Answer) -> None:
        if request.pooling is None:
            assert answer.embedding is None
            return
        ends = range(1 if request.pooling is Pooling.MEAN else len(request.prompt), len(request.prompt) + 1)
        states = np.array([hidden_state(request.prompt[:end]) for end in ends], np.float64)
        np.testing.assert_array_equal(answer.embedding, states.mean(axis=0).astype(np.float32))

    def _take(self, delta: TokenDelta) -> None:
        answer = self.answers[delta.request_id, delta.index]
        assert answer.finish_reason is None, "a second terminal answer"
        if delta.token_ids and not answer.token_ids:
            self.order_of_first_token.append(delta.request_id)
        answer.token_ids += delta.token_ids
        answer.finish_reason = delta.finish_reason
        answer.cached_tokens = delta.cached_tokens
        answer.error = delta.error
        answer.embedding = delta.embedding
        answer.prompt_logprobs += delta.prompt_logprobs or []
        assert 0 <= delta.cached_tokens < max(delta.num_prompt_tokens, 1)

    def _check_plan(self, plan: StepPlan) -> None:
        written = plan.write_slots[plan.write_slots >= 0]
        assert len(np.unique(written)) == len(written), "two rows write one slot"
        for s in range(plan.num_seqs):
            positions = plan.positions[plan.seq_row_start[s] : plan.seq_row_start[s + 1]]
            assert (np.diff(positions) == 1).all()
            table = plan.slot_table[plan.seq_table_row[s], : positions[-1] + 1]
            assert len(np.unique(table)) == len(table), "two positions of a sequence share a slot"
            writes = plan.write_slots[plan.seq_row_start[s] : plan.seq_row_start[s + 1]]
            assert ((writes < 0) | (writes == table[positions])).all(), "a row writes a slot that is not its own"
