"""AsyncEngine: streams, stop strings, aborts, limits and failures, without a model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phloem.config import EngineConfig
from phloem.engine.async_engine import AsyncEngine
from phloem.errors import (
    ContextLengthError,
    EngineUnavailableError,
    InvalidRequestError,
    PoolCapacityError,
    QueueFullError,
    RequestTimeoutError,
    StepFailedError,
)
from phloem.kv.manager import KVCacheManager
from phloem.runner.null_runner import NullRunner, next_token
from phloem.types import FinishReason, Request, SamplingParams, StepPlan, StepResult, TextDelta
from tests.helpers.fake_model import VOCAB, fake_parts


def request(request_id: str, prompt: str | list[int], n: int = 1, **params: Any) -> Request:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return Request(request_id, np.array(ids, dtype=np.int32), SamplingParams(seed=1, **params), n=n)


async def collect(engine: AsyncEngine, item: Request) -> list[TextDelta]:
    async with aclosing(await engine.submit(item)) as stream:
        return [delta async for delta in stream]


class SlowRunner(NullRunner):
    def step(self, plan: StepPlan) -> StepResult:
        import time

        time.sleep(0.005)
        return super().step(plan)


class CheckingRunner(NullRunner):
    """Checks the cache in each step, on the thread that owns it."""

    def __init__(self, manager: KVCacheManager, *, fail_at: frozenset[int]) -> None:
        super().__init__(num_slots=manager.num_slots, vocab_size=VOCAB, fail_at=fail_at)
        self._manager = manager

    def step(self, plan: StepPlan) -> StepResult:
        self._manager.check_invariants()
        return super().step(plan)


class BrokenRunner(NullRunner):
    """Returns a result that the scheduler must refuse: a bug of ours, not of a request."""

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        result.step_id += 1
        return result


async def test_stream_ends_once_and_counts_tokens() -> None:
    engine = AsyncEngine(fake_parts())
    deltas = await collect(engine, request("r", "hello", max_tokens=10))
    assert sum(len(delta.token_ids) for delta in deltas) == 10
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
    assert deltas[-1].num_output_tokens == 10
    assert deltas[-1].num_prompt_tokens == 5
    again = await collect(engine, request("r", "hello", max_tokens=10))
    assert again[-1].cached_tokens == 4
    assert "".join(delta.text for delta in again) == "".join(delta.text for delta in deltas)
    engine.close()


async def test_n_sequences_each_end() -> None:
    engine = AsyncEngine(fake_parts())
    deltas = await collect(engine, request("r", "hello", n=4, max_tokens=6))
    ends = [delta.index for delta in deltas if delta.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]
    engine.close()


async def test_stop_string_ends_the_stream_and_the_engine_stops_computing() -> None:
    engine = AsyncEngine(fake_parts(runner=SlowRunner(num_slots=4096, vocab_size=VOCAB)))
    free_run = await collect(engine, request("a", "hello", max_tokens=40))
    text = "".join(delta.text for delta in free_run)
    stop = text[4:6]
    deltas = await collect(engine, request("b", "hello", max_tokens=500, stop=(stop,)))
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
    await asyncio.sleep(0.1)
    assert engine.stats()["num_running"] == 0
    engine.close()


async def test_closing_a_stream_frees_its_place() -> None:
    engine = AsyncEngine(fake_parts(runner=SlowRunner(num_slots=4096, vocab_size=VOCAB), max_running=1))
    async with aclosing(await engine.submit(request("long", "hello", max_tokens=900))) as stream:
        await anext(stream)
    deltas = await asyncio.wait_for(collect(engine, request("next", "other", max_tokens=3)), 2.0)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert engine.stats()["kv_num_pages_protected"] == 0
    engine.close()


async def test_limits_are_refused_with_both_numbers() -> None:
    engine = AsyncEngine(fake_parts(num_pages=256, max_model_len=512))
    with pytest.raises(ContextLengthError, match=r"512 tokens.*512"):
        await engine.submit(request("a", [1] * 512))
    with pytest.raises(PoolCapacityError, match=r"400 tokens.*256"):
        await engine.submit(request("b", [1] * 400))
    for bad in ([], [1, VOCAB], [-1]):
        with pytest.raises(InvalidRequestError):
            await engine.submit(request("c", bad))
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        await engine.submit(request("d", "x", logit_bias={9999: 1.0}))
    assert (await collect(engine, request("e", [1] * 256)))[-1].finish_reason is FinishReason.LENGTH
    assert engine.num_live == 0
    engine.close()


async def test_queue_full_is_refused_at_once() -> None:
    slow = SlowRunner(num_slots=4096, vocab_size=VOCAB)
    engine = AsyncEngine(fake_parts(runner=slow, max_running=1, max_waiting=2))
    streams = [await engine.submit(request("r0", "hello", max_tokens=50))]
    await anext(streams[0])
    streams += [await engine.submit(request(f"r{i}", "hello", max_tokens=50)) for i in (1, 2)]
    with pytest.raises(QueueFullError):
        await engine.submit(request("r3", "hello", max_tokens=50))
    for stream in streams:
        await stream.aclose()
    engine.close()


async def test_timeout_ends_with_an_error() -> None:
    slow = SlowRunner(num_slots=4096, vocab_size=VOCAB)
    engine = AsyncEngine(fake_parts(runner=slow, config=EngineConfig(request_timeout_s=0.1)))
    deltas = await collect(engine, request("r", "hello", max_tokens=900))
    assert isinstance(deltas[-1].error, RequestTimeoutError)
    engine.close()


async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    engine = AsyncEngine(fake_parts(runner=NullRunner(num_slots=4096, vocab_size=VOCAB, fail_at=frozenset({3}))))
    deltas = await collect(engine, request("a", "hello", max_tokens=20))
    assert isinstance(deltas[-1].error, StepFailedError)
    assert (await collect(engine, request("b", "hello", max_tokens=20)))[-1].finish_reason is FinishReason.LENGTH
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_fails_everything_and_nothing_hangs() -> None:
    engine = AsyncEngine(fake_parts(runner=BrokenRunner(num_slots=4096, vocab_size=VOCAB)))
    deltas = await asyncio.wait_for(collect(engine, request("a", "hello", n=2, max_tokens=20)), 2.0)
    assert [type(delta.error) for delta in deltas] == [EngineUnavailableError] * 2
    assert engine.state() == "failed"
    with pytest.raises(EngineUnavailableError):
        await engine.submit(request("b", "hello"))
    engine.close()


async def test_drain_lets_live_requests_end() -> None:
    engine = AsyncEngine(fake_parts(runner=SlowRunner(num_slots=4096, vocab_size=VOCAB)))
    task = asyncio.create_task(collect(engine, request("a", "hello", max_tokens=30)))
    await asyncio.sleep(0.02)
    drained = asyncio.create_task(engine.drain(5.0))
    await asyncio.sleep(0.02)
    with pytest.raises(EngineUnavailableError):
        await engine.submit(request("b", "hello"))
    assert (await task)[-1].finish_reason is FinishReason.LENGTH
    assert await drained
    assert engine.state() == "stopped"


async def test_stop_answers_what_is_live() -> None:
    engine = AsyncEngine(fake_parts(runner=SlowRunner(num_slots=4096, vocab_size=VOCAB)))
    task = asyncio.create_task(collect(engine, request("a", "hello", max_tokens=900)))
    await asyncio.sleep(0.05)
    assert not await engine.drain(0.05)
    assert isinstance((await task)[-1].error, EngineUnavailableError)


async def test_flush_during_a_stream_is_safe() -> None:
    engine = AsyncEngine(fake_parts(runner=SlowRunner(num_slots=4096, vocab_size=VOCAB)))
    expected = await collect(engine, request("a", "hello", max_tokens=60))
    await engine.flush_cache()
    task = asyncio.create_task(collect(engine, request("b", "hello", max_tokens=60)))
    for _ in range(5):
        await asyncio.sleep(0.02)
        await engine.flush_cache()
    flushed = await task
    assert [d.token_ids for d in flushed] == [d.token_ids for d in expected]
    await engine.flush_cache()
    assert (await collect(engine, request("c", "hello", max_tokens=2)))[-1].cached_tokens == 0
    engine.close()


async def test_disconnects_aborts_and_failing_steps_leave_nothing_behind() -> None:
    """Readers go away at any moment, some steps fail, the pool is tiny: the others get one answer each, their own."""
    rng = random.Random(0)
    parts = fake_parts(num_pages=300, max_model_len=128, max_running=6)
    manager = parts.scheduler.manager
    runner: Any = CheckingRunner(manager, fail_at=frozenset(rng.sample(range(50, 3000), 60)))
    engine = AsyncEngine(replace(parts, runner=runner))
    ends: Counter[str] = Counter()

    async def client(i: int, fork_of: list[int]) -> list[int]:
        prompt = [*fork_of[:60], *(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30)))]
        patience = rng.choice([0, 1, 3, 1000, 1000])
        drawn: list[list[int]] = [[], []]
        item = request(f"r{i}", prompt, n=rng.choice([1, 2]), max_tokens=rng.randint(1, 20), ignore_eos=True)
        async with aclosing(await engine.submit(item)) as stream:
            if rng.random() < 0.1:
                await engine.abort(item.request_id)
            num_seen = 0
            while num_seen < patience and (delta := await anext(stream, None)) is not None:
                num_seen += 1
                drawn[delta.index] += delta.token_ids
                if delta.finish_reason is not None:
                    ends[delta.finish_reason] += 1
        ends["left"] += not stream.output.finished
        expected = list(prompt)
        for token in drawn[0]:
            expected.append(next_token(np.array(expected, dtype=np.int32), 1, VOCAB))
            assert token == expected[-1]
        return prompt + drawn[0]

    async def agent(number: int) -> None:
        history: list[int] = []
        for turn in range(15):
            history = await client(number * 100 + turn, history if rng.random() < 0.7 else [])

    await asyncio.wait_for(asyncio.gather(*(agent(number) for number in range(20))), 120.0)
    assert engine.num_live == 0
    assert await engine.drain(5.0)
    assert manager.stats().num_pages_protected == 0
    assert {"left", "length", "abort", "error"} <= set(ends)
