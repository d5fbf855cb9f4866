"""`phloem bench sched`: the scheduler and the tree under load, without a model.

Owns simulated workloads on NullRunner under a virtual clock: a step takes a + b * rows seconds. Must not know HTTP or
kernels. All figures but the time per step are exact and repeat from the seed.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from phloem.bench.chaos import chaos, ends
from phloem.config import EvictionPolicy, SchedulePolicy
from phloem.kv.manager import KVCacheManager
from phloem.runner.null_runner import NullRunner
from phloem.sched.scheduler import Scheduler
from phloem.types import Int32Array, Request, SamplingParams

VOCAB = 30000
STEP_SECONDS = 0.004
ROW_SECONDS = 0.0015
"""About what the demo model takes on two AVX2 cores: 4 ms a step and 1.5 ms a row."""


@dataclass(slots=True)
class Finished:
    """One request after its end, on the virtual clock."""

    name: str
    kind: str
    arrival_s: float
    ttft_s: float
    num_prompt: int
    cached_tokens: int
    tokens: Int32Array


@dataclass
class Simulation:
    """Scheduler, cache and NullRunner under a virtual clock."""

    num_pages: int
    policy: SchedulePolicy = "cache-aware"
    eviction_policy: EvictionPolicy = "lru"
    max_running: int = 16
    chunk_size: int = 512
    now_s: float = 0.0
    busy_s: float = 0.0
    finished: list[Finished] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = KVCacheManager(num_pages=self.num_pages, eviction_policy=self.eviction_policy)
        self.runner = NullRunner(num_slots=self.num_pages, vocab_size=VOCAB, attend=False)
        self.scheduler = Scheduler(
            self.manager,
            max_model_len=16384,
            max_running=self.max_running,
            max_waiting=1 << 20,
            chunk_size=self.chunk_size,
            policy=self.policy,
        )
        self.scheduler.tokens_per_s = 1.0 / ROW_SECONDS
        self._live: dict[str, tuple[Request, str, list[int], float]] = {}

    def add(self, name: str, prompt: Int32Array, max_tokens: int, *, kind: str = "", client: str = "") -> None:
        """Queue a request now."""
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens, seed=len(name)), client=client)
        request.arrival_s = self.now_s
        self.scheduler.add(request, now_s=self.now_s)
        self._live[name] = (request, kind, [], -1.0)

    def step(self) -> list[Finished]:
        """One step; returns the requests that ended in it."""
        began = time.perf_counter()
        plan = self.scheduler.schedule(now_s=self.now_s)
        self.busy_s += time.perf_counter() - began
        if plan is None:
            self.now_s += STEP_SECONDS
            return []
        result = self.runner.step(plan)
        self.now_s += STEP_SECONDS + ROW_SECONDS * plan.num_rows
        began = time.perf_counter()
        deltas = self.scheduler.update(result)
        self.busy_s += time.perf_counter() - began
        ended = []
        for delta in deltas:
            request, kind, output, first_s = self._live[delta.request_id]
            if not output:
                first_s = self.now_s - request.arrival_s
                self._live[delta.request_id] = (request, kind, output, first_s)
            output += delta.token_ids
            if delta.finish_reason is not None:
                del self._live[delta.request_id]
                tokens = np.concatenate([request.prompt, np.array(output, dtype=np.int32)])
                ended.append(
                    Finished(
                        delta.request_id,
                        kind,
                        request.arrival_s,
                        first_s,
                        len(request.prompt),
                        delta.cached_tokens,
                        tokens,
                    )
                )
        self.finished += ended
        return ended


def run_agents(
    sim: Simulation,
    *,
    agents: int,
    turns: int,
    seed: int = 0,
    system: int = 1500,
    user: int = 100,
    output: int = 32,
) -> None:
    """Closed loop: each agent sends its next turn when the last one ended."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB, system, dtype=np.int32)

    def turn(agent: int, number: int, history: Int32Array) -> None:
        prompt = np.concatenate([history, rng.integers(0, VOCAB, user, dtype=np.int32)])
        sim.add(f"{agent}/{number}", prompt, output, client=f"agent{agent}")

    for agent in range(agents):
        turn(agent, 0, prefix)
    while sim.scheduler.has_work:
        for done in sim.step():
            agent, number = map(int, done.name.split("/"))
            if number + 1 < turns:
                turn(agent, number + 1, done.tokens)


def ideal_hits(finished: Iterable[Finished]) -> int:
    """Prompt tokens that an infinite token-level cache would have reused, in the order of completion."""
    seen: set[bytes] = set()
    total = 0
    for item in finished:
        for block in _prefix_blocks(item.tokens[: item.num_prompt], 1):
            if block not in seen:
                break
            total += 1
        seen.update(_prefix_blocks(item.tokens[:-1], 1))
    return total


def belady_hits(finished: list[Finished], capacity: int, block: int = 16) -> int:
    """Prompt tokens that the offline optimum would reuse with `capacity` tokens, in the order of completion.

    Evicts the prefix block whose next use is farthest, deepest first; optimal for blocks of equal size, since a
    parent is never used later than its child. O(blocks log blocks).
    """
    paths = [[*_prefix_blocks(item.tokens[:-1], block)] for item in finished]
    next_use: list[list[float]] = []
    upcoming: dict[bytes, float] = {}
    for time_index in range(len(paths) - 1, -1, -1):
        next_use.append([upcoming.get(key, np.inf) for key in paths[time_index]])
        upcoming.update(dict.fromkeys(paths[time_index], float(time_index)))
    next_use.reverse()
    cached: dict[bytes, float] = {}
    heap: list[tuple[float, int, bytes]] = []
    hits = 0
    for item, path, uses in zip(finished, paths, next_use, strict=True):
        for key in path[: (item.num_prompt - 1) // block]:
            if key not in cached:
                break
            hits += block
        for depth, (key, use) in enumerate(zip(path, uses, strict=True)):
            cached[key] = use
            heapq.heappush(heap, (-use, -depth, key))
        while len(cached) > capacity // block:
            use, _, key = heapq.heappop(heap)
            if cached.get(key) == -use:
                del cached[key]
    return hits


def _prefix_blocks(tokens: Int32Array, block: int) -> Iterator[bytes]:
    """A digest of each prefix of whole blocks, shortest first."""
    digest = b""
    raw = tokens.tobytes()
    for start, end in pairwise(range(0, len(raw) + 1, 4 * block)):
        digest = (hash(digest + raw[start:end]) & (1 << 64) - 1).to_bytes(8, "little")
        yield digest


def step_overhead(*, running: int, waiting: int, steps: int = 200) -> float:
    """Median seconds of schedule plus update per step, with that many running and waiting."""
    sim = Simulation(num_pages=1 << 20, max_running=running, chunk_size=512)
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, VOCAB, 500, dtype=np.int32)
    for i in range(running + waiting):
        sim.add(f"r{i}", np.concatenate([prefix, rng.integers(0, VOCAB, 100, dtype=np.int32)]), 4096)
    while len(sim.scheduler.running) < running:
        sim.step()
    for _ in range(50):
        sim.step()
    times = []
    for _ in range(steps):
        before = sim.busy_s
        sim.step()
        times.append(sim.busy_s - before)
    return float(np.median(times))


HOT_AND_COLD_RATE = 3.96
"""Requests per second of the hot and cold mix that can be served under any policy: found by sending far more."""


@dataclass(frozen=True, slots=True)
class HotAndCold:
    """TTFT in seconds, and requests served per second."""

    cold_p50: float
    cold_p99: float
    hot_p50: float
    hot_p99: float
    rate: float


def cold_under_hot(policy: SchedulePolicy, *, load: float = 1.6, seed: int = 0, requests: int = 2000) -> HotAndCold:
    """90 % hot, 10 % cold requests in an open loop at `load` times what can be served."""
    sim = Simulation(num_pages=60000, policy=policy, max_running=16)
    rng = np.random.default_rng(seed)
    hot = [rng.integers(0, VOCAB, 1000, dtype=np.int32) for _ in range(8)]
    arrivals = np.cumsum(rng.exponential(1.0 / (HOT_AND_COLD_RATE * load), requests))
    i = 0
    while i < requests or sim.scheduler.has_work:
        while i < requests and arrivals[i] <= sim.now_s:
            cold = rng.random() < 0.1
            tail = rng.integers(0, VOCAB, 1000 if cold else 50, dtype=np.int32)
            prompt = tail if cold else np.concatenate([hot[rng.integers(len(hot))], tail])
            sim.add(f"r{i}", prompt, 16, kind="cold" if cold else "hot")
            i += 1
        if sim.scheduler.has_work:
            sim.step()
        else:
            sim.now_s = float(arrivals[i])
    ttft = {kind: [f.ttft_s for f in sim.finished if f.kind == kind] for kind in ("cold", "hot")}
    cold_p50, cold_p99 = np.percentile(ttft["cold"], (50, 99)).tolist()
    hot_p50, hot_p99 = np.percentile(ttft["hot"], (50, 99)).tolist()
    return HotAndCold(cold_p50, cold_p99, hot_p50, hot_p99, requests / sim.now_s)


def main(argv: list[str]) -> int:
    """Print the figures of docs/benchmarks.md, section Scheduler."""
    parser = argparse.ArgumentParser(prog="phloem bench sched", description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2000, help="requests of the hot and cold mix")
    parser.add_argument(
        "--chaos", type=int, default=0, metavar="REQUESTS", help="run chaos alone, with so many requests"
    )
    arguments = parser.parse_args(argv)
    if arguments.chaos:
        _print_chaos(arguments.chaos)
        return 0
    _print_overhead()
    _print_sharing()
    _print_speed()
    _print_hits(arguments.agents, arguments.turns)
    _print_starvation(arguments.requests)
    return 0


def _print_overhead() -> None:
    for running, waiting in ((16, 0), (64, 1000), (64, 10000)):
        seconds = step_overhead(running=running, waiting=waiting)
        print(f"schedule + update, {running} running, {waiting} waiting: {seconds * 1e6:.0f} us a step")


def _print_sharing() -> None:
    sim = Simulation(num_pages=1 << 16, max_running=64)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 2000, dtype=np.int32)
    for i in range(32):
        sim.add(f"r{i}", prompt, 4)
    while sim.scheduler.has_work:
        sim.step()
    rows = sim.scheduler.stats.num_prefill_rows
    print(f"32 identical prompts of 2,000 tokens at once: {rows} prefill rows (one prompt is 2,000)")


def _print_hits(agents: int, turns: int) -> None:
    footprint = 1500 + agents * turns * 132
    for share in (1.1, 0.5, 0.25):
        sim = Simulation(num_pages=int(footprint * share), max_running=16)
        began = time.perf_counter()
        run_agents(sim, agents=agents, turns=turns)
        seconds = time.perf_counter() - began
        cached = sum(f.cached_tokens for f in sim.finished)
        ideal = ideal_hits(sim.finished)
        optimum = belady_hits(sim.finished, sim.num_pages)
        print(
            f"{agents} agents x {turns} turns, pool {share:.0%} of the footprint: hit tokens {cached / ideal:.1%} of "
            f"an infinite cache's, {cached / max(optimum, 1):.1%} of the offline optimum's; "
            f"{sim.scheduler.stats.num_retractions} retractions; {60 * len(sim.finished) / seconds:,.0f} requests/min"
        )


def _print_speed() -> None:
    for output in (8, 32):
        seconds = []
        for _ in range(5):
            sim = Simulation(num_pages=300000)
            began = time.perf_counter()
            run_agents(sim, agents=50, turns=10, output=output)
            seconds.append(time.perf_counter() - began)
        slowest, fastest = (60 * len(sim.finished) / s for s in (max(seconds), min(seconds)))
        print(f"50 agents x 10 turns, {output} tokens out: {slowest:,.0f} to {fastest:,.0f} simulated requests/min")


def _print_starvation(requests: int) -> None:
    policies: tuple[SchedulePolicy, ...] = ("fcfs", "lpm", "cache-aware")
    for load in (0.95, 1.1, 1.6):
        for policy in policies:
            found = cold_under_hot(policy, load=load, requests=requests)
            print(
                f"90 % hot, load {load:.0%}, {policy}: TTFT cold p50 {found.cold_p50:.1f} s, "
                f"p99 {found.cold_p99:.1f} s; hot p50 {found.hot_p50:.1f} s, "
                f"p99 {found.hot_p99:.1f} s; {found.rate:.2f} requests/s"
            )


def _print_chaos(requests: int) -> None:
    for page_size in (1, 16):
        began = time.perf_counter()
        drive = chaos(requests, page_size=page_size)
        seconds = time.perf_counter() - began
        stats = drive.scheduler.stats
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ends(drive).items()))
        print(
            f"chaos, page size {page_size}: {requests:,} requests, {len(drive.answers):,} sequences, one terminal "
            f"answer each ({reasons}); {stats.num_steps:,} steps, {stats.num_retractions:,} retractions, "
            f"{stats.num_cached_prompt_tokens / max(stats.num_prompt_tokens, 1):.0%} of prompt tokens cached; "
            f"nothing locked at the end; {seconds:.0f} s"
        )
