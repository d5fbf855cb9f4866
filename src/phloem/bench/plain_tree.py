"""A radix tree as one would write it in plain Python: the yardstick beside the native one in `phloem bench tree`.

Owns a tree of dictionaries and numpy slices with the usual shortcuts: a walk from the root for match and again for
insert, recency refreshed by every lookup, a heap built from all leaves by each eviction, whole leaves dropped, nothing
merged. Must not know the native tree.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from phloem.types import Int32Array


class PlainNode:
    """An edge of the tree: tokens, slots, children by first token."""

    __slots__ = ("access", "children", "key", "lock_ref", "parent", "value")

    def __init__(self, key: Int32Array, value: Int32Array, parent: PlainNode | None) -> None:
        self.key = key
        self.value = value
        self.parent = parent
        self.children: dict[int, PlainNode] = {}
        self.lock_ref = 0
        self.access = 0


class PlainTree:
    """Pages of one token, least recently used leaves first."""

    def __init__(self, num_pages: int) -> None:
        empty = np.empty(0, np.int32)
        self.root = PlainNode(empty, empty, None)
        self.root.lock_ref = 1
        self.free = list(range(num_pages - 1, -1, -1))
        self._ticks = count(1)

    def match(self, tokens: Int32Array) -> tuple[PlainNode, int]:
        """The node that ends at the longest cached prefix (split for it if need be), and the prefix's length."""
        node, at = self.root, 0
        tick = next(self._ticks)
        node.access = tick
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            child.access = tick
            n = min(len(child.key), len(tokens) - at)
            differs = np.flatnonzero(child.key[:n] != tokens[at : at + n])
            same = int(differs[0]) if len(differs) else n
            at += same
            if same < len(child.key):
                return self._split(child, same), at
            node = child
        return node, at

    def _split(self, node: PlainNode, at: int) -> PlainNode:
        assert node.parent is not None
        upper = PlainNode(node.key[:at], node.value[:at], node.parent)
        upper.lock_ref, upper.access = node.lock_ref, node.access
        node.parent.children[int(node.key[0])] = upper
        node.key, node.value, node.parent = node.key[at:], node.value[at:], upper
        upper.children[int(node.key[0])] = node
        return upper

    def lock(self, node: PlainNode, by: int) -> None:
        """Add `by` to the lock count of a node and its ancestors."""
        at: PlainNode | None = node
        while at is not None:
            at.lock_ref += by
            at = at.parent

    def insert(self, tokens: Int32Array, slots: Int32Array) -> PlainNode:
        """Put tokens in with the slots of those that are not there yet; return their node."""
        node, at = self.match(tokens)
        if at == len(tokens):
            return node
        leaf = PlainNode(tokens[at:].copy(), slots, node)
        leaf.access = next(self._ticks)
        node.children[int(tokens[at])] = leaf
        return leaf

    def allocate(self, n: int) -> Int32Array | None:
        """n slots, evicting when short; None when they cannot be had."""
        if len(self.free) < n:
            self.evict(n - len(self.free))
        if len(self.free) < n:
            return None
        slots = self.free[len(self.free) - n :]
        del self.free[len(self.free) - n :]
        return np.array(slots, dtype=np.int32)

    def evict(self, n: int) -> None:
        """Drop whole unlocked leaves until n slots are free, from a heap of all leaves."""
        order = count()
        heap = [(leaf.access, next(order), leaf) for leaf in self._leaves() if leaf.lock_ref == 0]
        heapq.heapify(heap)
        freed = 0
        while freed < n and heap:
            leaf = heapq.heappop(heap)[2]
            parent = leaf.parent
            assert parent is not None
            self.free += leaf.value.tolist()
            freed += len(leaf.key)
            del parent.children[int(leaf.key[0])]
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(heap, (parent.access, next(order), parent))

    def _leaves(self) -> list[PlainNode]:
        leaves, stack = [], [self.root]
        while stack:
            node = stack.pop()
            if node.children:
                stack += node.children.values()
            else:
                leaves.append(node)
        return leaves
