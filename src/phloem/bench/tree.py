"""`phloem bench tree`: what each verb of the radix tree costs, and whole traces beside other trees.

Owns the measurements and one trace of multi-turn agents. Must not know models, the scheduler or HTTP. Times are medians
of repeats; the trace and its hits repeat from the seed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from phloem.bench.plain_tree import PlainTree
from phloem.config import EvictionPolicy
from phloem.kv.manager import KVCacheManager
from phloem.types import DEFAULT_NAMESPACE, Int32Array

VOCAB = 32000
LEAVES = (1000, 100000)
"""Sizes of the trees whose cost per evicted node is compared."""


def median_seconds(call: Callable[[], object], repeats: int, *, inner: int = 1) -> float:
    """Median over `repeats` of the mean time of `inner` calls."""
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter() - began) / inner)
    return statistics.median(samples)


def insert(cache: KVCacheManager, ns_id: int, tokens: Int32Array, step_id: int) -> None:
    """One finished request: its tokens are cached and evictable after it."""
    cursor, length = cache.open(ns_id, tokens)
    assert cache.append(cursor, tokens[length:], step_id)
    cache.complete(step_id)
    cache.close(cursor)


def fill(cache: KVCacheManager, ns_id: int, *, leaves: int, tokens_per_leaf: int) -> None:
    """Cache `leaves` sequences that share nothing but their first token."""
    tokens = np.zeros(tokens_per_leaf + 1, dtype=np.int32)
    for i in range(leaves):
        tokens[1:3] = i % VOCAB, i // VOCAB
        insert(cache, ns_id, tokens, i)


# --- verbs ---


@dataclass(frozen=True, slots=True)
class LookupTimes:
    """Seconds for one warm lookup of a cached prefix."""

    native: float
    python: float


def lookup_times(cache: KVCacheManager, ns_id: int, length: int, repeats: int) -> LookupTimes:
    """Native: one of 200 lookups in a single call of match_many. Python: a call of peek."""
    tokens = np.random.default_rng(length).integers(0, VOCAB, length, dtype=np.int32)
    insert(cache, ns_id, tokens, 1 << 40)
    queries = [(ns_id, tokens, None)] * 200
    return LookupTimes(
        native=median_seconds(lambda: cache.match_many(list(queries)), repeats) / len(queries),
        python=median_seconds(lambda: cache.peek(ns_id, tokens), repeats, inner=200),
    )


def evict_seconds_per_node(leaves: int, repeats: int, *, tokens_per_leaf: int = 16) -> float:
    """Seconds to evict one leaf out of a tree of `leaves` leaves, over the whole tree."""
    samples = []
    for _ in range(repeats):
        cache = KVCacheManager(num_pages=leaves * (tokens_per_leaf + 1))
        fill(cache, cache.namespace_id(DEFAULT_NAMESPACE), leaves=leaves, tokens_per_leaf=tokens_per_leaf)
        num_nodes = cache.stats().num_nodes
        began = time.perf_counter()
        cache.evict(leaves * tokens_per_leaf)
        samples.append((time.perf_counter() - began) / num_nodes)
    return statistics.median(samples)


def extend_seconds(batch: int, steps: int, *, page_size: int = 1) -> tuple[float, float]:
    """Median seconds of `extend` and of `complete` for a batch that decodes behind a shared prefix."""
    cache = KVCacheManager(num_pages=1 << 20, page_size=page_size)
    ns_id = cache.namespace_id(DEFAULT_NAMESPACE)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 1000, dtype=np.int32)
    cursors = np.empty(batch, dtype=np.int64)
    for i in range(batch):
        prompt = np.concatenate([shared, rng.integers(0, VOCAB, 200, dtype=np.int32)])
        cursors[i], length = cache.open(ns_id, prompt)
        cache.append(int(cursors[i]), prompt[length:], i)
        cache.complete(i)
    slots, writes = np.empty(batch, np.int32), np.empty(batch, np.uint8)
    extends, completes = [], []
    for step in range(1000, 1000 + steps):
        tokens = rng.integers(0, VOCAB, batch, dtype=np.int32)
        began = time.perf_counter()
        cache.extend(cursors, tokens, step, slots, writes)
        between = time.perf_counter()
        cache.complete(step)
        completes.append(time.perf_counter() - between)
        extends.append(between - began)
    return statistics.median(extends), statistics.median(completes)


def waiting_queue_seconds(waiting: int, repeats: int) -> tuple[float, float]:
    """Seconds to match a waiting queue again: when nothing changed, and when the node they all end at has."""
    cache = KVCacheManager(num_pages=1 << 18)
    ns_id = cache.namespace_id(DEFAULT_NAMESPACE)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 2000, dtype=np.int32)
    insert(cache, ns_id, shared, 0)
    prompts = [np.concatenate([shared, rng.integers(0, VOCAB, 200, dtype=np.int32)]) for _ in range(waiting)]
    probes = cache.match_many([(ns_id, prompt, None) for prompt in prompts])
    queries = [(ns_id, prompt, probe) for prompt, probe in zip(prompts, probes, strict=True)]
    still = median_seconds(lambda: cache.match_many(queries), repeats)
    samples = []
    for i in range(repeats):
        # Another request ends a token further: everyone who waits must look again, but only from there.
        insert(cache, ns_id, np.append(shared, np.int32(VOCAB + i)), i + 1)
        began = time.perf_counter()
        cache.match_many(queries)
        samples.append(time.perf_counter() - began)
    return still, statistics.median(samples)


def bytes_per_token(page_size: int, tokens_per_node: int = 256, nodes: int = 20000) -> float:
    """Memory of nodes, index, keys and page ids over cached tokens."""
    cache = KVCacheManager(num_pages=nodes * (tokens_per_node // page_size + 1), page_size=page_size)
    ns_id = cache.namespace_id(DEFAULT_NAMESPACE)
    tokens = np.zeros(tokens_per_node, dtype=np.int32)
    for i in range(nodes):
        tokens[0:2] = i % VOCAB, i // VOCAB
        insert(cache, ns_id, tokens, i)
    stats = cache.stats()
    return stats.num_metadata_bytes / stats.num_tokens


def grow_million(nodes: int) -> tuple[KVCacheManager, int]:
    """A tree of at least `nodes` nodes of one token under a root of pairs."""
    cache = KVCacheManager(num_pages=2 * nodes + (1 << 18))
    ns_id = cache.namespace_id(DEFAULT_NAMESPACE)
    width = int(nodes**0.5)
    tokens = np.empty(2, dtype=np.int32)
    step = 0
    while cache.stats().num_nodes < nodes:
        tokens[:] = step % width, step // width
        insert(cache, ns_id, tokens, step)
        step += 1
    return cache, ns_id


# --- traces ---


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the trace: the prompt and, behind it, the answer."""

    tokens: Int32Array
    num_prompt: int


def agent_trace(conversations: int, seed: int = 0) -> list[Call]:
    """Multi-turn agents: 20 system prompts (zipf), histories that grow to 1-4k tokens, the recent ones go on (zipf)."""
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> Int32Array:
        return rng.integers(0, VOCAB, rng.integers(low, high), dtype=np.int32)

    systems = [text(200, 1000) for _ in range(20)]
    recent: list[tuple[Int32Array, int]] = []  # history, length to reach; newest last
    calls: list[Call] = []
    started = 0
    while started < conversations or recent:
        if started < conversations and (not recent or rng.random() < 0.25):
            started += 1
            history, goal = systems[min(int(rng.zipf(1.5)), 20) - 1], int(rng.integers(1000, 4000))
        else:
            history, goal = recent.pop(-min(int(rng.zipf(1.3)), len(recent)))
        prompt = np.concatenate([history, text(50, 400)])
        call = Call(np.concatenate([prompt, text(50, 300)]), len(prompt))
        calls.append(call)
        if len(call.tokens) < goal:
            recent.append((call.tokens, goal))
    return calls


class Player(Protocol):
    """A tree that serves whole requests."""

    def serve(self, call: Call) -> int:
        """Match, lock, insert prompt and answer, unlock; return the prompt tokens that were cached."""


class NativePlayer:
    """Ours."""

    def __init__(self, num_pages: int, policy: EvictionPolicy = "lru") -> None:
        self.cache = KVCacheManager(num_pages=num_pages, eviction_policy=policy)
        self._ns_id = self.cache.namespace_id(DEFAULT_NAMESPACE)
        self._step = 0

    def serve(self, call: Call) -> int:
        cache = self.cache
        cursor, length = cache.open(self._ns_id, call.tokens[: call.num_prompt])
        for tokens in (call.tokens[length : call.num_prompt], call.tokens[call.num_prompt :]):
            self._step += 1
            assert cache.append(cursor, tokens, self._step)
            cache.complete(self._step)
        cache.close(cursor)
        return length


class PlainPlayer:
    """The plain Python tree; slots are allocated for prompt and answer, then everything is inserted at the end."""

    def __init__(self, num_pages: int) -> None:
        self.tree = PlainTree(num_pages)

    def serve(self, call: Call) -> int:
        tree = self.tree
        node, length = tree.match(call.tokens[: call.num_prompt])
        tree.lock(node, 1)
        slots = tree.allocate(len(call.tokens) - length)
        assert slots is not None
        tree.insert(call.tokens, slots)
        tree.lock(node, -1)
        return length


@dataclass(frozen=True, slots=True)
class TraceResult:
    """How a tree did on a trace."""

    requests_per_s: float
    hit_tokens: int


def play(player: Player, calls: list[Call]) -> TraceResult:
    """Serve a trace in order."""
    began = time.perf_counter()
    hits = sum(player.serve(call) for call in calls)
    return TraceResult(len(calls) / (time.perf_counter() - began), hits)


def footprint(calls: list[Call]) -> int:
    """Pages that would hold everything the trace ever caches."""
    player = NativePlayer(sum(len(call.tokens) for call in calls) + 1)
    for call in calls:
        player.serve(call)
    return player.cache.stats().num_tokens


# --- report ---


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f} us"


def _print_verbs(million: int, repeats: int) -> None:
    cache = KVCacheManager(num_pages=1 << 18)
    ns_id = cache.namespace_id(DEFAULT_NAMESPACE)
    for length in (4096, 131072):
        times = lookup_times(cache, ns_id, length, repeats)
        print(f"lookup of {length:,} warm tokens: {_us(times.native)} native, {_us(times.python)} from Python")
    small, large = (evict_seconds_per_node(leaves, repeats) for leaves in LEAVES)
    print(
        f"evict, per node: {small * 1e9:.0f} ns of {LEAVES[0]:,} leaves, {large * 1e9:.0f} ns of {LEAVES[1]:,} "
        f"({large / small:.2f}x)"
    )
    for page_size in (1, 16):
        extend, complete = extend_seconds(64, 400, page_size=page_size)
        print(f"decode of 64, page size {page_size}: extend {_us(extend)}, complete {_us(complete)}")
    still, moved = waiting_queue_seconds(10000, repeats)
    print(f"match_many of 10,000 waiting: {_us(still)} when nothing changed, {_us(moved)} when all must look again")
    sizes = ", ".join(f"{bytes_per_token(size):.2f} B at page size {size}" for size in (1, 4, 16))
    print(f"metadata per cached token, nodes of 256 tokens: {sizes}")
    if million:
        cache, ns_id = grow_million(million)
        stats = cache.stats()
        size = stats.num_metadata_bytes / 2**20
        print(f"{stats.num_nodes:,} nodes of {stats.num_tokens / stats.num_nodes:.1f} tokens: {size:.0f} MiB in all")
        for length in (4096, 131072):
            times = lookup_times(cache, ns_id, length, repeats)
            print(f"  there, {length:,} warm tokens: {_us(times.native)} native, {_us(times.python)} from Python")


def _players() -> dict[str, Callable[[int], Player]]:
    """What plays the trace, by name; says what is left out, and why."""
    from phloem.bench.sglang_tree import SGLangPlayer, why_not

    players: dict[str, Callable[[int], Player]] = {"native": NativePlayer, "plain Python": PlainPlayer}
    missing = why_not()
    if missing:
        print(f"SGLang's trees are left out: {missing}")
    else:
        players["SGLang RadixCache (Python)"] = SGLangPlayer
        players["SGLang UnifiedRadixCache (Rust core)"] = partial(SGLangPlayer, unified=True)
    return players


def _print_trace(conversations: int, shares: list[float]) -> None:
    calls = agent_trace(conversations)
    pages = footprint(calls)
    prompts = sum(call.num_prompt for call in calls)
    size = f"{conversations:,} conversations, {len(calls):,} requests, {prompts:,} prompt tokens"
    print(f"trace: {size}, footprint {pages:,} tokens")
    players = _players()
    for share in shares:
        num_pages = max(int(pages * share), 8192)
        base: TraceResult | None = None
        for name, make in players.items():
            result = play(make(num_pages), calls)
            base = base or result
            print(
                f"pool {share:.0%} of the footprint, {name}: {result.requests_per_s:,.0f} requests/s, "
                f"{result.hit_tokens:,} hit tokens = {result.hit_tokens / prompts:.2%} (native: "
                f"{base.requests_per_s / result.requests_per_s:.1f}x, {base.hit_tokens - result.hit_tokens:+,})",
                flush=True,
            )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Options of the benchmark."""
    parser = argparse.ArgumentParser(prog="phloem bench tree", description="measure the radix tree")
    parser.add_argument("--conversations", type=int, default=2000, help="length of the trace (default: %(default)s)")
    parser.add_argument(
        "--pools",
        type=float,
        nargs="*",
        default=[0.05, 0.2, 0.5],
        help="pools, of the trace's footprint (default: %(default)s)",
    )
    parser.add_argument("--skip-verbs", action="store_true", help="play the trace only")
    parser.add_argument("--million", type=int, default=0, help="also measure in a tree of so many nodes, say 1000000")
    parser.add_argument("--repeats", type=int, default=7, help="medians are of so many (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Print all figures."""
    options = parse_arguments(arguments)
    if not options.skip_verbs:
        _print_verbs(options.million, options.repeats)
    if options.pools:
        _print_trace(options.conversations, options.pools)
    return 0
