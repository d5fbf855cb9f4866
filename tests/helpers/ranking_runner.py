"""NullRunner whose logprobs depend on the text before the token, so that candidates can be ranked."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import numpy as np

from phloem.runner.null_runner import NullRunner
from phloem.types import StepPlan, StepResult


class RankingRunner(NullRunner):
    """The logprob of a token is a hash of all tokens up to it, between -2 and 0."""

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        for i, row in enumerate(plan.logit_rows):
            result.logprobs[i] = _logprob([*row.history.tolist(), int(result.token_ids[i])])
        return result

    @staticmethod
    def logprobs_of(prompt: Iterable[int], continuation: Iterable[int]) -> tuple[float, ...]:
        """What `score` must find."""
        tokens, found = list(prompt), []
        for token in continuation:
            tokens.append(token)
            found.append(float(_logprob(tokens)))
        return tuple(found)


def _logprob(tokens: list[int]) -> np.float32:
    return np.float32(-2.0 * crc32(np.array(tokens, dtype=np.int32).tobytes()) / 2**32)
