"""Events, and what other threads may do while the engine runs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from phloem.kv.manager import KVCacheManager
from phloem.kv.radix_tree import prefix_hash
from phloem.types import Int32Array
from tests.unit.kv.helpers import int32, new_cache, run, store


class Mirror:
    """What can be matched, known from events alone: the hash of every cached run of whole pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.known: set[tuple[int, bytes]] = set()

    def take(self, cache: KVCacheManager) -> None:
        for event in cache.take_events():
            if event.kind == "cleared":
                assert not any(ns == event.namespace_id for ns, _ in self.known)
                continue
            name = event.parent
            for i in range(0, len(event.token_ids), self.page_size):
                name = prefix_hash(event.token_ids[i : i + self.page_size], name)
                entry = (event.namespace_id, name)
                if event.kind == "stored":
                    assert entry not in self.known
                    self.known.add(entry)
                else:
                    self.known.remove(entry)

    def match(self, ns_id: int, tokens: Int32Array) -> int:
        name, length = prefix_hash(int32()), 0
        while length + self.page_size <= len(tokens):
            name = prefix_hash(tokens[length : length + self.page_size], name)
            if (ns_id, name) not in self.known:
                break
            length += self.page_size
        return length


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_mirror_follows_by_events_alone(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    cache, ns = new_cache(num_pages=24, page_size=page_size)
    cache.listen()
    mirror = Mirror(page_size)
    live: list[int] = []
    for step in range(1, 600):
        tokens = np.repeat(rng.integers(0, 3, 6), page_size)[: rng.integers(1, 6 * page_size)].astype(np.int32)
        cursor, length = cache.open(ns, tokens)
        cache.append(cursor, tokens[length:], step)
        live.append(cursor)
        if rng.random() < 0.1:
            for open_cursor in live:
                cache.close(open_cursor)
            live = []
            cache.discard(step)
        cache.complete(step)
        if live and rng.random() < 0.7:
            cache.close(live.pop(int(rng.integers(len(live)))))
        if rng.random() < 0.05:
            cache.flush(ns)
        mirror.take(cache)
        for _ in range(5):
            probe = np.repeat(rng.integers(0, 3, 6), page_size).astype(np.int32)
            assert mirror.match(ns, probe) == cache.peek(ns, probe).length


def test_nothing_is_recorded_while_nobody_listens() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    assert cache.take_events() == []
    cache.listen()
    store(cache, ns, run(11, 14))
    (event,) = cache.take_events()
    assert (event.kind, event.namespace_id, event.position, event.token_ids.tolist()) == (
        "stored",
        ns,
        0,
        [11, 12, 13, 14],
    )
    assert event.parent == prefix_hash(int32())
    cache.listen(False)
    cache.flush()
    assert cache.take_events() == []


def test_other_threads_read_while_one_writes() -> None:
    cache, ns = new_cache(num_pages=4000)
    store(cache, ns, run(1, 500))
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                stats = cache.stats()
                total = stats.num_pages_free + stats.num_pages_evictable + stats.num_pages_protected
                assert total == stats.num_pages_total
                assert (cache.snapshot().rows[:, 5] >= 0).all()
                assert all(probe.length <= 500 for probe in cache.match_many([(ns, run(1, 500), None)] * 50))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(1500):
        store(cache, ns, np.concatenate([run(1, i % 499 + 1), run(1000 + i, 1040 + i)]))
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    cache.check_invariants()
