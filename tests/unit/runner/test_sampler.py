"""The sampler against a plain twin that sorts and loops, and the promises that it makes on its own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phloem.errors import StepFailedError
from phloem.runner.sampler import LOGPROB_FLOOR, largest, sample, uniform
from phloem.types import LogitRow, SamplingParams


class Mask:
    """A grammar that allows a fixed set of tokens."""

    def __init__(self, allowed: frozenset[int]) -> None:
        self.allowed = allowed
        self.finished = False

    def fill(self, bitmask: NDArray[np.uint32]) -> None:
        for token in self.allowed:
            bitmask[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_id: int) -> None:
        raise AssertionError("the sampler only looks")


def row(history: list[int] | None = None, num_prompt: int = 0, **fields: Any) -> LogitRow:
    params = fields.pop("params", None) or SamplingParams(
        **{key: fields.pop(key) for key in list(fields) if key in SamplingParams.__dataclass_fields__ and key != "seed"}
    )
    defaults = {"row": 0, "position": 5, "seed": 0, "params": params, "num_prompt": num_prompt}
    return LogitRow(**(defaults | fields | {"history": np.array(history or [], np.int32)}))


def draw(logits: list[float] | NDArray[np.float32], one: LogitRow) -> int:
    return int(sample(np.array([logits], np.float32), [one]).token_ids[0])


def twin(logits: NDArray[np.float32], one: LogitRow) -> int:
    """The same rules, one token at a time."""
    p = one.params
    values = [float(x) for x in logits]
    output = one.history[one.num_prompt :].tolist()
    for token in set(one.history.tolist()):
        values[token] = (
            values[token] / p.repetition_penalty if values[token] > 0 else values[token] * p.repetition_penalty
        )
    for token in set(output):
        values[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    for token, bias in p.logit_bias.items():
        values[token] += bias
    allowed = set(range(len(values))) if one.masker is None else set(one.masker.allowed)  # type: ignore[attr-defined]
    allowed = allowed - set(one.banned) or allowed
    if p.temperature == 0.0:
        return min(allowed, key=lambda i: (-values[i], i))
    peak = max(values[i] for i in allowed)
    weights = {i: float(np.exp(np.float32((values[i] - peak) / p.temperature))) for i in sorted(allowed)}
    if p.top_k > 0:
        kept = sorted(weights, key=lambda i: (-values[i], i))[: p.top_k]
        weights = {i: weights[i] for i in sorted(kept)}
    if p.top_p < 1.0:
        weights = shortest(weights, {i: -w for i, w in weights.items()}, p.top_p)
    if p.min_p > 0.0:
        limit = p.min_p * max(weights.values())
        weights = {i: w for i, w in weights.items() if w >= limit}
    if p.typical_p < 1.0:
        weights = {i: w for i, w in weights.items() if w > 0.0}
        total = float(np.sum(list(weights.values())))
        share = {i: w / total for i, w in weights.items()}
        entropy = float(np.sum([q * -np.log(q) for q in share.values()]))
        kept_share = shortest(share, {i: abs(-np.log(q) - entropy) for i, q in share.items()}, p.typical_p)
        weights = {i: weights[i] for i in kept_share}
    target = uniform(one.seed, one.position) * sum(weights.values())
    passed = 0.0
    for i, weight in weights.items():
        passed += weight
        if passed > target:
            return i
    raise AssertionError("rounding at the very end")


def shortest(weights: dict[int, float], order: dict[int, float], share: float) -> dict[int, float]:
    needed = share * float(np.sum(list(weights.values())))
    kept: dict[int, float] = {}
    for i in sorted(weights, key=lambda i: (order[i], i)):
        kept[i] = weights[i]
        if sum(kept.values()) >= needed:
            break
    return {i: kept[i] for i in sorted(kept)}


@st.composite
def cases(pick: st.DrawFn) -> tuple[NDArray[np.float32], LogitRow]:
    size = pick(st.integers(2, 90))
    tokens = st.integers(0, size - 1)
    # Few distinct values make ties; the rest are random.
    values = st.sampled_from([0.0, 1.0, -2.0]) | st.floats(-20, 20, width=32)
    logits = np.array(pick(st.lists(values, min_size=size, max_size=size)), np.float32)
    history = pick(st.lists(tokens, max_size=12))
    params = SamplingParams(
        temperature=pick(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0])),
        top_k=pick(st.sampled_from([-1, 0, 1, 3, 64, 10_000])),
        top_p=pick(st.sampled_from([1.0, 0.999, 0.9, 0.31, 1e-6])),
        min_p=pick(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        typical_p=pick(st.sampled_from([1.0, 0.9, 0.23])),
        repetition_penalty=pick(st.sampled_from([1.0, 1.3, 0.5])),
        presence_penalty=pick(st.sampled_from([0.0, 0.6, -0.4])),
        frequency_penalty=pick(st.sampled_from([0.0, 0.3, -1.1])),
        logit_bias=pick(st.dictionaries(tokens, st.sampled_from([-100.0, 100.0, 1.5]), max_size=3)),
    )
    masker = Mask(frozenset(pick(st.sets(tokens, min_size=1)))) if pick(st.booleans()) else None
    one = row(
        history,
        pick(st.integers(0, len(history))),
        params=params,
        masker=masker,
        banned=tuple(pick(st.sets(tokens, max_size=4))),
        seed=pick(st.integers(-(1 << 63), (1 << 64) - 1)),
        position=pick(st.integers(0, 1 << 20)),
    )
    return logits, one


@settings(max_examples=600, deadline=None)
@given(case=cases())
def test_tokens_equal_the_twins(case: tuple[NDArray[np.float32], LogitRow]) -> None:
    logits, one = case
    before = logits.copy()
    assert draw(logits, one) == twin(logits, one)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("size", [200, 5000, 49_152])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 40},
        {"top_k": 3000},
        {"top_p": 0.95},
        {"top_p": 0.5, "temperature": 5.0},
        {"min_p": 0.1},
        {"typical_p": 0.8},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    ],
    ids=str,
)
def test_large_vocabularies_equal_the_twin(size: int, fields: dict[str, Any], rng: np.random.Generator) -> None:
    """These sizes take the paths that look at part of the logits only."""
    logits = (rng.standard_normal(size) * 3).round(3).astype(np.float32)
    for seed in range(3):
        one = row(seed=seed, **fields)
        if size > 10_000 and ("typical_p" in fields or fields.get("temperature")):
            continue  # the twin's sums are quadratic
        assert draw(logits, one) == twin(logits, one)


def test_each_row_is_computed_as_if_alone(rng: np.random.Generator) -> None:
    logits = (rng.standard_normal((16, 1000)) * 3).astype(np.float32)
    params = [SamplingParams(temperature=t, top_p=p, logprobs=3) for t in (0.0, 0.5, 1.0, 2.0) for p in (1.0, 0.9)] * 2
    rows = [row(params=p, seed=i, position=i) for i, p in enumerate(params)]
    together = sample(logits, rows)
    for i, one in enumerate(rows):
        alone = sample(logits[i : i + 1].copy(), [one])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
        assert alone.top[0] is not None
        assert np.array_equal(alone.top[0].logprobs, together.top[i].logprobs)  # type: ignore[union-attr]


def test_ties_go_to_the_lowest_id() -> None:
    assert draw([1, 3, 3, 3], row(temperature=0.0)) == 1
    assert draw([1, 3, 3, 3], row(temperature=0.0, banned=(1,))) == 2
    assert {draw([1, 3, 3, 3], row(top_k=2, seed=s)) for s in range(50)} == {1, 2}
    top = sample(np.array([[1, 3, 3, 3]], np.float32), [row(temperature=0.0, logprobs=2)]).top[0]
    assert top is not None
    assert top.token_ids.tolist() == [1, 2]


def test_the_draw_depends_on_seed_and_position_alone(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(50).astype(np.float32)
    one = row(seed=3, position=9)
    assert draw(logits, one) == draw(logits, dataclasses.replace(one, history=np.arange(9, dtype=np.int32), row=4))
    drawn = {draw(logits, row(seed=s, position=p)) for s in range(20) for p in range(20)}
    assert len(drawn) > 20


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    rows = [row(seed=s, position=p) for s in range(100) for p in range(100)]
    counts = np.bincount(sample(np.tile(logits, (len(rows), 1)), rows).token_ids, minlength=4) / len(rows)
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=0.02)


def test_uniform_numbers_are_spread_evenly_along_both_arguments() -> None:
    for numbers in ([uniform(s, 7) for s in range(4000)], [uniform(7, p) for p in range(4000)]):
        assert all(0.0 <= number < 1.0 for number in numbers)
        histogram = np.histogram(numbers, 20, (0, 1))[0]
        assert ((histogram - 200.0) ** 2 / 200.0).sum() < 45.0  # chi-square, 19 degrees of freedom: p = 0.0007
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert uniform(-1, 0) == uniform((1 << 64) - 1, 0)
    assert len({uniform(s, p) for s in range(100) for p in range(100)}) == 10_000
    assert len({uniform(a, b) for a, b in ((1, 2), (2, 1), (0, 3), (3, 0))}) == 4


def test_seed_zero_is_pinned() -> None:
    """A changed generator would change every seeded answer: this number may not move."""
    assert uniform(0, 0) == 0.6524484863740322


def test_logprobs_are_natural_and_of_the_raw_distribution(rng: np.random.Generator) -> None:
    logits = (rng.standard_normal(300) * 4).astype(np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    one = row(logprobs=5, temperature=0.3, top_k=2, logit_bias={7: 50.0}, repetition_penalty=1.5, history=[7, 8])
    result = sample(logits[None], [one])
    assert result.token_ids[0] == 7
    assert result.logprobs[0] == pytest.approx(exact[7], abs=1e-5)
    assert result.logprobs.dtype == np.float32
    assert result.token_ids.dtype == np.int32
    top = result.top[0]
    assert top is not None
    assert top.token_ids.tolist() == np.argsort(-exact, kind="stable")[:5].tolist()
    np.testing.assert_allclose(top.logprobs, np.sort(exact)[::-1][:5], atol=1e-5)


def test_logprobs_of_impossible_tokens_are_finite() -> None:
    logits = np.array([[0.0, -math.inf, -3e38]], np.float32)
    result = sample(logits, [row(logprobs=3, temperature=0.0)])
    assert result.top[0] is not None
    assert result.top[0].logprobs.tolist() == [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR]
    scored = sample(logits, [row(target=1)])
    assert scored.token_ids.tolist() == [1]
    assert scored.logprobs.tolist() == [LOGPROB_FLOOR]


def test_what_is_not_asked_for_is_not_reported() -> None:
    logits = np.array([[1.0, 2.0]] * 4, np.float32)
    rows = [row(), row(logprobs=0), row(target=0), row(target=0, prompt_logprobs=1, logprobs=2)]
    result = sample(logits, rows)
    assert result.top[0] is None
    assert result.logprobs[0] == 0.0
    assert result.logprobs[1] < 0.0
    assert result.top[1] is not None
    assert len(result.top[1].token_ids) == 0
    assert result.top[2] is None
    assert result.logprobs[2] == pytest.approx(-math.log1p(math.e), abs=1e-6)
    assert result.top[3] is not None
    assert result.top[3].token_ids.tolist() == [1]


def test_no_rows_give_an_empty_result() -> None:
    result = sample(np.empty((0, 5), np.float32), [])
    assert len(result.token_ids) == len(result.logprobs) == len(result.top) == 0


def test_the_grammar_outranks_bans_that_leave_nothing() -> None:
    logits = [1.0, 2.0, 3.0]
    assert draw(logits, row(masker=Mask(frozenset((0, 1))), banned=(1,), temperature=0.0)) == 0
    assert draw(logits, row(masker=Mask(frozenset((0,))), banned=(0,), temperature=0.0)) == 0
    assert draw(logits, row(banned=(0, 1, 2), temperature=0.0)) == 2
    with pytest.raises(StepFailedError, match="allows no token"):
        draw(logits, row(masker=Mask(frozenset())))


def test_the_mask_reaches_the_last_token_of_a_vocabulary_that_fills_no_word() -> None:
    assert draw(np.zeros(70, np.float32), row(masker=Mask(frozenset((69,))))) == 69


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_the_step(bad: float) -> None:
    with pytest.raises(StepFailedError, match="not finite"):
        draw([0.0, bad], row())
    with pytest.raises(StepFailedError, match="not finite"):
        draw([-math.inf, -math.inf], row(temperature=0.0))


def test_a_wrong_number_of_rows_is_our_bug() -> None:
    with pytest.raises(ValueError, match="one row of logits per LogitRow"):
        sample(np.zeros((2, 3), np.float32), [row()])


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-7])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert draw([1.0, 1.1, 1.05], row(temperature=temperature)) == 1


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0]) | st.floats(-1e6, 1e6, width=32), min_size=1, max_size=700),
    count=st.integers(-1, 40),
)
def test_largest_is_a_stable_sort(values: list[float], count: int) -> None:
    array = np.array(values, np.float32)
    expected = sorted(range(len(values)), key=lambda i: (-array[i], i))[: max(count, 0)]
    assert largest(array, count).tolist() == expected


def test_largest_of_many(rng: np.random.Generator) -> None:
    values = rng.integers(0, 300, 49_152).astype(np.float32)
    for count in (1, 20, 150, 200, 5000, 49_152, 60_000):
        assert largest(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()
