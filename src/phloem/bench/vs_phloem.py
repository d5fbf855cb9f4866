"""phloem's side of `phloem bench vs-llama`: `python -m phloem.bench.vs_phloem MODEL THREADS ISA`.

Owns how a case becomes step plans. Must not know cases, clocks or the other engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import numpy as np

from phloem.bench.vs_worker import MAX_LEN, NUM_DECODED, NUM_STREAMS, STREAM_PROMPT, answer
from phloem.config import Isa
from phloem.models.load import load_model
from phloem.runner.native_runner import NativeRunner
from phloem.types import LogitRow, SamplingParams, StepPlan

_GREEDY = SamplingParams(temperature=0)
_NO_TOKENS = np.zeros(0, np.int32)


class Phloem:
    """The native runner: a step as the scheduler hands it over, and its sampler."""

    def __init__(self, model: str, num_threads: int, isa: Isa) -> None:
        loaded = load_model(model)
        num_slots = max(MAX_LEN, NUM_STREAMS * (STREAM_PROMPT + NUM_DECODED))
        self._runner = NativeRunner(loaded.spec, loaded.weights, num_slots=num_slots, num_threads=num_threads, isa=isa)
        self._slots = np.arange(num_slots, dtype=np.int32)

    def forward(self, tokens: Sequence[Sequence[int]], position: int) -> list[int]:
        """See vs_worker.Engine."""
        count, length = len(tokens), len(tokens[0])
        end = position + length
        slots = self._slots[: len(self._slots) // count * count].reshape(count, -1)
        plan = StepPlan(
            step_id=0,
            token_ids=np.array(tokens, np.int32).reshape(-1),
            positions=np.tile(np.arange(position, end, dtype=np.int32), count),
            write_slots=np.ascontiguousarray(slots[:, position:end]).reshape(-1),
            seq_row_start=np.arange(0, count * length + 1, length, dtype=np.int32),
            seq_table_row=np.arange(count, dtype=np.int32),
            slot_table=np.ascontiguousarray(slots[:, :end]),
            logit_rows=[LogitRow((i + 1) * length - 1, end, 0, _GREEDY, _NO_TOKENS, 0) for i in range(count)],
        )
        return [int(token) for token in self._runner.step(plan).token_ids]


def run(argv: Sequence[str]) -> None:
    """Serve the benchmark's requests on standard input and output."""
    model, num_threads, isa = argv
    answer(Phloem(model, int(num_threads), cast(Isa, isa)), sys.stdin, sys.stdout)


if __name__ == "__main__":
    run(sys.argv[1:])
