"""WaitingQueue: the sequences that wait, as columns, so that ordering 10,000 of them is a few array operations.

Owns the columns and the cached prefix match of each waiting sequence. Must not know how the order is chosen
(policy) nor what an admission costs (scheduler).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from phloem.sched.sequence import Sequence

_FINGERPRINT_TOKENS = 32


class WaitingQueue:
    """Columns over waiting sequences; a slot is an index into them. add and remove are O(1) amortised."""

    def __init__(self, capacity: int = 64) -> None:
        self._sequences: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self.num_by_priority: Counter[int] = Counter()
        self.alive = np.zeros(capacity, dtype=bool)
        self.arrival = np.zeros(capacity, dtype=np.int64)
        self.since_s = np.zeros(capacity, dtype=np.float64)
        self.priority = np.zeros(capacity, dtype=np.int64)
        self.client = np.zeros(capacity, dtype=np.int64)
        self.length = np.zeros(capacity, dtype=np.int64)
        self.passes = np.zeros(capacity, dtype=np.int64)
        self.matched = np.zeros(capacity, dtype=np.int64)
        self.group = np.zeros(capacity, dtype=np.int64)
        self.fingerprint = np.zeros(capacity, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._sequences) - len(self._free)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._sequences if sequence is not None)

    def add(self, sequence: Sequence, *, since_s: float, passes: int = 0) -> None:
        """Let a sequence wait; `passes` above 0 brings it nearer to being overdue."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._sequences[slot] = sequence
        sequence.waiting_slot = slot
        self.alive[slot] = True
        self.arrival[slot] = sequence.arrival
        self.since_s[slot] = since_s
        self.priority[slot] = sequence.request.priority
        self.num_by_priority[sequence.request.priority] += 1
        self.client[slot] = sequence.client_id
        self.length[slot] = sequence.num_tokens
        self.passes[slot] = passes
        self.matched[slot] = 0
        first = np.ascontiguousarray(sequence.tokens[: min(sequence.num_tokens, _FINGERPRINT_TOKENS)])
        # Negative, so that it never equals the id of a tree node in the same column.
        fingerprint = -1 - (crc32(first.tobytes()) << 24) - (sequence.namespace_id & 0xFFFFFF)
        self.fingerprint[slot] = self.group[slot] = fingerprint

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        slot = sequence.waiting_slot
        assert self._sequences[slot] is sequence
        self._sequences[slot] = None
        self.alive[slot] = False
        priority = sequence.request.priority
        self.num_by_priority[priority] -= 1
        if not self.num_by_priority[priority]:
            del self.num_by_priority[priority]
        self._free.append(slot)
        sequence.waiting_slot = -1

    def slots(self) -> NDArray[np.int64]:
        """Slots in use, ascending."""
        return np.flatnonzero(self.alive)

    def at(self, slot: int) -> Sequence:
        """The sequence in a slot that is in use."""
        sequence = self._sequences[slot]
        assert sequence is not None
        return sequence

    def note_match(self, slot: int, matched: int, node: int) -> None:
        """Record the cached prefix of a waiting sequence; sequences with the same node sort together."""
        self.matched[slot] = matched
        self.group[slot] = node if matched else self.fingerprint[slot]

    def note_admission(self, sequence: Sequence) -> None:
        """Count a pass for each older one of the client, of no higher priority, that the admitted one overtakes."""
        overtaken = self.alive & (self.arrival < sequence.arrival)
        overtaken &= (self.client == sequence.client_id) & (self.priority >= sequence.request.priority)
        self.passes[overtaken] += 1

    def _grow(self) -> None:
        old = len(self._sequences)
        self._sequences.extend([None] * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
