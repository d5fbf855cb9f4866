"""The engine thread's core under a clock that only its runner moves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from phloem.engine.core import JOIN_S, MIXED_STEP_S, EngineCore
from phloem.runner.null_runner import NullRunner
from phloem.types import Request, SamplingParams, StepPlan, StepResult, TokenDelta
from tests.helpers.fake_model import VOCAB, fake_parts


class TimedRunner(NullRunner):
    """Takes so many seconds for each row, on its own clock."""

    def __init__(self, seconds_per_row: float) -> None:
        super().__init__(num_slots=4096, vocab_size=VOCAB)
        self.now_s = 0.0
        self._seconds_per_row = seconds_per_row

    def step(self, plan: StepPlan) -> StepResult:
        self.now_s += self._seconds_per_row * plan.num_rows
        return super().step(plan)


@pytest.mark.parametrize(
    ("seconds_per_row", "mixed_rows", "join_rows"),
    [(0.002, int(MIXED_STEP_S / 0.002), int(JOIN_S / 0.002)), (0.1, 16, 16), (1e-6, 512, 512)],
)
def test_prompts_share_steps_as_far_as_their_rows_are_cheap(
    seconds_per_row: float, mixed_rows: int, join_rows: int
) -> None:
    runner = TimedRunner(seconds_per_row)
    scheduler = fake_parts(runner=runner).scheduler
    ended = threading.Event()

    def deliver(deltas: list[TokenDelta]) -> None:
        if any(delta.finish_reason is not None for delta in deltas):
            ended.set()

    core = EngineCore(scheduler, runner, deliver, lambda error: None, clock=lambda: runner.now_s)
    core.start()
    core.submit(Request("r", np.arange(200, dtype=np.int32), SamplingParams(max_tokens=2))).result(10)
    assert ended.wait(10)
    core.stop()
    # The quotient of two floats may fall just short of a whole number of rows.
    assert scheduler.mixed_prefill_rows == pytest.approx(mixed_rows, abs=1)
    assert scheduler.join_rows == pytest.approx(join_rows, abs=1)
