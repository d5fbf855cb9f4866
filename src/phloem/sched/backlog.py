"""Backlog: the waiting sequences with their cached prefixes, and the order in which they should be admitted.

Owns the waiting queue, the fair shares and what eviction spares for those that wait. Must not know memory estimates
or rows: whether the next one fits is the scheduler's question.
"""

from __future__ import annotations

import numpy as np

from phloem.config import SchedulePolicy
from phloem.kv.manager import KVCacheManager
from phloem.sched.policy import OVERDUE_PASSES, FairShares, order
from phloem.sched.sequence import Sequence
from phloem.sched.waiting import WaitingQueue

LOOK_AHEAD = 64
"""So many waiting sequences have their cached prefix spared from eviction."""


class Backlog:
    """Who waits, and who is next. A client is live from `enter` to `leave`, waiting or not."""

    def __init__(self, manager: KVCacheManager, policy: SchedulePolicy) -> None:
        self.queue = WaitingQueue()
        self.shares = FairShares()
        self._manager = manager
        self._policy: SchedulePolicy = policy
        self._num_wants = 0

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, sequence: Sequence, *, now_s: float, resumed: bool = False) -> None:
        """Let a sequence wait; one that was retracted resumes before all that are not overdue."""
        self.queue.add(sequence, since_s=now_s, passes=OVERDUE_PASSES if resumed else 0)
        self._want(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out: it was admitted or has ended."""
        self.queue.remove(sequence)
        self._unwant(sequence)

    def note_admission(self, sequence: Sequence) -> None:
        """The sequence overtook older ones of its client; cache-aware bounds how often that happens to each."""
        if self._policy == "cache-aware":
            self.queue.note_admission(sequence)

    def is_overdue(self, slot: int) -> bool:
        """True when a waiting sequence must not be overtaken again."""
        return bool(self.queue.passes[slot] >= OVERDUE_PASSES)

    def matched(self, slot: int) -> int:
        """Tokens of a waiting sequence that were cached when `candidates` last looked."""
        return int(self.queue.matched[slot])

    def candidates(self, *, now_s: float, tokens_per_s: float) -> list[int]:
        """Slots of the queue in the order of the policy, with matches up to date.

        O(n log n) in array operations, and a lookup for each whose prefix changed in the tree.
        """
        slots = self.queue.slots()
        sequences = [self.queue.at(slot) for slot in slots.tolist()]
        probes = self._manager.match_many([(s.namespace_id, s.tokens[: s.num_tokens], s.probe) for s in sequences])
        for slot, sequence, probe in zip(slots.tolist(), sequences, probes, strict=True):
            if probe is not sequence.probe:
                sequence.probe = probe
                self.queue.note_match(slot, probe.length, probe.node)
                if sequence.want_id:
                    self._unwant(sequence)
                    self._want(sequence)
        ordered: list[int] = order(
            self.queue, slots, self._policy, self.shares, now_s=now_s, tokens_per_s=tokens_per_s
        ).tolist()
        for slot in ordered[:LOOK_AHEAD]:
            self._want(self.queue.at(slot))
        return ordered

    def most_urgent(self, *, above: int) -> Sequence | None:
        """The oldest of the highest priority, if that is higher than `above` and the policy knows priorities."""
        if not len(self.queue) or self._policy in ("fcfs", "random"):
            return None
        highest = max(self.queue.num_by_priority)
        if highest <= above:
            return None
        slots = self.queue.slots()
        urgent = slots[self.queue.priority[slots] == highest]
        return self.queue.at(int(urgent[np.argmin(self.queue.arrival[urgent])]))

    def _want(self, sequence: Sequence) -> None:
        if not sequence.want_id and self._num_wants < LOOK_AHEAD:
            sequence.want_id = self._manager.want(sequence.namespace_id, sequence.tokens[: sequence.num_tokens])
            self._num_wants += 1

    def _unwant(self, sequence: Sequence) -> None:
        if sequence.want_id:
            self._manager.unwant(sequence.want_id)
            sequence.want_id = 0
            self._num_wants -= 1
