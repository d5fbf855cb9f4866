"""KVCacheManager: the one owner of the page pool and the radix tree, as ids and integers.

Owns which page holds which tokens, who holds which path, and what goes when space is short. Must not know K/V memory,
torch, models, requests or clocks: times come with the call. One thread changes it; `stats`, `snapshot` and lookups may
come from any thread.

    open --> cursor --advance, append, extend, fork--> cursor --close--> evictable
                           |
                           +-- pending until complete(step) or discard(step)

A cursor stands after the last token of its sequence and locks the path to it. Costs below are in nodes on the path
and tokens passed; a lookup compares 4 to 17 tokens per nanosecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phloem._tree import Probe
from phloem._tree import RadixTree as _NativeTree
from phloem.config import EvictionPolicy
from phloem.errors import CacheError
from phloem.kv.radix_tree import Append, CacheStats, Pin, TreeEvent, TreeSnapshot
from phloem.types import Int32Array, Namespace

__all__ = ["Append", "CacheStats", "KVCacheManager", "Pin", "Probe", "TreeEvent", "TreeSnapshot"]


class KVCacheManager:
    """The KV cache as policy. Every array of tokens is int32, one-dimensional and contiguous.

    Raises CacheError for a call that breaks the contract, StaleHandleError (a CacheError) for a cursor, want or pin
    that is not open; then nothing has changed.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 1,
        eviction_policy: EvictionPolicy = "lru",
        evict_watermark: float = 0.0,
        pin_budget: float = 0.3,
    ) -> None:
        """Pages of `page_size` tokens. `evict_watermark`: after each insert evict until this share of the pool is free.

        `pin_budget`: the largest share of the pool that pins may hold.
        """
        self._tree = _NativeTree(num_pages, page_size, eviction_policy, evict_watermark, pin_budget)
        self._namespace_ids: dict[Namespace, int] = {}
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds in all."""
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free or evictable. O(1)."""
        return self._tree.num_available()

    def namespace_id(self, ns: Namespace) -> int:
        """The id of a namespace, the same for each equal one. Namespaces share nothing."""
        known = self._namespace_ids.get(ns)
        if known is None:
            known = self._namespace_ids[ns] = self._tree.create_space()
        return known

    # --- lookups: change nothing, not even recency ---

    def peek(self, ns_id: int, tokens: Int32Array, probe: Probe | None = None) -> Probe:
        """Longest cached prefix of `tokens`, rounded down to a page and out of atomic spans.

        `probe` of an earlier peek with a prefix of the same tokens: only what changed since is matched again. Then
        `tokens` may have grown, and the result's `length` counts from position 0 as always.
        """
        return self._tree.peek(ns_id, tokens, probe)

    def match_many(self, queries: Sequence[tuple[int, Int32Array, Probe | None]]) -> list[Probe]:
        """Peek for each (namespace id, tokens, probe of last time or None); the GIL is free while tokens are compared.

        Where nothing changed since, the very same probe comes back: O(1), about 50 ns. A query with more tokens than
        its probe was made with must come without the probe.
        """
        return self._tree.match_many(queries if isinstance(queries, list) else list(queries))

    # --- cursors ---

    def open(self, ns_id: int, tokens: Int32Array, priority: int = 0) -> tuple[int, int]:
        """Match and lock: a cursor after the longest cached prefix, and that prefix's length.

        Splits the node that the match ends inside, so that exactly the prefix is locked. `priority` ranks the path
        under the policy `priority`.
        """
        return self._tree.open(ns_id, tokens, priority)

    def advance(self, cursor: int, tokens: Int32Array) -> int:
        """Move along what is cached of `tokens`, which follow the cursor, pending nodes too; return how many passed.

        0 while the cursor stands inside a page: then `append` finds an equal page.
        """
        return self._tree.advance(cursor, tokens)

    def append(self, cursor: int, tokens: Int32Array, step_id: int) -> Append:
        """Put `tokens` behind the cursor, pending until the step completes, and move it to their end.

        All or nothing: false when free and evictable pages do not suffice. What is there already is shared. Evicts
        when short.
        """
        return Append(*self._tree.append(cursor, tokens, step_id))

    def extend(
        self,
        cursors: NDArray[np.int64],
        tokens: Int32Array,
        step_id: int,
        slots_out: Int32Array,
        writes_out: NDArray[np.uint8],
        moved_from_out: Int32Array | None = None,
    ) -> int:
        """One token for each of B cursors, in order; the number done, less than B where no page could be had.

        slots_out[i]: the token's slot; writes_out[i]: 1 if its K/V must be written, 0 if it is there already or another
        row of the step writes it. moved_from_out[i] >= 0: the cursor's slots changed from that position on (only with
        page_size > 1, when a page filled that was there already). O(1) per token.
        """
        return self._tree.extend(cursors, tokens, step_id, slots_out, writes_out, moved_from_out)

    def length(self, cursor: int) -> int:
        """Tokens before the cursor. O(1)."""
        return self._tree.length(cursor)

    def fork(self, cursor: int) -> int:
        """A second cursor at the same place; at the page boundary before it when the cursor stands inside a page."""
        return self._tree.fork(cursor)

    def close(self, cursor: int) -> None:
        """Unlock the path; its K/V stays as newest evictable. A partly filled page is dropped.

        While tokens of the cursor's node are pending the lock stays until their step completes or is discarded.
        """
        self._tree.close(cursor)

    def fill_slots(self, cursor: int, start: int, out: Int32Array) -> None:
        """Write the slots of positions [start, length(cursor)) to out[start:]. O(length - start)."""
        self._tree.fill_slots(cursor, start, out)

    # --- steps ---

    def complete(self, step_id: int) -> None:
        """The step has run: its tokens are ordinary now. Steps complete in order. O(nodes inserted).

        A step that inserted nothing may be completed too. Raises CacheError while an older step is open.
        """
        self._tree.complete(step_id)

    def discard(self, step_id: int) -> None:
        """The step failed: remove its pending tokens and all behind them, and free their pages.

        Raises CacheError naming the cursors that still stand on such tokens.
        """
        self._tree.discard(step_id)

    # --- what eviction spares ---

    def want(self, ns_id: int, tokens: Int32Array) -> int:
        """A waiting request will use the cached prefix of `tokens`: evict it last. The id is for `unwant`."""
        return self._tree.want(ns_id, tokens)

    def unwant(self, want_id: int) -> None:
        """Take a want back; must be done once for each `want`, whatever was evicted meanwhile."""
        self._tree.unwant(want_id)

    def pin(self, ns_id: int, tokens: Int32Array, ttl_s: float, now: float) -> Pin | None:
        """Spare the cached prefix of `tokens` until now + ttl_s, longer than ordinary and shorter than wanted ones.

        Soft: evicted, and counted, when nothing else is left. None when nothing is cached or the budget is spent.
        """
        if not ttl_s > 0.0:
            raise CacheError(f"ttl_s must be above 0, got {ttl_s!r}")
        self._tree.expire_pins(now)
        pin_id, length = self._tree.pin(ns_id, tokens, now + ttl_s)
        return Pin(pin_id, length) if pin_id else None

    def unpin(self, pin_id: int) -> None:
        """Take a pin back. Raises StaleHandleError when it has expired."""
        self._tree.unpin(pin_id)

    def expire_pins(self, now: float) -> int:
        """Take back every pin whose time is over; return how many. O(log pins) each."""
        return self._tree.expire_pins(now)

    # --- space ---

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages by the policy, from the ends of unlocked leaves; return how many.

        O(1) per node for lru, O(log leaves) else. Raises CapacityError for more pages than the pool has.
        """
        return self._tree.evict(num_pages)

    def flush(self, ns_id: int | None = None, prefix: Int32Array | None = None) -> int:
        """Forget everything, a namespace, or what starts with a prefix in it; return the pages freed now.

        Safe while requests run: locked parts serve their holders on, match no more, and are freed when unlocked. A
        prefix is rounded down to a page; of itself only what leads nowhere else goes.
        """
        if ns_id is None:
            if prefix is not None:
                raise CacheError("flush of a prefix needs the namespace it is in: pass ns_id")
            return self._tree.flush_all()
        return self._tree.flush_space(ns_id) if prefix is None else self._tree.flush_prefix(ns_id, prefix)

    # --- views ---

    def stats(self) -> CacheStats:
        """Counters, in O(1), from any thread."""
        return CacheStats(**self._tree.stats())

    def snapshot(self) -> TreeSnapshot:
        """All nodes, from any thread, without the GIL and in slices of 2,048 nodes between which the engine goes on."""
        return TreeSnapshot(*self._tree.snapshot())

    def listen(self, on: bool = True) -> None:
        """Start or stop recording events; nothing is recorded or paid for while off. O(prefix) per event while on."""
        self._tree.listen(on)

    def take_events(self) -> list[TreeEvent]:
        """Events since the last call, in order."""
        return [TreeEvent(*event) for event in self._tree.take_events()]

    def check_invariants(self) -> None:
        """Recount everything. Raises AssertionError naming the node that breaks an invariant. O(nodes + pages)."""
        broken = self._tree.check_invariants()
        if broken:
            raise AssertionError(broken)
