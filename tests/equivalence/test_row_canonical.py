"""A row's logits are a function of its token prefix: bit for bit, whatever else the step computes and how.

The oracle computes one row at a time, on one thread, without grouping, in fresh slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phloem._kernels import supported_isas
from phloem.models.spec import ModelSpec
from phloem.runner.native_runner import NativeRunner
from tests.kernels.reference import random_spec, random_weights, step_plan

NUM_SLOTS = 2048
PREFIX = 330  # crosses five tiles and one super


def runner(spec: ModelSpec, **changes: Any) -> NativeRunner:
    settings: dict[str, Any] = {"num_slots": NUM_SLOTS, "num_threads": 1, "group_shared_prefixes": False}
    return NativeRunner(spec, random_weights(spec), **(settings | changes))


def sequences(rng: np.random.Generator, vocab: int, count: int) -> list[list[int]]:
    """Prompts that share prefixes of several lengths, as in a tree."""
    trunk = rng.integers(0, vocab, PREFIX).tolist()
    cuts = rng.choice([40, 64, 128, 200, 256, PREFIX], count)
    return [trunk[:cut] + rng.integers(0, vocab, rng.integers(1, 80)).tolist() for cut in cuts]


class Slots:
    """Random slots per position; equal prefixes get equal slots, as the radix tree gives them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._free = rng.permutation(NUM_SLOTS - 64).astype(np.int32).tolist()
        self._of: dict[tuple[int, ...], int] = {}

    def table(self, tokens: list[int]) -> np.ndarray:
        slots = []
        for end in range(1, len(tokens) + 1):
            key = tuple(tokens[:end])
            if key not in self._of:
                self._of[key] = self._free.pop()
            slots.append(self._of[key])
        return np.array(slots, np.int32)


def one_at_a_time(oracle: NativeRunner, tokens: list[int]) -> np.ndarray:
    table = np.arange(len(tokens), dtype=np.int32)
    rows = [oracle.logits(step_plan([([token], p, table[: p + 1])])) for p, token in enumerate(tokens)]
    return np.concatenate(rows)


def run_in_chunks(
    subject: NativeRunner, prompts: list[list[int]], rng: np.random.Generator, most: int
) -> list[dict[int, np.ndarray]]:
    """Compute all prompts in steps of random composition; logits by position. Cached prefixes are skipped at random."""
    slots = Slots(rng)
    tables = [slots.table(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    written: set[int] = set()
    results: list[dict[int, np.ndarray]] = [{} for _ in prompts]
    while any(done[i] < len(prompts[i]) for i in range(len(prompts))):
        chosen = [i for i in range(len(prompts)) if done[i] < len(prompts[i]) and rng.random() < 0.7]
        parts = []
        for i in chosen:
            cached = done[i]
            while cached < len(prompts[i]) - 1 and int(tables[i][cached]) in written and rng.random() < 0.98:
                cached += 1  # a cache hit: the row need not be computed
            done[i] = cached + int(min(rng.integers(1, most + 1), len(prompts[i]) - cached))
            parts.append((i, cached, done[i]))
        if not parts:
            continue
        plan = step_plan([(prompts[i][a:b], a, tables[i][:b]) for i, a, b in parts], written)
        logits = subject.logits(plan)
        row = 0
        for i, a, b in parts:
            for p in range(a, b):
                results[i][p] = logits[row]
                row += 1
            written |= {int(slot) for slot in tables[i][a:b]}
    return results


def check(subject: NativeRunner, oracle: NativeRunner, seed: int, most: int, count: int = 4) -> None:
    rng = np.random.default_rng(seed)
    prompts = sequences(rng, oracle.vocab_size, count)
    results = run_in_chunks(subject, prompts, rng, most)
    for prompt, result in zip(prompts, results, strict=True):
        expected = one_at_a_time(oracle, prompt)
        assert np.isfinite(expected).all()
        assert len(prompt) - 1 in result
        for p, logits in result.items():
            np.testing.assert_array_equal(logits.view(np.uint32), expected[p].view(np.uint32), err_msg=f"row {p}")


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("kv_cache_dtype", ["f16", "f32", "int8"])
def test_any_batch_gives_the_bits_of_one_row_at_a_time(isa: str, kv_cache_dtype: str) -> None:
    spec = random_spec()
    settings: dict[str, Any] = {"isa": isa, "kv_cache_dtype": kv_cache_dtype}
    oracle = runner(spec, **settings)
    subject = runner(spec, **settings, num_threads=2, group_shared_prefixes=True)
    check(subject, oracle, seed=1, most=7)
    check(subject, oracle, seed=2, most=200)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("grouped", [False, True])
def test_threads_and_grouping_do_not_change_bits(threads: int, grouped: bool) -> None:
    spec = random_spec()
    subject = runner(spec, num_threads=threads, group_shared_prefixes=grouped)
    check(subject, runner(spec), seed=3 + threads, most=90)


@pytest.mark.parametrize("quantization", ["none", "q8", "q4"])
def test_weight_formats(quantization: str) -> None:
    spec = random_spec(hidden_size=64, intermediate_size=96, head_dim=32, num_heads=4, qk_norm=False)
    subject = runner(spec, quantization=quantization, num_threads=2, group_shared_prefixes=True)
    check(subject, runner(spec, quantization=quantization), seed=9, most=120)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations_and_tied_embeddings(activation: str) -> None:
    spec = random_spec(activation=activation, tie_word_embeddings=True, num_heads=2, num_kv_heads=2, head_dim=8)
    check(runner(spec, num_threads=2), runner(spec), seed=10, most=50)


def test_many_rows_that_share_a_prefix() -> None:
    """Decode rows of 20 sequences on one 300-token prefix: grouped tiles, long and short private tails."""
    spec = random_spec()
    rng = np.random.default_rng(5)
    trunk = rng.integers(0, spec.vocab_size, 300).tolist()
    prompts = [trunk + rng.integers(0, spec.vocab_size, 1 + 3 * (i % 5)).tolist() for i in range(20)]
    slots = Slots(rng)
    tables = [slots.table(prompt) for prompt in prompts]
    plan = step_plan([(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)])
    decode = [([int(rng.integers(0, spec.vocab_size))], len(p), t) for p, t in zip(prompts, tables, strict=True)]
    decode = [(token, at, np.append(t, np.int32(NUM_SLOTS - 1 - i))) for i, (token, at, t) in enumerate(decode)]
    outputs = []
    for threads, grouped in ((1, False), (1, True), (2, True)):
        subject = runner(spec, num_threads=threads, group_shared_prefixes=grouped)
        first = subject.logits(plan)
        outputs.append(np.concatenate([first, subject.logits(step_plan(decode))]))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
