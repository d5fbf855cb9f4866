"""SGLang's Python RadixCache as a player of `phloem bench tree`, where the reader has sglang installed.

Owns the calls to its public interface (create_simulated, match_prefix, insert, evict, locks) and a free list in place
of its memory pool. Must not be imported by anything but the benchmark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from phloem.bench.tree import Call


def _base() -> Any:
    return import_module("sglang.srt.mem_cache.base_prefix_cache")


def _radix() -> Any:
    return import_module("sglang.srt.mem_cache.radix_cache")


def _torch() -> Any:
    return import_module("torch")


class SlotPool:
    """What the cache frees evicted slots to."""

    device = "cpu"

    def __init__(self, num_pages: int) -> None:
        self.slots = list(range(num_pages - 1, -1, -1))

    def free(self, slots: Any) -> None:
        """Take a tensor of slots back."""
        self.slots += slots.tolist()


class SGLangPlayer:
    """Serves whole requests as SGLang's scheduler does: match, lock, allocate, insert when finished, unlock."""

    def __init__(self, num_pages: int) -> None:
        self._pool = SlotPool(num_pages)
        self._cache = _radix().RadixCache.create_simulated(mock_allocator=self._pool)

    def serve(self, call: Call) -> int:
        """Return the prompt tokens that were cached."""
        cache, pool = self._cache, self._pool
        tokens = call.tokens.tolist()
        prompt = _radix().RadixKey(tokens[: call.num_prompt], None)
        match = cache.match_prefix(_base().MatchPrefixParams(key=prompt))
        node, length = match.last_device_node, len(match.device_indices)
        cache.inc_lock_ref(node)
        needed = len(tokens) - length
        if len(pool.slots) < needed:
            cache.evict(_base().EvictParams(num_tokens=needed - len(pool.slots)))
        fresh = pool.slots[len(pool.slots) - needed :]
        del pool.slots[len(pool.slots) - needed :]
        slots = _torch().cat([match.device_indices, _torch().from_numpy(np.array(fresh, dtype=np.int64))])
        cache.insert(_base().InsertParams(key=_radix().RadixKey(tokens, None), value=slots))
        cache.dec_lock_ref(node)
        return length
