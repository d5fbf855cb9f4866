"""Short forms of `phloem bench sched`: reuse against the ideal, chaos, and cold requests under hot load."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.bench.chaos import chaos, ends
from phloem.bench.sched import Simulation, belady_hits, cold_under_hot, ideal_hits, run_agents
from phloem.types import FinishReason


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
    fcfs, lpm, ours = (cold_under_hot(policy, requests=300) for policy in ("fcfs", "lpm", "cache-aware"))
    assert ours.cold_p99 <= 3.0 * fcfs.cold_p99
    assert ours.rate >= 0.98 * lpm.rate


def test_hot_requests_start_sooner_than_in_order_of_arrival_when_the_load_can_be_served() -> None:
    fcfs = cold_under_hot("fcfs", load=0.9, requests=400)
    ours = cold_under_hot("cache-aware", load=0.9, requests=400)
    assert ours.hot_p50 <= 0.4 * fcfs.hot_p50
    assert ours.cold_p99 <= 1.5 * fcfs.cold_p99


@pytest.mark.parametrize("page_size", [1, 16])
def test_chaos(page_size: int) -> None:
    """Aborts, failing steps, deadlines, forks, tiny pools: one terminal answer each, nothing leaks, nothing hangs."""
    drive = chaos(1500, page_size=page_size, seed=page_size)
    assert {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR} <= set(ends(drive))
    assert drive.scheduler.stats.num_retractions > 0
