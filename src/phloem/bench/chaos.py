"""Chaos: requests of every kind on a pool too small for them, while clients vanish and steps fail.

Owns the random load. What must hold after each step and at the end is checked by `Drive`: one terminal answer for each
sequence, the tokens of a run alone, the invariants of cache and plan, nothing locked when nothing is live.
"""

from __future__ import annotations

import random
from collections import Counter

from phloem.bench.drive import Drive, make_request
from phloem.kv.manager import KVCacheManager
from phloem.types import FinishReason, Request, SamplingParams

POOL_TOKENS = 600
MAX_LEN = 200
MOST_WAITING = 40
FAILING_STEPS = 0.015
STEPS_PER_REQUEST = 40
"""More than any run needs: beyond, it hangs."""


def chaos(num_requests: int, *, page_size: int = 1, seed: int = 0) -> Drive:
    """Run so many requests to their ends and return the drive. Raises AssertionError where anything is wrong.

    A client may leave with its whole request or with one of its sequences, in every state; may fork what still runs;
    and may set a deadline that passes.
    """
    rng = random.Random(seed)
    most_steps = STEPS_PER_REQUEST * num_requests
    drive = Drive(
        KVCacheManager(num_pages=POOL_TOKENS // page_size, page_size=page_size, evict_watermark=0.05),
        fail_at=rng.sample(range(most_steps), int(FAILING_STEPS * most_steps)),
        max_model_len=MAX_LEN,
        max_running=12,
        chunk_size=48,
    )
    drive.plans = None
    trunks = [[rng.randrange(1000) for _ in range(80)] for _ in range(6)]
    num_sent = 0
    while num_sent < num_requests or drive.scheduler.has_work:
        if num_sent < num_requests and len(drive.scheduler.backlog) < MOST_WAITING:
            drive.add(_request(f"r{num_sent}", _prompt(drive, trunks, rng), drive.now_s, rng))
            num_sent += 1
        if rng.random() < 0.1:
            drive.scheduler.abort(f"r{rng.randrange(max(0, num_sent - 60), num_sent)}", rng.choice([None, None, 0, 1]))
        drive.step()
        assert drive.now_s < most_steps, "it hangs"
    drive.check_answers()
    assert drive.manager.stats().num_pages_protected == 0
    return drive


def ends(drive: Drive) -> Counter[FinishReason]:
    """How many sequences ended for which reason."""
    return Counter(answer.finish_reason for answer in drive.answers.values() if answer.finish_reason is not None)


def _prompt(drive: Drive, trunks: list[list[int]], rng: random.Random) -> list[int]:
    """A shared trunk with a tail of its own, or (a fork) all that a running sequence has so far."""
    if drive.scheduler.running and rng.random() < 0.2:
        parent = rng.choice(drive.scheduler.running)
        head = parent.tokens[: min(parent.num_tokens, MAX_LEN - 60)].tolist()
        return [*head, *(rng.randrange(1000) for _ in range(rng.randint(0, 3)))]
    trunk = rng.choice(trunks)[: rng.randint(1, 80)]
    return trunk + [rng.randrange(1000) for _ in range(rng.randint(0, 40))]


def _request(name: str, prompt: list[int], now_s: float, rng: random.Random) -> Request:
    return make_request(
        name,
        prompt,
        params=SamplingParams(max_tokens=rng.randint(0, 40), seed=rng.randrange(9)),
        n=rng.choice([1, 1, 1, 2, 4]),
        priority=rng.choice([0, 0, 0, 1]),
        client=rng.choice("abc"),
        deadline_s=now_s + 30 if rng.random() < 0.05 else None,
    )
