"""Typed records of the native radix tree: what lookups, inserts, counters, events and snapshots return.

Owns names and meanings only. Must not know requests, steps of the engine, torch or memory: pages are integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem._tree import Probe, RadixTree, prefix_hash
from phloem.types import Int32Array

__all__ = ["Append", "CacheStats", "NodeView", "Pin", "Probe", "RadixTree", "TreeEvent", "TreeSnapshot", "prefix_hash"]


@dataclass(frozen=True, slots=True)
class Append:
    """What `append` did; true when the tokens are there now.

    `num_shared` leading tokens were there already: their K/V needs no write. `moved_from` >= 0: the cursor moved to
    an equal page that was there already, so its slots from that position on are others than before.
    """

    done: bool
    num_shared: int
    moved_from: int

    def __bool__(self) -> bool:
        return self.done


class Pin(NamedTuple):
    """A prefix that eviction spares: its id and its length in tokens."""

    pin_id: int
    length: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of the cache, read in O(1).

    The first block is of now: free + evictable + protected = total; pending pages are protected, pinned ones either.
    The second only rises. `num_rounding_loss_tokens`: tokens of opened prompts that were in the tree but lie behind
    the last whole page that matches (page_size > 1; of wide nodes the first 64 children are searched).
    `num_metadata_bytes`: memory of nodes, index, keys and page ids.
    """

    num_pages_total: int
    num_pages_free: int
    num_pages_evictable: int
    num_pages_protected: int
    num_pages_pending: int
    num_pages_pinned: int
    num_nodes: int
    num_tokens: int
    num_tokens_pending: int
    num_cursors: int
    num_pins: int
    num_wants: int
    num_namespaces: int
    num_metadata_bytes: int

    num_evicted_pages: int
    num_evicted_nodes: int
    num_evicted_pinned_pages: int
    num_evicted_wanted_pages: int
    num_flushed_pages: int
    num_inserted_tokens: int
    num_splits: int
    num_merges: int
    num_rounding_loss_tokens: int


class TreeEvent(NamedTuple):
    """A change of what can be matched, in whole pages.

    `parent` is the prefix_hash of the tokens before `position`, so a listener can mirror the tree, page by page,
    without knowing how nodes split and merge. `cleared`: the whole namespace went (its `removed` events come first).
    """

    kind: Literal["stored", "removed", "cleared"]
    namespace_id: int
    position: int
    parent: bytes
    token_ids: Int32Array


class NodeView(NamedTuple):
    """One node as a view shows it; `parent` is -1 for the root of a namespace."""

    node: int
    parent: int
    generation: int
    namespace_id: int
    start: int
    num_tokens: int
    lock_ref: int
    hits: int
    num_children: int
    num_pending: int
    want_ref: int
    pin_ref: int
    last_access: int


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """All nodes as rows of the columns of NodeView, taken in slices while the engine runs.

    Each row is exact; `is_exact` says whether all rows are of one moment. A view drops rows whose parent is not in it.
    """

    rows: NDArray[np.int64]
    is_exact: bool

    def nodes(self) -> list[NodeView]:
        return [NodeView(*row) for row in self.rows.tolist()]
