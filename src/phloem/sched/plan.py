"""PlanBuilder: gathers the rows of one step and turns them into the flat arrays of a StepPlan.

Owns the layout of a plan. Must not know why a row is in it (scheduler) nor what computes it (runner).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phloem.sched.sequence import Sequence
from phloem.types import Int32Array, LogitRow, StepPlan

Span = tuple[Sequence, int, int, Int32Array]
"""A sequence, the positions [start, end) of its rows, and for each the slot that its K/V is written to, or -1."""


@dataclass(slots=True)
class PlanBuilder:
    """Rows of one step. `silent` are those among its sequences that draw no token.

    After `build`, `drawing` has the sequence of each logit row, `pooling` whose hidden states are wanted and how many.
    """

    step_id: int
    slot_table: Int32Array
    num_rows: int = 0
    silent: list[Sequence] = field(default_factory=list)
    drawing: list[Sequence] = field(default_factory=list)
    pooling: list[tuple[Sequence, int]] = field(default_factory=list)
    logit_rows: list[LogitRow] = field(default_factory=list)
    hidden_rows: list[int] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences with rows in the step."""
        return list(dict.fromkeys(span[0] for span in self._spans))

    def has(self, sequence: Sequence) -> bool:
        """True when the sequence has rows in the step."""
        return any(span[0] is sequence for span in self._spans)

    def add_rows(self, sequence: Sequence, start: int, end: int, first_write: int) -> None:
        """Add the rows of positions [start, end); those from `first_write` on write their K/V."""
        writes = self.slot_table[sequence.table_row, start:end].copy()
        writes[: max(first_write - start, 0)] = -1
        self._spans.append((sequence, start, end, writes))
        if sequence.max_output == 0:
            self.silent.append(sequence)
        self.num_rows += end - start

    def add_decode_rows(self, sequences: list[Sequence], write_slots: Int32Array) -> None:
        """Add the last token's row of each sequence; a write slot of -1 means that its K/V is there already."""
        each = zip(sequences, write_slots.reshape(-1, 1), strict=True)
        self._spans += [(sequence, sequence.num_tokens - 1, sequence.num_tokens, write) for sequence, write in each]
        self.num_rows += len(sequences)

    def build(self) -> StepPlan:
        """The finished plan, its sequences in depth-first order of the tree. O(rows).

        Kernels load K/V once for neighbours that share it, so those with the longest common path stand together.
        """
        spans = sorted(self._spans, key=_path_of)
        table_rows = np.array([sequence.table_row for sequence, _, _, _ in spans], dtype=np.int32)
        starts = np.array([start for _, start, _, _ in spans], dtype=np.int32)
        lengths = np.array([len(writes) for _, _, _, writes in spans], dtype=np.int32)
        seq_row_start = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(lengths, out=seq_row_start[1:])
        positions = np.arange(self.num_rows, dtype=np.int32) + np.repeat(starts - seq_row_start[:-1], lengths)
        for (sequence, start, end, _), first_row in zip(spans, seq_row_start.tolist(), strict=False):
            self._add_wanted_rows(sequence, start, end, first_row)
        return StepPlan(
            step_id=self.step_id,
            token_ids=np.concatenate([sequence.tokens[start:end] for sequence, start, end, _ in spans]),
            positions=positions,
            write_slots=np.concatenate([writes for _, _, _, writes in spans]),
            seq_row_start=seq_row_start,
            seq_table_row=table_rows,
            slot_table=self.slot_table,
            logit_rows=self.logit_rows,
            hidden_rows=np.array(self.hidden_rows, dtype=np.int32),
        )

    def _add_wanted_rows(self, sequence: Sequence, start: int, end: int, first_row: int) -> None:
        """Rows of a span that are looked at: of the prompt, then the draw if the sequence's last row is in it."""
        if sequence.is_scoring:
            scored = range(max(start, sequence.num_scored), min(end, sequence.score_until))
            self._add_scored_rows(sequence, scored, first_row - start)
        if end == sequence.num_tokens and end < sequence.max_total:
            self.logit_rows.append(sequence.draw_row(first_row + end - 1 - start))
            self.drawing.append(sequence)

    def _add_scored_rows(self, sequence: Sequence, scored: range, offset: int) -> None:
        if sequence.request.pooling is not None:
            self.pooling.append((sequence, len(scored)))
            self.hidden_rows += [offset + position for position in scored]
            return
        for position in scored:
            self.logit_rows.append(sequence.score_row(offset + position, position + 1))
            self.drawing.append(sequence)


def _path_of(span: Span) -> bytes:
    return span[0].path
