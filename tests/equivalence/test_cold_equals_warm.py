"""Cold equals warm: each request gets the tokens and logprobs that a fresh engine gives it alone, whatever was cached,
shared, chunked, evicted or retracted.

Random mixes of requests run through the real scheduler, cache and forward pass of a small random model, in pools that
are too small for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from phloem.config import EvictionPolicy, SchedulePolicy
from phloem.errors import StepFailedError
from phloem.kv.manager import KVCacheManager
from phloem.models.load import LoadedModel, load_model
from phloem.runner.native_runner import NativeRunner
from phloem.runner.sampler import uniform
from phloem.runner.torch_runner import TorchRunner
from phloem.sched.scheduler import Scheduler
from phloem.sched.sequence import derive_seed
from phloem.types import FinishReason, Namespace, Request, SamplingParams, TokenLogprob
from tests.helpers.models import hf_model, save_folder

MAX_LEN = 192
MIXES_PER_CASE = 17
PAGE_SIZES = (1, 16)
CASES = list(product(get_args(EvictionPolicy), PAGE_SIZES))
LOGPROB_TOLERANCE = 1e-4
NEAR_TIE = 1e-3
"""On a back end whose low bits depend on the batch, tokens may differ where a draw was as close as this."""


@dataclass(frozen=True)
class Backend:
    """A forward pass under test. `exact`: tokens and logprobs must be equal bit for bit."""

    make: Callable[[LoadedModel, int], Any]
    exact: bool


def make_torch(model: LoadedModel, num_slots: int) -> TorchRunner:
    runner = TorchRunner(model.spec, model.weights, num_slots, max_len=MAX_LEN)
    # What nobody wrote must not be read: large values would show.
    runner.kv.k.fill_(30.0)
    runner.kv.v.fill_(-30.0)
    return runner


def make_native(model: LoadedModel, num_slots: int) -> NativeRunner:
    return NativeRunner(model.spec, model.weights, num_slots=num_slots, num_threads=1, max_len=MAX_LEN)


BACKENDS = {"torch": Backend(make_torch, exact=False), "native": Backend(make_native, exact=True)}


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Engine:
    """Scheduler, cache and runner, stepped by hand; invariants are checked after every step."""

    def __init__(self, runner: Any, manager: KVCacheManager, *, fail_at: frozenset[int] = frozenset(), **options: Any):
        self.manager = manager
        self.scheduler = Scheduler(manager, max_model_len=MAX_LEN, **options)
        self.runner = runner
        self.fail_at = fail_at
        self.num_steps = 0
        self.answers: dict[tuple[str, int], Answer] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request, now_s=float(self.num_steps))
        self.answers |= {(request.request_id, index): Answer() for index in range(request.n)}

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < 5000, "the scheduler does not come to an end"
        plan = self.scheduler.schedule(now_s=float(self.num_steps))
        if plan is None:
            deltas = self.scheduler.take_ended()
        else:
            result = self.runner.step(plan)
            if self.num_steps in self.fail_at:
                deltas = self.scheduler.fail(plan.step_id, StepFailedError("told to fail"))
            else:
                deltas = self.scheduler.update(result)
        self.manager.check_invariants()
        for delta in deltas:
            answer = self.answers[delta.request_id, delta.index]
            assert answer.finish_reason is None, "a second terminal answer"
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or []
            answer.prompt_logprobs += delta.prompt_logprobs or []
            answer.finish_reason = delta.finish_reason
            assert 0 <= delta.cached_tokens < delta.num_prompt_tokens

    def check_idle(self) -> None:
        """Everything was answered, and nothing is held for it."""
        assert all(answer.finish_reason is not None for answer in self.answers.values())
        stats = self.manager.stats()
        assert stats.num_pages_protected == stats.num_cursors == stats.num_wants == 0
        assert stats.num_pages_free + stats.num_pages_evictable == stats.num_pages_total


@dataclass
class Mix:
    """Requests with the steps at which they come and go, their answers when alone, and an engine's options."""

    requests: list[tuple[int, Request]]
    aborts: list[tuple[int, str]]
    alone: dict[tuple[str, int], Answer]
    num_pages: int
    watermark: float
    fail_at: frozenset[int]
    options: dict[str, Any]


def run_alone(backend: Backend, model: LoadedModel, request: Request) -> dict[tuple[str, int], Answer]:
    """The answers of an engine that never saw anything else, each sequence of the request by itself."""
    answers: dict[tuple[str, int], Answer] = {}
    for index in range(request.n):
        if index and request.params.temperature == 0.0:
            answers[request.request_id, index] = answers[request.request_id, 0]
            continue
        runner = backend.make(model, MAX_LEN)
        engine = Engine(runner, KVCacheManager(num_pages=MAX_LEN))
        single = Request(
            request.request_id,
            request.prompt,
            # The scheduler derives the seed of a sequence from its index.
            SamplingParams(**{**_fields(request.params), "seed": derive_seed(request.params.seed or 0, index)}),
            eos_token_ids=request.eos_token_ids,
            score_from=request.score_from,
        )
        engine.add(single)
        while engine.scheduler.has_work:
            engine.step()
        runner.close()
        answers[request.request_id, index] = engine.answers[request.request_id, 0]
    return answers


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def make_params(rng: np.random.Generator, *, scores: bool) -> SamplingParams:
    """Greedy, or a draw between the two likeliest tokens, so that the reported top 3 tell how close it was."""
    sampled = rng.random() < 0.3
    return SamplingParams(
        max_tokens=int(rng.integers(0 if scores else 1, 16)),
        temperature=1.5 if sampled else 0.0,
        top_k=2 if sampled else 0,
        seed=int(rng.integers(1 << 40)),
        logprobs=3,
        prompt_logprobs=0 if scores else None,
    )


def make_prompt(rng: np.random.Generator, known: list[list[int]]) -> list[int]:
    """A prefix of something known, or nothing, and a tail over few tokens, so that tails meet by chance as well."""
    base = known[rng.integers(len(known))] if known and rng.random() < 0.8 else []
    cut = len(base) if rng.random() < 0.4 else int(rng.integers(0, len(base) + 1))
    tail = rng.integers(3, 6, int(rng.integers(0, 40))).tolist()
    return (base[:cut] + tail)[: MAX_LEN - 40] or [7]


def make_mix(rng: np.random.Generator, backend: Backend, model: LoadedModel, page_size: int) -> Mix:
    known = [rng.integers(3, 320, int(rng.integers(10, 90))).tolist()]
    requests, aborts, alone = [], [], {}
    needed = 0
    for i in range(int(rng.integers(3, 8))):
        scores = rng.random() < 0.15
        request = Request(
            f"r{i}",
            np.array(make_prompt(rng, known), np.int32),
            make_params(rng, scores=scores),
            namespace=Namespace(cache_salt="salt" if rng.random() < 0.1 else ""),
            n=int(rng.choice([1, 1, 1, 2, 3])),
            priority=int(rng.random() < 0.1),
            client=str(rng.integers(2)),
            eos_token_ids=frozenset(rng.integers(0, 320, 6).tolist()),
            score_from=int(rng.integers(1, 5)) if scores else 0,
        )
        answers = run_alone(backend, model, request)
        alone |= answers
        known.append(request.prompt.tolist())
        # The next turn of a chat holds the answer.
        known.append(known[-1] + answers[f"r{i}", 0].token_ids)
        arrival = int(rng.integers(0, 30))
        requests.append((arrival, request))
        if rng.random() < 0.1:
            aborts.append((arrival + int(rng.integers(1, 12)), f"r{i}"))
        needed = max(needed, len(request.prompt) + (request.params.max_tokens or 0))
    pages = -(-needed // page_size) + 1
    return Mix(
        requests=requests,
        aborts=aborts,
        alone=alone,
        num_pages=pages + int(rng.integers(0, pages // 2 + 1)),
        watermark=float(rng.choice([0.0, 0.0, 0.2])),
        fail_at=frozenset(rng.integers(1, 40, 1).tolist() if rng.random() < 0.1 else []),
        options={
            "max_running": int(rng.integers(1, 9)),
            "chunk_size": int(rng.choice([1, 3, 8, 17, 64, 512])),
            "policy": str(rng.choice(get_args(SchedulePolicy))),
        },
    )


def run_mix(backend: Backend, model: LoadedModel, mix: Mix, page_size: int, policy: EvictionPolicy) -> Engine:
    manager = KVCacheManager(
        num_pages=mix.num_pages, page_size=page_size, eviction_policy=policy, evict_watermark=mix.watermark
    )
    runner = backend.make(model, manager.num_slots)
    engine = Engine(runner, manager, fail_at=mix.fail_at, **mix.options)
    step = 0
    while engine.scheduler.has_work or step <= max(arrival for arrival, _ in mix.requests):
        for arrival, request in mix.requests:
            if arrival == step:
                engine.add(request)
        for when, request_id in mix.aborts:
            if when == step:
                engine.scheduler.abort(request_id)
        engine.step()
        step += 1
    runner.close()
    engine.check_idle()
    return engine


def is_near_tie(params: SamplingParams, seed: int, position: int, found: TokenLogprob) -> bool:
    """Whether another token would have been drawn from logprobs that differ by a little."""
    (first, best), (second, other), (_, third) = found.top
    if params.temperature == 0.0:
        return best - other < NEAR_TIE
    if other - third < NEAR_TIE:
        return True
    share = 1.0 / (1.0 + np.exp((other - best) / params.temperature))
    of_lower_id = share if first < second else 1.0 - share
    return abs(of_lower_id - uniform(seed, position)) < NEAR_TIE


def same_logprobs(backend: Backend, warm: TokenLogprob | None, cold: TokenLogprob | None) -> bool:
    if warm is None or cold is None:
        return warm is cold
    if backend.exact:
        return warm == cold
    # Which alternatives are listed may change at a tie; how likely they are may not.
    pairs = [(warm.logprob, cold.logprob), *zip([p for _, p in warm.top], [p for _, p in cold.top], strict=True)]
    return warm.token_id == cold.token_id and all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs)


def compare(backend: Backend, request: Request, index: int, warm: Answer, cold: Answer) -> int:
    """Compare one sequence; the number of near ties at which it took another way (nothing after it is compared)."""
    whole = warm.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    seed = derive_seed(request.params.seed or 0, index)
    for scored, expected in zip(warm.prompt_logprobs, cold.prompt_logprobs, strict=whole):
        assert same_logprobs(backend, scored, expected)
    for i, token_id in enumerate(warm.token_ids):
        assert i < len(cold.token_ids), "it did not stop where it must"
        if token_id != cold.token_ids[i]:
            position = len(request.prompt) + i
            assert not backend.exact, f"token {i} differs"
            assert is_near_tie(request.params, seed, position, cold.logprobs[i]), f"token {i} differs, and not by a tie"
            return 1
        assert same_logprobs(backend, warm.logprobs[i], cold.logprobs[i]), f"logprobs of token {i} differ"
    if whole:
        assert (warm.token_ids, warm.finish_reason) == (cold.token_ids, cold.finish_reason)
    return 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_folder(hf_model("llama"), Path(tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize(("policy", "page_size"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("name", BACKENDS)
def test_cold_equals_warm(name: str, policy: EvictionPolicy, page_size: int, model: LoadedModel) -> None:
    backend = BACKENDS[name]
    seen: Counter[str] = Counter()
    for number in range(MIXES_PER_CASE):
        # NumPy's generators promise the same numbers everywhere, so a failing mix can be run again.
        rng = np.random.default_rng([number, page_size, get_args(EvictionPolicy).index(policy)])
        mix = make_mix(rng, backend, model, page_size)
        engine = run_mix(backend, model, mix, page_size, policy)
        for _, request in mix.requests:
            for index in range(request.n):
                key = request.request_id, index
                try:
                    seen["ties"] += compare(backend, request, index, engine.answers[key], mix.alone[key])
                except AssertionError as error:
                    raise AssertionError(f"mix {number}, sequence {key}: {error}") from error
        stats = engine.scheduler.stats
        seen["retracted"] += stats.num_retractions
        seen["cached"] += stats.num_cached_prompt_tokens
        seen["finished"] += stats.num_finished
        seen["evicted"] += engine.manager.stats().num_evicted_pages
    # Else the mixes would not try what they are for.
    assert seen["retracted"] > 0
    assert seen["evicted"] > 100 // page_size
    assert seen["cached"] > 1000
    assert seen["finished"] > 5 * MIXES_PER_CASE
    assert seen["ties"] <= 2
