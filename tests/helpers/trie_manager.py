"""A cache manager of one trie node per token: slow, obvious, and the oracle for the real one.

Pages of one token only. Same verbs as phloem.kv.manager.KVCacheManager.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phloem.types import Namespace


@dataclass(eq=False)
class TrieNode:
    token: int = -1
    parent: TrieNode | None = None
    slot: int = -1
    lock_ref: int = 0
    tick: int = 0
    pending: int = 0
    ident: int = 0
    children: dict[int, TrieNode] = field(default_factory=dict)

    def path(self) -> list[TrieNode]:
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class TrieProbe:
    length: int
    node: int
    version: int


@dataclass(frozen=True)
class TrieStats:
    free: int
    evictable: int
    protected: int


class TrieManager:
    page_size = 1

    def __init__(self, *, num_pages: int) -> None:
        self.num_slots = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._roots: dict[Namespace, int] = {}
        self._root_nodes: list[TrieNode] = []
        self._cursors: dict[int, TrieNode] = {}
        self._nodes: set[TrieNode] = set()
        self._next_cursor = 0
        self._tick = 0
        self._version = 0
        self._num_nodes = 0

    @property
    def num_available(self) -> int:
        return len(self._free) + sum(node.lock_ref == 0 for node in self._nodes)

    def namespace_id(self, namespace: Namespace) -> int:
        if namespace not in self._roots:
            self._roots[namespace] = len(self._root_nodes)
            self._root_nodes.append(TrieNode())
        return self._roots[namespace]

    def _walk(self, node, tokens):
        for token in tokens:
            child = node.children.get(int(token))
            if child is None:
                break
            node = child
        return node

    def match_many(self, queries):
        probes = []
        for ns_id, tokens, probe in queries:
            if probe is not None and probe.version == self._version:
                probes.append(probe)
            else:
                node = self._walk(self._root_nodes[ns_id], tokens)
                probes.append(TrieProbe(len(node.path()), node.ident, self._version))
        return probes

    def open(self, ns_id, tokens):
        node = self._walk(self._root_nodes[ns_id], tokens)
        self._next_cursor += 1
        self._cursors[self._next_cursor] = node
        path = node.path()
        for step in path:
            step.lock_ref += 1
        return self._next_cursor, len(path)

    def advance(self, cursor, tokens):
        node = self._cursors[cursor]
        end = self._walk(node, tokens)
        moved = end.path()[len(node.path()) :]
        for step in moved:
            step.lock_ref += 1
        self._cursors[cursor] = end
        return len(moved)

    def append(self, cursor, tokens, step_id):
        if len(tokens) > self.num_available:
            return False
        node = self._cursors[cursor]
        for token in tokens:
            assert int(token) not in node.children
            node = self._new_child(node, int(token), step_id)
        self._cursors[cursor] = node
        return True

    def _new_child(self, node, token, step_id):
        self._version += 1
        if not self._free:
            self.evict(1)
        self._num_nodes += 1
        child = TrieNode(token, node, self._free.pop(), lock_ref=1, pending=step_id, ident=self._num_nodes)
        node.children[token] = child
        self._nodes.add(child)
        return child

    def extend(self, cursors, tokens, step_id, slots_out, writes_out):
        for i, (cursor, token) in enumerate(zip(cursors.tolist(), tokens.tolist(), strict=True)):
            node = self._cursors[cursor]
            child = node.children.get(token)
            writes_out[i] = child is None
            if child is None:
                if self.num_available == 0:
                    return i
                child = self._new_child(node, token, step_id)
            else:
                child.lock_ref += 1
            self._cursors[cursor] = child
            slots_out[i] = child.slot
        return len(cursors)

    def length(self, cursor):
        return len(self._cursors[cursor].path())

    def fill_slots(self, cursor, start, out):
        slots = [node.slot for node in self._cursors[cursor].path()]
        out[start : len(slots)] = slots[start:]

    def close(self, cursor):
        self._tick += 1
        for node in self._cursors.pop(cursor).path():
            node.lock_ref -= 1
            node.tick = self._tick

    def evict(self, num_pages):
        for _ in range(num_pages):
            leaves = [node for node in self._nodes if node.lock_ref == 0 and not node.children]
            self._remove(min(leaves, key=lambda node: node.tick))
        return num_pages

    def _remove(self, node):
        self._version += 1
        self._nodes.discard(node)
        del node.parent.children[node.token]
        self._free.append(node.slot)

    def complete(self, step_id):
        for node in self._nodes:
            if node.pending == step_id:
                node.pending = 0

    def discard(self, step_id):
        dropped = [node for node in self._nodes if node.pending == step_id]
        assert all(node.lock_ref == 0 for node in dropped)
        for node in sorted(dropped, key=lambda node: -len(node.path())):
            self._remove(node)

    def flush(self, namespace_id=None):
        count = 0
        while any(node.lock_ref == 0 and not node.children for node in self._nodes):
            count += self.evict(1)
        return count

    def stats(self):
        evictable = sum(node.lock_ref == 0 for node in self._nodes)
        return TrieStats(len(self._free), evictable, len(self._nodes) - evictable)

    def check_invariants(self):
        assert len(self._free) + len(self._nodes) == self.num_slots
        slots = self._free + [node.slot for node in self._nodes]
        assert sorted(slots) == list(range(self.num_slots))
        for node in self._nodes:
            assert node.parent.parent is None or node.parent.lock_ref >= node.lock_ref
        if not self._cursors:
            assert all(node.lock_ref == 0 for node in self._nodes)


def int32(values):
    return np.array(values, dtype=np.int32)
