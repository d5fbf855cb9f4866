"""PrefillBudget: how prompts share the rows of a step.

Owns that rule. Must not know sequences, the cache or the clock: rows in, rows out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefillBudget:
    """Rows of one step, offered to one prompt after the other in their order.

    The first prompt is always offered some, so none waits for ever. A prompt that fits is taken whole: prompts that
    advance side by side all finish as late as the last of them. One that does not fit takes `share` at most, so that
    short ones behind it get through. Once a prompt finishes in the step, others add at most `join_rows` to it.
    """

    num_left: int
    share: int
    join_rows: int
    _finishes: bool = False
    _num_joined: int = 0

    def offer(self, num_wanted: int) -> int:
        """Rows for a prompt that lacks so many; 0 when it had better go into the next step."""
        num_rows = num_wanted if num_wanted <= self.num_left else min(self.share, self.num_left)
        return num_rows if not self._finishes or self._num_joined + num_rows <= self.join_rows else 0

    def take(self, num_rows: int, *, finishes: bool) -> None:
        """A prompt got so many rows; `finishes` says that they are its last."""
        self.num_left -= num_rows
        if self._finishes:
            self._num_joined += num_rows
        self._finishes = self._finishes or finishes
