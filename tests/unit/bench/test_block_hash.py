"""The block-hash cache that the tree is compared with: right under the scheduler, and true to its scheme."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.bench.block_hash import BlockHashManager
from phloem.bench.drive import Drive, make_request
from phloem.bench.no_cache import NoCacheManager
from phloem.errors import StaleHandleError
from phloem.types import DEFAULT_NAMESPACE, Int32Array, Namespace


def ids(*ranges: tuple[int, int]) -> Int32Array:
    return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in ranges])


def serve(manager: BlockHashManager, tokens: Int32Array, step: int, ns: int = 0) -> int:
    """Run a prompt through and end it; return the tokens found."""
    cursor, length = manager.open(ns, tokens)
    assert manager.append(cursor, tokens[length:], step)
    manager.complete(step)
    manager.close(cursor)
    manager.check_invariants()
    return length


@pytest.mark.parametrize(("length", "found"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (100, 96)])
def test_only_full_blocks_short_of_the_last_token_are_found(length: int, found: int) -> None:
    manager = BlockHashManager(num_pages=32)
    ns = manager.namespace_id(DEFAULT_NAMESPACE)
    assert serve(manager, ids((0, length)), 1, ns) == 0
    assert serve(manager, ids((0, length)), 2, ns) == found


def test_a_block_is_known_by_all_tokens_before_it() -> None:
    manager = BlockHashManager(num_pages=32)
    serve(manager, ids((0, 16), (100, 132)), 1)
    assert serve(manager, ids((16, 32), (100, 132)), 2) == 0
    assert serve(manager, ids((0, 16), (100, 116), (500, 516)), 3) == 32


def test_namespaces_share_nothing() -> None:
    manager = BlockHashManager(num_pages=32)
    other = manager.namespace_id(Namespace(cache_salt="x"))
    mine = manager.namespace_id(DEFAULT_NAMESPACE)
    serve(manager, ids((0, 40)), 1, other)
    assert serve(manager, ids((0, 40)), 2, mine) == 0


def test_the_end_of_the_oldest_prefix_is_taken_first() -> None:
    manager = BlockHashManager(num_pages=6)
    serve(manager, ids((0, 48)), 1)
    serve(manager, ids((1000, 1048)), 2)
    serve(manager, ids((2000, 2016)), 3)
    assert manager.peek(0, ids((0, 49))).length == 32
    assert manager.peek(0, ids((1000, 1049))).length == 48
    assert manager.stats().num_evicted_pages == 1


def test_equal_blocks_computed_at_once_are_kept_twice() -> None:
    manager = BlockHashManager(num_pages=8)
    cursors = [manager.open(0, ids((0, 20)))[0] for _ in range(2)]
    for cursor in cursors:
        assert manager.append(cursor, ids((0, 20)), 1)
    assert manager.stats().num_pages_protected == 4
    manager.complete(1)
    for cursor in cursors:
        manager.close(cursor)
    # The first copy goes when space is short; the second is found then.
    serve(manager, ids((100, 196)), 2)
    assert manager.peek(0, ids((0, 20))).length == 16
    manager.check_invariants()


def test_a_block_of_the_same_step_is_found() -> None:
    manager = BlockHashManager(num_pages=8)
    first, _ = manager.open(0, ids((0, 40)))
    assert manager.append(first, ids((0, 40)), 1)
    second, found = manager.open(0, ids((0, 40)))
    assert found == 32
    manager.close(first)
    manager.close(second)
    manager.discard(1)
    assert manager.peek(0, ids((0, 40))).length == 0
    manager.check_invariants()


def test_append_is_all_or_nothing_and_a_closed_cursor_is_stale() -> None:
    manager = BlockHashManager(num_pages=2)
    cursor, _ = manager.open(0, ids((0, 64)))
    assert not manager.append(cursor, ids((0, 33)), 1)
    assert manager.length(cursor) == 0
    assert manager.append(cursor, ids((0, 32)), 1)
    manager.close(cursor)
    with pytest.raises(StaleHandleError):
        manager.close(cursor)


def test_a_fork_shares_the_full_blocks() -> None:
    manager = BlockHashManager(num_pages=8)
    cursor, _ = manager.open(0, ids((0, 40)))
    assert manager.append(cursor, ids((0, 40)), 1)
    twin = manager.fork(cursor)
    assert manager.length(twin) == 32
    ours, theirs = np.zeros(40, np.int32), np.zeros(40, np.int32)
    manager.fill_slots(cursor, 0, ours)
    manager.fill_slots(twin, 0, theirs)
    assert (ours[:32] == theirs[:32]).all()
    manager.check_invariants()


def test_flush_forgets_what_runs_too() -> None:
    manager = BlockHashManager(num_pages=8)
    cursor, _ = manager.open(0, ids((0, 40)))
    assert manager.append(cursor, ids((0, 40)), 1)
    serve(manager, ids((100, 120)), 2)
    assert manager.flush() == 1
    assert manager.peek(0, ids((0, 40))).length == 0
    manager.close(cursor)
    assert manager.stats().num_pages_free == 8
    manager.check_invariants()


class Model:
    """The scheme in a few lines: prefixes of whole blocks in an LRU list, one request at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def serve(self, tokens: list[int]) -> int:
        blocks = [tuple(tokens[: i + 16]) for i in range(0, len(tokens) - 15, 16)]
        found = 0
        for block in blocks[: (len(tokens) - 1) // 16]:
            if block not in self.cached:
                break
            found += 1
        for block in blocks[:found]:
            self.cached.move_to_end(block)
        used = -(-len(tokens) // 16)
        for block in reversed(blocks):
            self.cached.pop(block, None)
            self.cached[block] = None
        while len(self.cached) - len(blocks) + used > self.capacity:
            self.cached.popitem(last=False)
        return 16 * found


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=30))
def test_hits_are_those_of_the_scheme_while_nothing_must_go(paths: list[list[int]]) -> None:
    manager, model = BlockHashManager(num_pages=200), Model(200)
    for step, path in enumerate(paths, 1):
        tokens = [token for choice in path for token in range(100 * choice, 100 * choice + 16)] + [7]
        assert serve(manager, np.array(tokens, np.int32), step) == model.serve(tokens)


prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(0, 3), st.integers(1, 20), st.integers(0, 12)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("make", [lambda n: BlockHashManager(num_pages=n // 16), lambda n: NoCacheManager(num_pages=n)])
@given(prompts=prompts, chunk=st.sampled_from([16, 37, 128]), slots=st.sampled_from([160, 320, 2048]))
@settings(max_examples=60, deadline=None)
def test_answers_are_those_of_runs_alone(
    make: object, prompts: list[tuple[int, int, int, int, int]], chunk: int, slots: int
) -> None:
    """Shared prefixes, small pools, chunks, arrivals between steps: every answer is that of a run alone."""
    assert callable(make)
    drive = Drive(make(slots), max_running=6, chunk_size=chunk)
    for number, (family, shared, kind, own, delay) in enumerate(prompts):
        for _ in range(delay):
            drive.step()
        prompt = [family * 10 + i % 7 for i in range(shared)] + [500 + kind + i for i in range(own)]
        drive.add(make_request(f"r{number}", prompt, max_tokens=1 + (number * 7) % 20))
    drive.run()
    drive.check_answers()
