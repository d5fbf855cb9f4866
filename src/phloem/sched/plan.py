"""PlanBuilder: gathers the rows of one step and turns them into the flat arrays of a StepPlan.

Owns the layout of a plan. Must not know why a row is in it (scheduler) nor what computes it (runner).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phloem.sched.sequence import Sequence
from phloem.types import Int32Array, LogitRow, StepPlan


@dataclass(slots=True)
class PlanBuilder:
    """Rows of one step, sequence by sequence.

    `sequences` and `drawing` keep what the logits belong to, `pooling` whose hidden states are wanted and how many.
    """

    step_id: int
    slot_table: Int32Array
    sequences: list[Sequence] = field(default_factory=list)
    drawing: list[tuple[Sequence, bool]] = field(default_factory=list)
    pooling: list[tuple[Sequence, int]] = field(default_factory=list)
    num_rows: int = 0
    _starts: list[int] = field(default_factory=list)
    _token_ids: list[Int32Array] = field(default_factory=list)
    _positions: list[Int32Array] = field(default_factory=list)
    _write_slots: list[Int32Array] = field(default_factory=list)
    _logit_rows: list[LogitRow] = field(default_factory=list)
    _hidden_rows: list[int] = field(default_factory=list)

    def add_rows(self, sequence: Sequence, start: int, end: int, first_write: int) -> None:
        """Add the rows of positions [start, end); those from `first_write` on write their K/V."""
        positions = np.arange(start, end, dtype=np.int32)
        writes = self.slot_table[sequence.table_row, start:end].copy()
        if first_write > start:
            writes[: first_write - start] = -1
        self._token_ids.append(sequence.tokens[start:end])
        self._positions.append(positions)
        self._write_slots.append(writes)
        self._begin(sequence, end - start)
        if sequence.is_scoring:
            self._add_scored_rows(sequence, start, end)
        if end == sequence.num_tokens and sequence.max_output > 0:
            self._add_logit_row(sequence, self.num_rows - 1, end)

    def add_decode_rows(self, sequences: list[Sequence], write_slots: Int32Array) -> None:
        """Add the last token's row of each sequence; a write slot of -1 means that its K/V is there already."""
        ends = [sequence.num_tokens for sequence in sequences]
        self._token_ids.append(np.array([s.tokens[e - 1] for s, e in zip(sequences, ends, strict=True)], np.int32))
        self._positions.append(np.array(ends, dtype=np.int32) - np.int32(1))
        self._write_slots.append(write_slots)
        for sequence, end in zip(sequences, ends, strict=True):
            self._begin(sequence, 1)
            self._add_logit_row(sequence, self.num_rows - 1, end)

    def build(self) -> StepPlan:
        """The finished plan. O(rows)."""
        return StepPlan(
            step_id=self.step_id,
            token_ids=np.concatenate(self._token_ids),
            positions=np.concatenate(self._positions),
            write_slots=np.concatenate(self._write_slots),
            seq_row_start=np.array([*self._starts, self.num_rows], dtype=np.int32),
            seq_table_row=np.array([sequence.table_row for sequence in self.sequences], dtype=np.int32),
            slot_table=self.slot_table,
            logit_rows=self._logit_rows,
            hidden_rows=np.array(self._hidden_rows, dtype=np.int32),
        )

    def _begin(self, sequence: Sequence, num_rows: int) -> None:
        self.sequences.append(sequence)
        self._starts.append(self.num_rows)
        self.num_rows += num_rows

    def _add_logit_row(self, sequence: Sequence, row: int, position: int, target: int = -1) -> None:
        request = sequence.request
        params = request.params
        draws = target < 0
        banned: tuple[int, ...] = ()
        if params.min_tokens and draws and sequence.num_output < params.min_tokens:
            banned = tuple(sorted(request.eos_token_ids | request.stop_token_ids))
        self.drawing.append((sequence, draws))
        self._logit_rows.append(
            LogitRow(
                row=row,
                position=position,
                seed=sequence.seed,
                params=params,
                history=sequence.tokens[:position],
                num_prompt=sequence.num_prompt,
                target=target,
                banned=banned,
                masker=request.masker[sequence.index] if draws and request.masker else None,
            )
        )

    def _add_scored_rows(self, sequence: Sequence, start: int, end: int) -> None:
        first_row = self.num_rows - (end - start)
        scored = range(max(start, sequence.num_scored), min(end, sequence.score_until))
        if sequence.request.pooling is not None:
            if scored:
                self._hidden_rows += [first_row + position - start for position in scored]
                self.pooling.append((sequence, len(scored)))
            return
        for position in scored:
            self._add_logit_row(
                sequence, first_row + position - start, position + 1, target=int(sequence.tokens[position + 1])
            )
