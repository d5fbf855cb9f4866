"""The demo model on the native path: alone, batched, chunked, cached, retracted and n > 1 runs agree bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phloem.kv.manager import KVCacheManager
from phloem.models.load import LoadedModel, load_model
from phloem.runner.native_runner import NativeRunner
from phloem.types import Request, SamplingParams
from tests.equivalence.test_cold_equals_warm import MAX_LEN, Answer, Engine

QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers.",
    "Why is the sky blue?",
    "Name three rivers in Asia.",
)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model(demo_model: Path) -> LoadedModel:
    return load_model(demo_model, max_len=MAX_LEN)


def requests(model: LoadedModel, *, n: int = 1) -> list[Request]:
    found = []
    for i, question in enumerate(QUESTIONS):
        prompt = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        params = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.0 if i % 2 else 0.9, top_p=0.95, seed=i, logprobs=3
        )
        found.append(Request(f"r{i}", np.asarray(prompt, dtype=np.int32), params, n=n))
    return found


def run(model: LoadedModel, jobs: list[Request], *, pages: int = MAX_LEN, **options: int) -> Engine:
    runner = NativeRunner(
        model.spec, model.weights, num_slots=pages, max_len=MAX_LEN, num_threads=options.pop("threads", 2)
    )
    engine = Engine(runner, KVCacheManager(num_pages=pages), **options)
    engine.scheduler.estimate.ratio = 0.0
    for job in jobs:
        engine.add(job)
    while engine.scheduler.has_work:
        engine.step()
    return engine


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[Answer]:
    return [run(model, [job]).answers[job.request_id, 0] for job in requests(model)]


def assert_same(engine: Engine, alone: list[Answer], names: list[tuple[str, int]]) -> None:
    engine.check_idle()
    for i, name in enumerate(names):
        assert engine.answers[name].token_ids == alone[i].token_ids
        assert engine.answers[name].logprobs == alone[i].logprobs, "a bit of a logprob differs"


NAMES = [(f"r{i}", 0) for i in range(len(QUESTIONS))]


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
@pytest.mark.parametrize("threads", [1, 2])
def test_batched_and_chunked(model: LoadedModel, alone: list[Answer], chunk_size: int, threads: int) -> None:
    assert_same(run(model, requests(model), chunk_size=chunk_size, threads=threads), alone, NAMES)


def test_cached(model: LoadedModel, alone: list[Answer]) -> None:
    engine = run(model, requests(model))
    engine.answers.clear()
    for job in requests(model):
        engine.add(job)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.stats.num_cached_prompt_tokens > 0
    assert_same(engine, alone, NAMES)


def test_retracted(model: LoadedModel, alone: list[Answer]) -> None:
    engine = run(model, requests(model), pages=70, chunk_size=64)
    assert engine.scheduler.stats.num_retractions > 0
    assert_same(engine, alone, NAMES)


def test_first_of_several_sequences(model: LoadedModel, alone: list[Answer]) -> None:
    assert_same(run(model, requests(model, n=3)), alone, NAMES)


def test_interleaved_groups_in_one_step(model: LoadedModel) -> None:
    """Two groups that share 70 tokens each, arriving in turn: the steps put each together, and no bit differs."""
    heads = [(np.arange(70, dtype=np.int32) * 7 + 11 * group) % 900 + 100 for group in range(2)]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=2)
    jobs = []
    for i in range(8):
        prompt = np.append(heads[i % 2], np.int32(200 + i)).astype(np.int32)
        jobs.append(Request(f"r{i}", prompt, params))
    singly = [run(model, [job]).answers[job.request_id, 0] for job in jobs]
    assert_same(run(model, jobs, pages=4 * MAX_LEN), singly, [(job.request_id, 0) for job in jobs])
