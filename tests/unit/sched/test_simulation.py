"""Short forms of `phloem bench sched`: reuse against the ideal, chaos, and cold requests under hot load."""

from __future__ import annotations

import random

import numpy as np
import pytest

from phloem.bench.sched import Simulation, belady_hits, cold_under_hot, ideal_hits, run_agents
from phloem.kv.manager import KVCacheManager
from phloem.types import FinishReason, SamplingParams
from tests.helpers.drive import Drive, make_request


def test_agents_reuse_all_that_an_infinite_cache_would() -> None:
    sim = Simulation(num_pages=60000, max_running=16)
    run_agents(sim, agents=30, turns=6, system=500, user=40)
    cached = sum(item.cached_tokens for item in sim.finished)
    assert len(sim.finished) == 180
    assert cached >= 0.99 * ideal_hits(sim.finished)


def test_short_pools_come_near_the_offline_optimum() -> None:
    sim = Simulation(num_pages=6000, max_running=8)
    run_agents(sim, agents=30, turns=6, system=500, user=40)
    cached = sum(item.cached_tokens for item in sim.finished)
    optimum = belady_hits(sim.finished, 6000, block=1)
    assert cached < ideal_hits(sim.finished), "the pool is meant to be too small"
    assert cached >= 0.75 * optimum


def test_belady_on_a_case_worked_by_hand() -> None:
    """Three prompts of two tokens, capacity two, in the order a b a: the optimum keeps a and lets b go."""
    sim = Simulation(num_pages=100)
    for name, tokens in (("a1", [1, 2, 3]), ("b", [7, 8, 9]), ("a2", [1, 2, 3])):
        sim.add(name, np.array(tokens, dtype=np.int32), 1)
        while sim.scheduler.has_work:
            sim.step()
    assert ideal_hits(sim.finished) == 3
    assert belady_hits(sim.finished, capacity=3, block=1) == 2


def test_cold_requests_under_hot_load_wait_little_longer_than_in_order_of_arrival() -> None:
    cold_fcfs, _, _ = cold_under_hot("fcfs", requests=300)
    _, _, rate_lpm = cold_under_hot("lpm", requests=300)
    cold, _, rate = cold_under_hot("cache-aware", requests=300)
    assert cold <= 3.0 * cold_fcfs
    assert rate >= 0.98 * rate_lpm


@pytest.mark.parametrize("page_size", [1, 16])
def test_chaos(page_size: int) -> None:
    """Aborts, failing steps, deadlines, forks, tiny pools: one terminal answer each, nothing leaks, nothing hangs."""
    rng = random.Random(page_size)
    drive = Drive(
        KVCacheManager(num_pages=600 // page_size, page_size=page_size, evict_watermark=0.05),
        fail_at=rng.sample(range(4000), 60),
        max_model_len=200,
        max_running=12,
        chunk_size=48,
    )
    trunks = [[rng.randrange(1000) for _ in range(80)] for _ in range(6)]
    sent = 0
    while sent < 1500 or drive.scheduler.has_work:
        if sent < 1500 and len(drive.scheduler.backlog) < 40:
            trunk = rng.choice(trunks)[: rng.randint(1, 80)]
            prompt = trunk + [rng.randrange(1000) for _ in range(rng.randint(0, 40))]
            drive.add(
                make_request(
                    f"r{sent}",
                    prompt,
                    params=SamplingParams(max_tokens=rng.randint(0, 40), seed=rng.randrange(9)),
                    n=rng.choice([1, 1, 1, 2, 4]),
                    priority=rng.choice([0, 0, 0, 1]),
                    client=rng.choice("abc"),
                    deadline_s=drive.now_s + 30 if rng.random() < 0.05 else None,
                )
            )
            sent += 1
        if rng.random() < 0.1:
            drive.scheduler.abort(f"r{rng.randrange(sent)}")
        drive.step()
        assert drive.now_s < 60000, "it hangs"
    drive.check_answers()
    assert drive.manager.stats().num_pages_protected == 0
    ends = [answer.finish_reason for answer in drive.answers.values()]
    assert {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR} <= set(ends)
    assert drive.scheduler.stats.num_retractions > 0
