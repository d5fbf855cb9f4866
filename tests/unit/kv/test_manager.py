"""Contract of each verb of the cache, one case at a time."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.errors import CacheError, CapacityError, StaleHandleError
from phloem.kv.manager import KVCacheManager
from phloem.types import Namespace
from tests.unit.kv.helpers import assert_idle, extend, int32, new_cache, run, slots_of, store


def test_a_lock_protects_the_matched_node_itself() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    store(cache, ns, int32(1, 2, 3, 4, 9, 10, 11, 12))
    cursor, length = cache.open(ns, run(1, 8))
    assert length == 8
    assert cache.evict(64) == 4
    assert cache.peek(ns, run(1, 8)).length == 8
    assert cache.stats().num_pages_protected == 8
    cache.close(cursor)
    assert cache.evict(64) == 8
    assert_idle(cache)


def test_namespaces_share_nothing() -> None:
    cache, base = new_cache()
    spaces = [cache.namespace_id(Namespace(model="m", adapter=a, cache_salt=s)) for a, s in [("a", ""), ("", "a")]]
    assert len({base, *spaces}) == 3
    assert cache.namespace_id(Namespace(model="m", adapter="a")) == spaces[0]
    assert store(cache, base, run(1, 8)) == 0
    for ns in spaces:
        assert cache.peek(ns, run(1, 8)).length == 0
        assert store(cache, ns, run(1, 8)) == 0
    assert store(cache, base, run(1, 8)) == 8


def test_a_running_prompt_and_its_answer_can_be_matched_at_once() -> None:
    cache, ns = new_cache()
    leader, _ = cache.open(ns, run(1, 8))
    cache.append(leader, run(1, 8), 1)
    follower, length = cache.open(ns, run(1, 12))
    assert length == 8
    assert slots_of(cache, follower) == slots_of(cache, leader)
    cache.complete(1)
    extend(cache, [leader], [9], 2)
    cache.complete(2)
    assert cache.advance(follower, run(9, 12)) == 1
    for cursor in (leader, follower):
        cache.close(cursor)
    assert cache.peek(ns, run(1, 12)).length == 9
    assert_idle(cache)


def test_equal_requests_in_lockstep_share_every_page_and_merge_again() -> None:
    cache, ns = new_cache()
    cursors = []
    for _ in range(3):
        cursor, length = cache.open(ns, run(1, 8))
        cache.append(cursor, run(1, 8)[length:], 1)
        cursors.append(cursor)
    cache.complete(1)
    for step in range(2, 12):
        done, slots, writes = extend(cache, cursors, [step] * 3, step)
        assert (done, writes) == (3, [1, 0, 0])
        assert len(set(slots)) == 1
        cache.complete(step)
        cache.check_invariants()
        assert cache.stats().num_nodes == 1
    assert cache.stats().num_tokens == 18
    for cursor in cursors:
        cache.close(cursor)
    assert_idle(cache)


def test_extend_branches_shares_and_stops_where_pages_end() -> None:
    cache, ns = new_cache(num_pages=10)
    store(cache, ns, run(1, 8))
    cursors = [cache.open(ns, run(1, 8))[0] for _ in range(4)]
    done, slots, writes = extend(cache, cursors, [1, 2, 1, 3], 1)
    assert done == 3
    assert writes[:3] == [1, 1, 0]
    assert slots[2] == slots[0] != slots[1]
    assert slots[3] == -1
    cache.check_invariants()
    assert cache.length(cursors[3]) == 8


def test_append_is_all_or_nothing() -> None:
    cache, ns = new_cache(num_pages=8)
    store(cache, ns, run(1, 4))
    cursor, _ = cache.open(ns, int32(7))
    before = cache.stats()
    assert not cache.append(cursor, run(10, 18), 1)
    assert cache.stats() == before
    assert cache.append(cursor, run(10, 17), 1), "the four evictable pages make room for eight"
    assert cache.peek(ns, run(1, 4)).length == 0
    cache.complete(1)
    cache.close(cursor)
    assert_idle(cache)


def test_append_counts_what_it_is_about_to_lock() -> None:
    """The matched part is evictable before the call; it must not be counted as room for the rest."""
    cache, ns = new_cache(num_pages=8)
    store(cache, ns, run(1, 8))
    cursor, _ = cache.open(ns, int32(99))
    assert not cache.append(cursor, run(1, 9), 1)
    assert cache.peek(ns, run(1, 9)).length == 8
    result = cache.append(cursor, run(1, 8), 1)
    assert (result.done, result.num_shared) == (True, 8)
    cache.close(cursor)
    assert_idle(cache)


def test_eviction_takes_the_end_of_the_oldest_leaf_and_no_more() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    store(cache, ns, run(11, 18))
    assert cache.evict(1) == 1
    assert cache.peek(ns, run(1, 8)).length == 7
    assert cache.evict(8) == 8
    assert cache.peek(ns, run(1, 8)).length == 0
    assert cache.peek(ns, run(11, 18)).length == 7


def test_a_lookup_does_not_make_a_prefix_newer() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 4))
    store(cache, ns, run(11, 14))
    for _ in range(3):
        cache.peek(ns, run(1, 4))
        cache.match_many([(ns, run(1, 4), None)])
    cache.evict(4)
    assert cache.peek(ns, run(1, 4)).length == 0
    assert cache.peek(ns, run(11, 14)).length == 4


def test_watermark_keeps_its_share_free() -> None:
    cache, ns = new_cache(num_pages=40, evict_watermark=0.25)
    for i in range(10):
        store(cache, ns, run(100 * i, 100 * i + 7))
        assert cache.stats().num_pages_free >= 10
    assert cache.stats().num_pages_free == 10


def test_a_full_cache_gives_way_to_one_large_prompt() -> None:
    cache, ns = new_cache(num_pages=100)
    for i in range(50):
        store(cache, ns, run(100 * i, 100 * i + 9))
    assert cache.stats().num_pages_free == 0
    assert store(cache, ns, run(9000, 9079)) == 0
    assert cache.peek(ns, run(9000, 9079)).length == 80
    assert_idle(cache)


# --- steps ---


def test_a_failed_step_leaves_what_came_before() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 4))
    leader, _ = cache.open(ns, run(1, 8))
    cache.append(leader, run(5, 8), 1)
    follower, length = cache.open(ns, run(1, 10))
    assert length == 8
    cache.append(follower, run(9, 10), 1)
    with pytest.raises(CacheError, match=f"{leader}.*{follower}"):
        cache.discard(1)
    cache.close(leader)
    cache.close(follower)
    assert cache.stats().num_pages_protected == 10, "what a step writes stays until the step is over"
    cache.discard(1)
    assert cache.peek(ns, run(1, 10)).length == 4
    assert_idle(cache)


def test_in_place_growth_is_taken_back() -> None:
    cache, ns = new_cache()
    cursor, _ = cache.open(ns, run(1, 4))
    cache.append(cursor, run(1, 4), 1)
    cache.complete(1)
    extend(cache, [cursor], [5], 2)
    assert cache.stats().num_nodes == 1
    cache.close(cursor)
    cache.discard(2)
    assert cache.peek(ns, run(1, 5)).length == 4
    assert_idle(cache)


def test_steps_complete_in_order() -> None:
    cache, ns = new_cache()
    cursor, _ = cache.open(ns, run(1, 4))
    cache.append(cursor, run(1, 2), 1)
    cache.append(cursor, run(3, 4), 2)
    with pytest.raises(CacheError, match="step 2 cannot complete before step 1"):
        cache.complete(2)
    assert cache.stats().num_tokens_pending == 4
    cache.complete(1)
    assert cache.stats().num_tokens_pending == 2
    cache.complete(2)
    cache.complete(3)  # a step that inserted nothing
    cache.close(cursor)
    assert_idle(cache)


def test_an_aborted_leader_changes_nothing_for_its_follower() -> None:
    cache, ns = new_cache()
    leader, _ = cache.open(ns, run(1, 8))
    cache.append(leader, run(1, 8), 1)
    follower, _ = cache.open(ns, run(1, 8))
    cache.close(leader)
    cache.complete(1)
    cache.evict(64)
    assert cache.length(follower) == 8
    assert cache.stats().num_pages_protected == 8
    cache.close(follower)
    assert_idle(cache)


# --- pages of several tokens ---


def test_matches_round_down_to_a_page_and_the_loss_is_counted() -> None:
    cache, ns = new_cache(page_size=4)
    store(cache, ns, run(1, 10))
    assert cache.peek(ns, run(1, 10)).length == 8
    assert cache.stats().num_tokens == 8, "the tail that never filled was dropped"
    cursor, length = cache.open(ns, int32(1, 2, 3, 4, 5, 6, 7, 99))
    assert length == 4
    assert cache.stats().num_rounding_loss_tokens == 3
    cache.close(cursor)
    assert_idle(cache)


def test_a_tail_is_private_until_it_fills_and_then_gives_way_to_an_equal_page() -> None:
    cache, ns = new_cache(page_size=4)
    store(cache, ns, run(1, 4))
    first, second = (cache.open(ns, run(1, 4))[0] for _ in range(2))
    for cursor in (first, second):
        result = cache.append(cursor, run(5, 6), 1)
        assert (result.done, result.num_shared, result.moved_from) == (True, 0, -1)
    assert slots_of(cache, first)[4:] != slots_of(cache, second)[4:]
    assert cache.peek(ns, run(1, 8)).length == 4
    cache.complete(1)
    assert cache.append(first, run(7, 8), 2).moved_from == -1
    result = cache.append(second, run(7, 9), 2)
    assert (result.done, result.num_shared, result.moved_from) == (True, 2, 4)
    assert slots_of(cache, first) == slots_of(cache, second)[:8]
    cache.complete(2)
    cache.check_invariants()
    for cursor in (first, second):
        cache.close(cursor)
    assert cache.peek(ns, run(1, 9)).length == 8
    assert_idle(cache)


def test_extend_reports_where_slots_changed() -> None:
    cache, ns = new_cache(page_size=2)
    cursors = np.array([cache.open(ns, int32(1))[0] for _ in range(2)], dtype=np.int64)
    slots, writes, moved = np.zeros(2, np.int32), np.zeros(2, np.uint8), np.zeros(2, np.int32)
    cache.extend(cursors, int32(1, 1), 1, slots, writes, moved)
    assert (writes.tolist(), moved.tolist()) == ([1, 1], [-1, -1])
    cache.complete(1)
    cache.extend(cursors, int32(2, 2), 2, slots, writes, moved)
    assert (writes.tolist(), moved.tolist()) == ([1, 0], [-1, 0])
    assert slots[0] == slots[1]
    cache.complete(2)
    cache.check_invariants()


def test_a_fork_stands_on_a_page_boundary() -> None:
    cache, ns = new_cache(page_size=4)
    cursor, _ = cache.open(ns, run(1, 10))
    cache.append(cursor, run(1, 10), 1)
    fork = cache.fork(cursor)
    assert (cache.length(cursor), cache.length(fork)) == (10, 8)
    assert slots_of(cache, fork) == slots_of(cache, cursor)[:8]
    cache.complete(1)
    cache.close(cursor)
    assert cache.peek(ns, run(1, 10)).length == 8
    cache.close(fork)
    assert_idle(cache)


# --- what eviction spares ---


def test_wanted_outlives_pinned_outlives_ordinary() -> None:
    cache, ns = new_cache()
    for i, first in enumerate((10, 20, 30)):
        store(cache, ns, run(first, first + 3))
        assert cache.stats().num_tokens == 4 * (i + 1)
    want = cache.want(ns, run(10, 13))
    pin = cache.pin(ns, run(20, 23), ttl_s=60, now=0.0)
    assert pin is not None
    assert (pin.length, cache.stats().num_pages_pinned) == (4, 4)
    lengths = []
    for _ in range(3):
        cache.evict(4)
        lengths.append([cache.peek(ns, run(first, first + 3)).length for first in (10, 20, 30)])
    assert lengths == [[4, 4, 0], [4, 0, 0], [0, 0, 0]]
    stats = cache.stats()
    assert (stats.num_evicted_pinned_pages, stats.num_evicted_wanted_pages) == (4, 4)
    cache.unwant(want)
    cache.unpin(pin.pin_id)
    assert_idle(cache)


def test_a_want_taken_back_leaves_the_order_as_it_was() -> None:
    cache, ns = new_cache()
    for first in (10, 20, 30):
        store(cache, ns, run(first, first + 3))
    want = cache.want(ns, run(10, 13))
    cache.evict(1)
    assert cache.peek(ns, run(20, 23)).length == 3
    cache.unwant(want)
    cache.evict(1)
    assert cache.peek(ns, run(10, 13)).length == 3
    assert cache.peek(ns, run(20, 23)).length == 3


def test_pins_end_with_their_time_and_hold_no_more_than_their_budget() -> None:
    cache, ns = new_cache(num_pages=20, pin_budget=0.5)
    for first in (10, 30):
        store(cache, ns, run(first, first + 7))
    pin = cache.pin(ns, run(10, 17), ttl_s=5, now=100.0)
    assert pin is not None
    assert cache.pin(ns, run(30, 37), ttl_s=5, now=100.0) is None, "16 of 20 pages are over the budget"
    again = cache.pin(ns, run(10, 17), ttl_s=9, now=100.0)
    assert again is not None, "pinning the same pages twice takes no more of the budget"
    assert cache.expire_pins(105.0) == 1
    with pytest.raises(StaleHandleError):
        cache.unpin(pin.pin_id)
    assert cache.pin(ns, run(30, 37), ttl_s=5, now=120.0) is not None, "the second pin has ended too"
    assert cache.pin(ns, run(90, 95), ttl_s=5, now=120.0) is None
    with pytest.raises(CacheError, match="ttl_s"):
        cache.pin(ns, run(10, 17), ttl_s=0, now=120.0)


@pytest.mark.parametrize(
    ("policy", "survivor"), [("lru", 20), ("lfu", 10), ("slru", 10), ("fifo", 20), ("priority", 20), ("gdsf", 10)]
)
def test_policies(policy: str, survivor: int) -> None:
    """10 is used twice and then left alone; 20 comes later, with the higher priority."""
    cache, ns = new_cache(eviction_policy=policy)
    store(cache, ns, run(10, 13))
    store(cache, ns, run(10, 13))
    store(cache, ns, run(20, 23), priority=1)
    cache.evict(4)
    assert cache.peek(ns, run(survivor, survivor + 3)).length == 4
    assert cache.stats().num_tokens == 4
    assert_idle(cache)


# --- flush ---


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_flush_during_a_run_hides_the_path_and_frees_it_at_the_end(page_size: int) -> None:
    cache, ns = new_cache(page_size=page_size)
    cursor, _ = cache.open(ns, run(1, 8))
    cache.append(cursor, run(1, 8), 1)
    cache.complete(1)
    store(cache, ns, run(100, 107))
    slots = slots_of(cache, cursor)
    assert cache.flush() == 8 // page_size
    assert cache.peek(ns, run(1, 8)).length == 0
    assert cache.append(cursor, run(9, 12), 2)
    cache.complete(2)
    assert slots_of(cache, cursor)[:8] == slots
    assert store(cache, ns, run(1, 8)) == 0, "the same prompt is computed afresh beside the flushed one"
    assert cache.peek(ns, run(1, 12)).length == 8
    cache.check_invariants()
    cache.close(cursor)
    assert cache.stats().num_tokens == 8
    assert_idle(cache)


def test_flush_of_a_prefix_spares_what_leads_elsewhere() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    store(cache, ns, int32(1, 2, 3, 4, 50, 51))
    assert cache.flush(ns, run(1, 5)) == 4
    assert cache.peek(ns, run(1, 8)).length == 4
    assert cache.peek(ns, int32(1, 2, 3, 4, 50, 51)).length == 6
    assert cache.flush(ns, int32(1, 2, 99)) == 0
    assert cache.flush(ns, run(1, 2)) == 6
    with pytest.raises(CacheError, match="ns_id"):
        cache.flush(prefix=run(1, 2))
    assert_idle(cache)


# --- bad calls ---


def test_bad_calls_are_named_and_change_nothing() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    cursor, _ = cache.open(ns, run(1, 8))
    closed, _ = cache.open(ns, run(1, 4))
    cache.close(closed)
    other = cache.namespace_id(Namespace(cache_salt="x"))
    probe = cache.peek(ns, run(1, 8))
    before = cache.stats()
    slots, writes = np.zeros(2, np.int32), np.zeros(2, np.uint8)
    both = np.array([cursor, closed], dtype=np.int64)
    bad = [
        (StaleHandleError, lambda: cache.close(closed)),
        (StaleHandleError, lambda: cache.length(12345)),
        (StaleHandleError, lambda: cache.length(-1)),
        (StaleHandleError, lambda: cache.fork(closed)),
        (StaleHandleError, lambda: cache.append(closed, run(9, 9), 1)),
        (StaleHandleError, lambda: cache.extend(both, int32(9, 9), 1, slots, writes)),
        (StaleHandleError, lambda: cache.unwant(77)),
        (StaleHandleError, lambda: cache.unpin(0)),
        (CacheError, lambda: cache.open(99, run(1, 2))),
        (CacheError, lambda: cache.open(-1, run(1, 2))),
        (CacheError, lambda: cache.peek(other, run(1, 8), probe)),
        (CacheError, lambda: cache.match_many([(other, run(1, 8), probe)])),
        (CacheError, lambda: cache.match_many([(other, run(1, 8))])),
        (CacheError, lambda: cache.open(ns, np.arange(4))),
        (CacheError, lambda: cache.open(ns, np.arange(4, dtype=np.float32))),
        (CacheError, lambda: cache.open(ns, run(1, 8)[::2])),
        (CacheError, lambda: cache.open(ns, [1, 2, 3])),
        (CacheError, lambda: cache.open(ns, run(1, 8).reshape(2, 4))),
        (CacheError, lambda: cache.extend(both[:1], int32(9, 9), 1, slots, writes)),
        (CacheError, lambda: cache.extend(both, int32(9, 9), 1, slots[:1], writes)),
        (CacheError, lambda: cache.fill_slots(cursor, 0, np.zeros(7, np.int32))),
        (CacheError, lambda: cache.fill_slots(cursor, 9, np.zeros(20, np.int32))),
        (CacheError, lambda: cache.fill_slots(cursor, -1, np.zeros(20, np.int32))),
        (CacheError, lambda: cache.evict(-1)),
        (CapacityError, lambda: cache.evict(65)),
        (CacheError, lambda: cache.flush(99)),
    ]
    for error, call in bad:
        with pytest.raises(error):
            call()
        assert cache.stats() == before
    cache.check_invariants()


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 0},
        {"num_pages": 1 << 31},
        {"page_size": 0},
        {"page_size": 257},
        {"evict_watermark": 1.0},
        {"evict_watermark": float("nan")},
        {"pin_budget": 1.5},
        {"eviction_policy": "mru"},
    ],
)
def test_bad_settings_are_named(options: dict) -> None:
    with pytest.raises(CacheError, match=next(iter(options))):
        KVCacheManager(**{"num_pages": 8, **options})


def test_a_read_only_array_of_tokens_is_fine_and_one_for_results_is_not() -> None:
    cache, ns = new_cache()
    tokens = run(1, 8)
    tokens.flags.writeable = False
    assert store(cache, ns, tokens) == 0
    cursor, length = cache.open(ns, tokens)
    assert length == 8
    with pytest.raises(CacheError, match="writable"):
        cache.fill_slots(cursor, 0, tokens)


def test_two_caches_live_side_by_side() -> None:
    (one, ns_one), (two, ns_two) = new_cache(), new_cache()
    store(one, ns_one, run(1, 8))
    assert two.peek(ns_two, run(1, 8)).length == 0


# --- queue and views ---


def test_match_many_gives_back_the_same_probe_until_something_changed_there() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    queries = [(ns, run(1, 12), None), (ns, run(50, 60), None)]
    first = cache.match_many(queries)
    assert [probe.length for probe in first] == [8, 0]
    again = cache.match_many([(*query[:2], probe) for query, probe in zip(queries, first, strict=True)])
    assert all(a is b for a, b in zip(first, again, strict=True))
    store(cache, ns, run(1, 10))
    third = cache.match_many([(*query[:2], probe) for query, probe in zip(queries, again, strict=True)])
    assert [probe.length for probe in third] == [10, 0]
    cache.evict(64)
    assert cache.peek(ns, run(1, 12), third[0]).length == 0


def test_snapshot_shows_each_node_and_its_parent() -> None:
    cache, ns = new_cache()
    store(cache, ns, run(1, 8))
    store(cache, ns, int32(1, 2, 3, 4, 50))
    cursor, _ = cache.open(ns, run(1, 8))
    snapshot = cache.snapshot()
    assert snapshot.is_exact
    nodes = {node.node: node for node in snapshot.nodes()}
    roots = [node for node in nodes.values() if node.parent == -1]
    assert len(roots) == 1
    inner = [node for node in nodes.values() if node.parent != -1]
    assert sorted((node.start, node.num_tokens, node.lock_ref) for node in inner) == [(0, 4, 1), (4, 1, 0), (4, 4, 1)]
    for node in inner:
        parent = nodes[node.parent]
        assert node.start == parent.start + parent.num_tokens
    cache.close(cursor)


def test_spared_paths_go_leaf_first_when_they_must() -> None:
    """Nodes of one path were released together; spared ones still go deepest first, also when split while spared."""
    cache, ns = new_cache(num_pages=512)
    for start in (100, 200, 300):
        for depth in range(4, 33, 4):
            store(cache, ns, np.concatenate([run(start, start + depth - 1), int32(999)]))
        store(cache, ns, run(start, start + 39))
    wants = [cache.want(ns, run(start, start + 39)) for start in (300, 100, 200)]
    assert cache.evict(24) == 24, "the side branches"
    assert cache.evict(1) == 1, "now the wanted ones are spared, and then go all the same"
    cache.check_invariants()
    wants += [cache.want(ns, run(start, start + end)) for end in (30, 7, 18) for start in (200, 300, 100)]
    for want in wants[1::2]:
        cache.unwant(want)
        cache.check_invariants()
    lengths = {start: cache.peek(ns, run(start, start + 39)).length for start in (100, 200, 300)}
    while sum(lengths.values()):
        assert cache.evict(1) == 1
        cache.check_invariants()
        now = {start: cache.peek(ns, run(start, start + 39)).length for start in lengths}
        assert sum(lengths.values()) - sum(now.values()) == 1, "only ends of paths go"
        lengths = now
    for want in wants[::2]:
        cache.unwant(want)
    assert_idle(cache)
