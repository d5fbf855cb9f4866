"""The native tree against the dictionary of prefixes: every verb, answer, counter and eviction, in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from phloem.errors import CacheError, StaleHandleError
from phloem.kv.manager import KVCacheManager
from phloem.types import Namespace
from tests.property.kv_model import Mark, Model, ModelCursor


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# Few distinct pages, cut and joined anyhow: many splits, many shared prefixes.
runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4)
SPACES = 2


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    policy = "lru"

    @initialize(num_pages=st.integers(4, 24), watermark=st.sampled_from([0.0, 0.0, 0.3]))
    def start(self, num_pages: int, watermark: float) -> None:
        self.cache = KVCacheManager(
            num_pages=num_pages,
            page_size=self.page_size,
            eviction_policy=self.policy,
            evict_watermark=watermark,
            pin_budget=0.5,
        )
        self.model = Model(num_pages, self.page_size, self.policy, watermark, 0.5)
        for i in range(SPACES):
            assert self.cache.namespace_id(Namespace(cache_salt=str(i))) == self.model.create_space()
        self.live: list[tuple[int, ModelCursor]] = []
        self.marked: list[tuple[int, Mark]] = []
        self.probes: list[list] = []
        self.step = 1
        self.now = 0.0

    def tokens(self, parts: list[tuple[int, int]]) -> list[int]:
        unit = max(1, self.page_size // 2)
        return [letter for letter, count in parts for _ in range(count * unit)]

    def pick(self, index: int) -> tuple[int, ModelCursor]:
        return self.live[index % len(self.live)]

    @rule(space=st.integers(0, SPACES - 1), parts=runs, priority=st.integers(-1, 1))
    def open(self, space: int, parts: list, priority: int) -> None:
        tokens = self.tokens(parts)
        cursor, length = self.cache.open(space, int32(tokens), priority)
        mine = self.model.open(space, tokens, priority)
        assert length == mine.length
        self.live.append((cursor, mine))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), parts=runs)
    def advance(self, index: int, parts: list) -> None:
        cursor, mine = self.pick(index)
        tokens = self.tokens(parts)
        assert self.cache.advance(cursor, int32(tokens)) == self.model.advance(mine, tokens)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7), parts=runs, cut=st.integers(0, 3), next_step=st.booleans())
    def append(self, index: int, parts: list, cut: int, next_step: bool) -> None:
        self.step += next_step
        cursor, mine = self.pick(index)
        tokens = self.tokens(parts)
        tokens = tokens[: max(1, len(tokens) - cut)]
        got = self.cache.append(cursor, int32(tokens), self.step)
        assert (got.done, got.num_shared, got.moved_from) == self.model.append(mine, tokens, self.step)

    @precondition(lambda self: self.live)
    @rule(letters=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def extend(self, letters: list[int]) -> None:
        batch = self.live[: len(letters)]
        letters = letters[: len(batch)]
        slots = np.full(len(batch), -7, np.int32)
        writes = np.full(len(batch), 7, np.uint8)
        moved = np.full(len(batch), -7, np.int32)
        cursors = np.array([cursor for cursor, _ in batch], dtype=np.int64)
        done = self.cache.extend(cursors, int32(letters), self.step, slots, writes, moved)
        for i, ((cursor, mine), letter) in enumerate(zip(batch, letters, strict=True)):
            ok, shared, moved_from = self.model.append(mine, [letter], self.step)
            assert ok == (i < done)
            if not ok:
                break
            assert (writes[i], moved[i]) == (shared == 0, moved_from)
            assert slots[i] >= 0
            assert self.cache.length(cursor) == mine.length
        # In order, so a later one may have replaced the page of an earlier one no more: slots are compared now.
        for i, (cursor, mine) in enumerate(batch[:done]):
            out = np.zeros(mine.length, np.int32)
            self.cache.fill_slots(cursor, mine.length - 1, out)
            assert out[-1] == slots[i]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7))
    def fork(self, index: int) -> None:
        cursor, mine = self.pick(index)
        forked = self.model.fork(mine)
        self.live.append((self.cache.fork(cursor), forked))
        assert self.cache.length(self.live[-1][0]) == forked.length

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7))
    def close(self, index: int) -> None:
        cursor, mine = self.live.pop(index % len(self.live))
        self.cache.close(cursor)
        self.model.close(mine)
        with pytest.raises(StaleHandleError):
            self.cache.close(cursor)

    @rule()
    def complete(self) -> None:
        for step in list(self.model.steps):
            self.cache.complete(step)
            self.model.complete(step)

    @precondition(lambda self: len(self.model.steps) > 1)
    @rule()
    def complete_one(self) -> None:
        with pytest.raises(CacheError):
            self.cache.complete(self.model.steps[1])
        step = self.model.steps[0]
        self.cache.complete(step)
        self.model.complete(step)

    @precondition(lambda self: self.model.steps)
    @rule(index=st.integers(0, 3))
    def discard(self, index: int) -> None:
        step = self.model.steps[index % len(self.model.steps)]
        standing = [pair for pair in self.live if self.model.stands_on(pair[1], step)]
        if standing:
            with pytest.raises(CacheError, match=str(standing[0][0])):
                self.cache.discard(step)
        for cursor, mine in standing:
            self.cache.close(cursor)
            self.model.close(mine)
            self.live.remove((cursor, mine))
        self.cache.discard(step)
        self.model.discard(step)

    @rule(num_pages=st.integers(1, 4))
    def evict(self, num_pages: int) -> None:
        assert self.cache.evict(num_pages) == self.model.evict(num_pages)

    @rule(space=st.integers(0, SPACES - 1), parts=runs)
    def want(self, space: int, parts: list) -> None:
        tokens = self.tokens(parts)
        self.marked.append((self.cache.want(space, int32(tokens)), self.model.mark(space, tokens, is_pin=False)))

    @rule(space=st.integers(0, SPACES - 1), parts=runs, ttl=st.integers(1, 5))
    def pin(self, space: int, parts: list, ttl: int) -> None:
        tokens = self.tokens(parts)
        self.expire(0)
        pin = self.cache.pin(space, int32(tokens), ttl, self.now)
        mark = self.model.mark(space, tokens, is_pin=True, expires_at=self.now + ttl)
        assert (pin is None) == (mark is None)
        if pin is not None:
            assert pin.length == self.model.peek(space, tokens)
            self.marked.append((pin.pin_id, mark))

    @rule(seconds=st.integers(1, 3))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        assert self.cache.expire_pins(self.now) == self.model.expire(self.now)
        self.marked = [(i, m) for i, m in self.marked if m in self.model.marks]

    @precondition(lambda self: self.marked)
    @rule(index=st.integers(0, 7))
    def unmark(self, index: int) -> None:
        mark_id, mark = self.marked.pop(index % len(self.marked))
        take_back = self.cache.unpin if mark.is_pin else self.cache.unwant
        take_back(mark_id)
        self.model.unmark(mark)
        with pytest.raises(StaleHandleError):
            take_back(mark_id)

    @rule(space=st.integers(0, SPACES - 1))
    def flush_space(self, space: int) -> None:
        assert self.cache.flush(space) == self.model.flush_space(space)

    @rule(space=st.integers(0, SPACES - 1), parts=runs)
    def flush_prefix(self, space: int, parts: list) -> None:
        tokens = self.tokens(parts)
        assert self.cache.flush(space, int32(tokens)) == self.model.flush_prefix(space, tokens)

    @rule(space=st.integers(0, SPACES - 1), parts=runs)
    def probe(self, space: int, parts: list) -> None:
        tokens = self.tokens(parts)
        self.probes.append([space, tokens, self.cache.peek(space, int32(tokens))])

    @invariant()
    def probes_follow(self) -> None:
        if not getattr(self, "probes", None):
            return
        found = self.cache.match_many([(space, int32(tokens), probe) for space, tokens, probe in self.probes])
        for entry, probe in zip(self.probes, found, strict=True):
            assert probe.length == self.model.peek(entry[0], entry[1])
            assert probe.length == self.cache.peek(entry[0], int32(entry[1]), entry[2]).length
            entry[2] = probe

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        model, stats = self.model, self.cache.stats()
        cells, holders = model.cells(), model.holders()
        tails = [c.tail for c in holders if c.tail]
        pending = sum(c.pending for c in cells) + sum(any(s is not None for _, s in t) for t in tails)
        assert stats.num_pages_free == model.num_free()
        assert stats.num_pages_evictable == model.num_evictable()
        assert stats.num_pages_protected == model.num_pages - model.num_free() - model.num_evictable()
        assert stats.num_pages_pending == pending
        assert stats.num_pages_pinned == sum(model.is_pinned(cell) for cell in cells)
        assert stats.num_tokens == len(cells) * model.page_size + sum(len(t) for t in tails)
        assert stats.num_cursors == len(self.live)
        assert stats.num_pins + stats.num_wants == len(model.marks)
        assert stats.num_evicted_pages == sum(model.evicted)
        assert [stats.num_evicted_pinned_pages, stats.num_evicted_wanted_pages] == model.evicted[1:]
        assert stats.num_flushed_pages == model.flushed

    @invariant()
    def slots_are_stable(self) -> None:
        """A cell keeps its page for life, and no two cells have the same."""
        if not hasattr(self, "cache"):
            return
        owner: dict[int, object] = {}
        for cursor, mine in self.live:
            slots = np.full(mine.length, -1, np.int32)
            self.cache.fill_slots(cursor, 0, slots)
            size = self.page_size
            assert (slots % size == np.arange(mine.length) % size).all()
            for i, cell in enumerate(mine.cell.path()):
                page = int(slots[i * size]) // size
                assert (slots[i * size : (i + 1) * size] // size == page).all()
                assert cell.page in (None, page)
                cell.page = page
                assert owner.setdefault(page, cell) is cell
            if mine.tail:
                assert owner.setdefault(int(slots[-1]) // size, mine) is mine


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "priority", "gdsf"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_agrees_with_a_dictionary_of_prefixes(page_size: int, policy: str) -> None:
    machine = type("Machine", (CacheMachine,), {"page_size": page_size, "policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60 if policy == "lru" else 25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
