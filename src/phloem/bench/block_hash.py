"""A block-hash prefix cache behind the manager's interface, to compare the radix tree with; for benchmarks only.

Owns the scheme that block-hash engines use: K/V in blocks, a full block is known by the chained hash of all tokens up
to its end, a flat map leads from hash to blocks, a block that nobody holds waits in one queue in the order of release
and is taken again from its head. Only full blocks are shared; a request finds its prefix once, when it is admitted; two
requests that compute the same block at once keep two. Source: the design notes of vLLM's automatic prefix caching. Must
not know requests or models.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phloem.errors import StaleHandleError
from phloem.kv.manager import Append, CacheStats
from phloem.types import Int32Array, Namespace

NO_HASH = b""


@dataclass(frozen=True, slots=True)
class BlockProbe:
    """A look-up: tokens found in full blocks, the last block, and the hashes computed for it."""

    length: int
    node: int
    version: int
    hashes: tuple[bytes, ...]


@dataclass(slots=True)
class _Holder:
    """The blocks of one cursor. `parent` is the hash of the last full block, `tail` the tokens after it."""

    parent: bytes
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    tail: list[int] = field(default_factory=list)


class BlockHashManager:
    """Same verbs as KVCacheManager; eviction is LRU, and what has no meaning for blocks (wants, pins) does nothing."""

    def __init__(self, *, num_pages: int, page_size: int = 16, **_others: object) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._hash_of = [NO_HASH] * num_pages
        self._blocks_of: dict[bytes, list[int]] = {}
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._holders: dict[int, _Holder] = {}
        self._spaces: dict[Namespace, int] = {}
        self._pending: dict[int, list[int]] = {}
        self._next_cursor = 1
        self._version = 0
        self._num_idle_cached = 0
        self._num_evicted = 0
        self._num_flushed = 0
        self._num_inserted = 0

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_available(self) -> int:
        return len(self._queue)

    def namespace_id(self, ns: Namespace) -> int:
        return self._spaces.setdefault(ns, len(self._spaces))

    # --- lookups ---

    def peek(self, ns_id: int, tokens: Int32Array, probe: BlockProbe | None = None) -> BlockProbe:
        """Longest prefix in full blocks, always short of the last token, whose logits are needed. O(length)."""
        if probe is not None and probe.version == self._version:
            return probe
        size = self.page_size
        hashes = probe.hashes if probe is not None else self._hashes(_root(ns_id), tokens)
        node = length = 0
        for digest in hashes[: (len(tokens) - 1) // size]:
            blocks = self._blocks_of.get(digest)
            if blocks is None:
                break
            node, length = blocks[0] + 1, length + size
        return BlockProbe(length, node, self._version, hashes)

    def match_many(self, queries: Sequence[tuple[int, Int32Array, BlockProbe | None]]) -> list[BlockProbe]:
        return [self.peek(ns_id, tokens, probe) for ns_id, tokens, probe in queries]

    def _hashes(self, parent: bytes, tokens: Int32Array) -> tuple[bytes, ...]:
        size = self.page_size
        hashes = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = _chain(parent, tokens[start : start + size])
            hashes.append(parent)
        return tuple(hashes)

    # --- cursors ---

    def open(self, ns_id: int, tokens: Int32Array, priority: int = 0) -> tuple[int, int]:
        probe = self.peek(ns_id, tokens)
        holder = _Holder(_root(ns_id), length=probe.length)
        for digest in probe.hashes[: probe.length // self.page_size]:
            holder.blocks.append(self._hold(self._blocks_of[digest][0]))
            holder.parent = digest
        return self._add(holder), probe.length

    def advance(self, cursor: int, tokens: Int32Array) -> int:
        """0: the prefix was looked up at admission, and is not again."""
        return 0

    def append(self, cursor: int, tokens: Int32Array, step_id: int) -> Append:
        holder = self._holder(cursor)
        last = -(-(holder.length + len(tokens)) // self.page_size)
        if last - len(holder.blocks) > len(self._queue):
            return Append(False, 0, -1)
        for token in tokens.tolist():
            self._put(holder, token, step_id)
        return Append(True, 0, -1)

    def extend(
        self,
        cursors: NDArray[np.int64],
        tokens: Int32Array,
        step_id: int,
        slots_out: Int32Array,
        writes_out: NDArray[np.uint8],
        moved_from_out: Int32Array | None = None,
    ) -> int:
        for i, (cursor, token) in enumerate(zip(cursors.tolist(), tokens.tolist(), strict=True)):
            holder = self._holder(cursor)
            if holder.length == len(holder.blocks) * self.page_size and not self._queue:
                return i
            slots_out[i] = self._put(holder, token, step_id)
            writes_out[i] = 1
            if moved_from_out is not None:
                moved_from_out[i] = -1
        return len(cursors)

    def _put(self, holder: _Holder, token: int, step_id: int) -> int:
        """Place one token; hash its block when that is full. Returns the slot."""
        size = self.page_size
        if holder.length == len(holder.blocks) * size:
            holder.blocks.append(self._take())
        slot = holder.blocks[-1] * size + holder.length % size
        holder.length += 1
        holder.tail.append(token)
        self._num_inserted += 1
        if len(holder.tail) == size:
            block = holder.blocks[-1]
            holder.parent = _chain(holder.parent, np.array(holder.tail, np.int32))
            holder.tail.clear()
            self._hash_of[block] = holder.parent
            same = self._blocks_of.setdefault(holder.parent, [])
            same.append(block)
            self._version += len(same) == 1
            self._pending.setdefault(step_id, []).append(block)
        return slot

    def length(self, cursor: int) -> int:
        return self._holder(cursor).length

    def fork(self, cursor: int) -> int:
        """A second cursor after the full blocks of the first."""
        holder = self._holder(cursor)
        full = len(holder.blocks) - bool(holder.tail)
        blocks = [self._hold(block) for block in holder.blocks[:full]]
        return self._add(_Holder(holder.parent, blocks, full * self.page_size))

    def close(self, cursor: int) -> None:
        """Give the blocks back, last first, so that the end of a prefix is taken before its start."""
        holder = self._holder(cursor)
        del self._holders[cursor]
        for block in reversed(holder.blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._queue[block] = None
                self._num_idle_cached += self._hash_of[block] != NO_HASH

    def fill_slots(self, cursor: int, start: int, out: Int32Array) -> None:
        holder, size = self._holder(cursor), self.page_size
        first = start // size
        slots = np.array(holder.blocks[first:], np.int32)[:, None] * size + np.arange(size, dtype=np.int32)
        out[start : holder.length] = slots.reshape(-1)[start - first * size : holder.length - first * size]

    # --- steps and space ---

    def complete(self, step_id: int) -> None:
        self._pending.pop(step_id, None)

    def discard(self, step_id: int) -> None:
        """Forget the hashes of blocks that the failed step filled."""
        for block in self._pending.pop(step_id, ()):
            self._forget(block)

    def want(self, ns_id: int, tokens: Int32Array) -> int:
        """No use: blocks know no future."""
        return 1

    def unwant(self, want_id: int) -> None:
        """Nothing to take back."""

    def evict(self, num_pages: int) -> int:
        cached = [block for block in self._queue if self._hash_of[block]][:num_pages]
        for block in cached:
            self._forget(block)
        self._num_evicted += len(cached)
        return len(cached)

    def flush(self, ns_id: int | None = None, prefix: Int32Array | None = None) -> int:
        """Forget every hash; the number of idle blocks among them. A namespace alone is not told apart: all goes."""
        idle = self._num_idle_cached
        for block in range(self.num_pages):
            self._forget(block)
        self._num_flushed += idle
        return idle

    def stats(self) -> CacheStats:
        """Counters in O(1): evictable are idle blocks whose content is known."""
        evictable = self._num_idle_cached
        zero = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
        return CacheStats(
            **zero
            | {
                "num_pages_total": self.num_pages,
                "num_pages_free": len(self._queue) - evictable,
                "num_pages_evictable": evictable,
                "num_pages_protected": self.num_pages - len(self._queue),
                "num_nodes": len(self._blocks_of),
                "num_cursors": len(self._holders),
                "num_namespaces": len(self._spaces),
                "num_evicted_pages": self._num_evicted,
                "num_flushed_pages": self._num_flushed,
                "num_inserted_tokens": self._num_inserted,
            }
        )

    def check_invariants(self) -> None:
        """Recount references, queue and map. Raises AssertionError."""
        refs = [0] * self.num_pages
        for holder in self._holders.values():
            for block in holder.blocks:
                refs[block] += 1
            assert len(holder.blocks) == -(-holder.length // self.page_size), "a cursor has blocks for its length"
        assert refs == self._refs, "references are those of the cursors"
        idle = {block for block, count in enumerate(refs) if count == 0}
        assert set(self._queue) == idle, "idle blocks wait in the queue"
        assert self._num_idle_cached == sum(self._hash_of[block] != NO_HASH for block in idle)
        known = {block: digest for digest, blocks in self._blocks_of.items() for block in blocks}
        hashes = {block: digest for block, digest in enumerate(self._hash_of) if digest}
        assert known == hashes, "the map leads to the blocks of each hash"

    # --- blocks ---

    def _take(self) -> int:
        """The block at the head of the queue, forgotten if it was cached. The caller knows that there is one."""
        block, _ = self._queue.popitem(last=False)
        self._num_evicted += bool(self._hash_of[block])
        self._forget(block)
        self._refs[block] = 1
        return block

    def _hold(self, block: int) -> int:
        if self._refs[block] == 0:
            del self._queue[block]
            self._num_idle_cached -= self._hash_of[block] != NO_HASH
        self._refs[block] += 1
        return block

    def _forget(self, block: int) -> None:
        digest, self._hash_of[block] = self._hash_of[block], NO_HASH
        self._num_idle_cached -= digest != NO_HASH and self._refs[block] == 0
        if digest:
            self._blocks_of[digest].remove(block)
            self._version += 1
            if not self._blocks_of[digest]:
                del self._blocks_of[digest]

    def _add(self, holder: _Holder) -> int:
        cursor = self._next_cursor
        self._next_cursor += 1
        self._holders[cursor] = holder
        return cursor

    def _holder(self, cursor: int) -> _Holder:
        holder = self._holders.get(cursor)
        if holder is None:
            raise StaleHandleError(f"cursor {cursor} is not open")
        return holder


def _root(ns_id: int) -> bytes:
    return b"namespace %d" % ns_id


def _chain(parent: bytes, tokens: Int32Array) -> bytes:
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()
