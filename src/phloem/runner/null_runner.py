"""NullRunner: a model without weights, for tests and simulations of everything around the model.

Each token is a hash of the K/V that the row can see, so a wrong slot, a missing write or a foreign prefix changes
the output. Must not know the scheduler or the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phloem.types import LogitRow, StepPlan, StepResult, TopLogprobs

_MIX = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(0)

HIDDEN_SIZE = 4
"""Of the numbers that stand for a hidden state."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def next_token(tokens: NDArray[np.int32], seed: int, vocab_size: int) -> int:
    """The token that NullRunner draws after `tokens`: what a test compares with. O(length)."""
    ids = np.asarray(tokens, dtype=np.int64)
    keys = _kv_value(ids, np.arange(len(ids), dtype=np.int64))
    return _draw(keys, seed, vocab_size)


def hidden_state(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The hidden state of the last of `tokens`: what a test compares with. O(length)."""
    ids = np.asarray(tokens, dtype=np.int64)
    return _hidden(_kv_value(ids, np.arange(len(ids), dtype=np.int64)))


def _hidden(keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    return np.array([_draw(keys, seed, 1000) / 1000 for seed in range(HIDDEN_SIZE)], np.float32)


def _kv_value(token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Stands for K/V: never 0, which marks a slot that nobody wrote."""
    mixed = _mix((token_ids.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + _MIX)
    return mixed | np.uint64(1)


def _draw(keys: NDArray[np.uint64], seed: int, vocab_size: int) -> int:
    # A sum is order-free, and every key is already tied to its position.
    total = keys.sum(dtype=np.uint64) ^ np.uint64(seed)
    return int(_mix(np.array([total], dtype=np.uint64))[0] % np.uint64(vocab_size))


def _table_of_row(plan: StepPlan) -> NDArray[np.int32]:
    return np.repeat(plan.seq_table_row, np.diff(plan.seq_row_start))


class NullRunner:
    """Implements ModelRunner. `attend=False` skips the K/V, for simulations of speed.

    `fail_at` names steps (by order of call, from 0) that raise, to test recovery.
    """

    def __init__(
        self, *, num_slots: int, vocab_size: int = 1000, attend: bool = True, fail_at: frozenset[int] = frozenset()
    ) -> None:
        self._kv = np.zeros(num_slots, dtype=np.uint64)
        self._vocab_size = vocab_size
        self._attend = attend
        self._fail_at = fail_at
        self.num_steps = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def step(self, plan: StepPlan) -> StepResult:
        """Write, then attend, then draw. Raises RuntimeError in steps named by `fail_at`."""
        self.num_steps += 1
        if self._attend:
            writing = plan.write_slots >= 0
            values = _kv_value(plan.token_ids.astype(np.int64), plan.positions.astype(np.int64))
            self._kv[plan.write_slots[writing]] = values[writing]
        if self.num_steps - 1 in self._fail_at:
            raise RuntimeError("this step was told to fail")
        drawn = self._attended(plan) if self._attend else [self._unseen(row) for row in plan.logit_rows]
        return StepResult(
            step_id=plan.step_id,
            token_ids=np.array(drawn, dtype=np.int32),
            logprobs=np.full(len(drawn), -1.0, dtype=np.float32),
            top=[self._top(row) for row in plan.logit_rows],
            hidden=self._hidden(plan) if len(plan.hidden_rows) else np.empty((0, HIDDEN_SIZE), np.float32),
        )

    def close(self) -> None:
        """Nothing to release."""

    def _hidden(self, plan: StepPlan) -> NDArray[np.float32]:
        """Stands for hidden states: numbers from the K/V that each row can see."""
        table_of_row = _table_of_row(plan)
        states = np.empty((len(plan.hidden_rows), HIDDEN_SIZE), np.float32)
        for i, row in enumerate(plan.hidden_rows.tolist()):
            keys = self._kv[plan.slot_table[table_of_row[row], : plan.positions[row] + 1]]
            if (keys == _EMPTY).any():
                raise AssertionError(f"a row at position {plan.positions[row]} attends a slot that was never written")
            states[i] = _hidden(keys)
        return states

    def _unseen(self, row: LogitRow) -> int:
        return row.target if row.target >= 0 else (row.position * 7919 + row.seed) % self._vocab_size

    def _attended(self, plan: StepPlan) -> list[int]:
        table_of_row = _table_of_row(plan)
        return [self._token(plan, row, int(table_of_row[row.row])) for row in plan.logit_rows]

    def _token(self, plan: StepPlan, row: LogitRow, table_row: int) -> int:
        if row.target >= 0:
            return row.target
        keys = self._kv[plan.slot_table[table_row, : row.position]]
        if (keys == _EMPTY).any():
            raise AssertionError(f"a row at position {row.position - 1} attends a slot that was never written")
        return _draw(keys, row.seed, self._vocab_size)

    def _top(self, row: LogitRow) -> TopLogprobs | None:
        count = row.params.logprobs if row.target < 0 else row.params.prompt_logprobs
        if not count:
            return None
        return TopLogprobs(np.arange(count, dtype=np.int32), np.full(count, -2.0, dtype=np.float32))
