"""Short forms for tests of the cache."""

from __future__ import annotations

import itertools

import numpy as np

from phloem.kv.manager import KVCacheManager
from phloem.types import Int32Array, Namespace

_steps = itertools.count(1)


def int32(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def run(first: int, last: int) -> Int32Array:
    """Tokens first .. last, both included."""
    return np.arange(first, last + 1, dtype=np.int32)


def new_cache(num_pages: int = 64, **options: object) -> tuple[KVCacheManager, int]:
    cache = KVCacheManager(num_pages=num_pages, **options)  # type: ignore[arg-type]
    return cache, cache.namespace_id(Namespace())


def store(cache: KVCacheManager, ns_id: int, tokens: Int32Array, priority: int = 0) -> int:
    """One whole request; returns how many of its tokens were cached."""
    cursor, length = cache.open(ns_id, tokens, priority)
    step = next(_steps)
    assert cache.append(cursor, tokens[length:], step)
    cache.complete(step)
    cache.close(cursor)
    return length


def extend(cache: KVCacheManager, cursors: list[int], tokens: list[int], step: int) -> tuple[int, list[int], list[int]]:
    slots, writes = np.full(len(cursors), -1, np.int32), np.zeros(len(cursors), np.uint8)
    done = cache.extend(np.array(cursors, dtype=np.int64), int32(*tokens), step, slots, writes)
    return done, slots.tolist(), writes.tolist()


def slots_of(cache: KVCacheManager, cursor: int) -> list[int]:
    out = np.full(cache.length(cursor), -1, np.int32)
    cache.fill_slots(cursor, 0, out)
    return out.tolist()


def assert_idle(cache: KVCacheManager) -> None:
    """What must hold whenever no request lives."""
    cache.check_invariants()
    stats = cache.stats()
    assert stats.num_pages_protected == 0
    assert stats.num_pages_free + stats.num_pages_evictable == stats.num_pages_total
