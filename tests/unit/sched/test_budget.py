"""How prompts share steps: whole where they fit, one after the other, and short ones past long ones."""

from __future__ import annotations

import random

import pytest

from phloem.bench.drive import Drive, make_request
from phloem.kv.manager import KVCacheManager
from phloem.sched.budget import PrefillBudget


def make_drive(*, join_rows: int | None = None, chunk_size: int = 200, **options: object) -> Drive:
    drive = Drive(KVCacheManager(num_pages=8192), chunk_size=chunk_size, **options)
    if join_rows is not None:
        drive.scheduler.join_rows = join_rows
    return drive


def first_tokens(drive: Drive, names: list[str], most_steps: int = 100) -> list[int]:
    """The step in which each of these was first answered, counted from the next one."""
    steps: dict[str, int] = {}
    for step in range(most_steps):
        drive.step()
        for name in names:
            if drive.answer(name).token_ids:
                steps.setdefault(name, step)
        if len(steps) == len(names):
            break
    return [steps[name] for name in names]


@pytest.mark.parametrize(("join_rows", "expected"), [(10, [0, 1]), (59, [0, 1]), (60, [0, 0]), (None, [0, 0])])
def test_short_prompts_finish_one_after_the_other_unless_the_second_adds_little(
    join_rows: int | None, expected: list[int]
) -> None:
    drive = make_drive(join_rows=join_rows, policy="fcfs")
    drive.add(make_request("a", range(80), max_tokens=1))
    drive.add(make_request("b", range(500, 560), max_tokens=1))
    assert first_tokens(drive, ["a", "b"]) == expected
    drive.run()
    drive.check_answers()


def test_a_prompt_that_fits_is_taken_whole_though_others_wait() -> None:
    drive = make_drive(join_rows=10, policy="fcfs")
    for i in range(3):
        drive.add(make_request(f"r{i}", range(i * 300, i * 300 + 150), max_tokens=1))
    assert first_tokens(drive, ["r0", "r1", "r2"]) == [0, 1, 2]


def test_what_shares_the_prompt_of_the_step_joins_it() -> None:
    drive = make_drive(join_rows=8, chunk_size=400)
    drive.add(make_request("r", range(300), n=5))
    drive.step()
    assert drive.scheduler.stats.num_prefill_rows == 304
    assert all(len(drive.answer("r", i).token_ids) == 1 for i in range(5))


@pytest.mark.parametrize("join_rows", [10, None])
def test_short_prompts_pass_a_long_one(join_rows: int | None) -> None:
    drive = make_drive(join_rows=join_rows, policy="fcfs")
    drive.add(make_request("long", range(2000)))
    drive.step()
    for i in range(4):
        drive.add(make_request(f"short{i}", range(3000 + i * 100, 3000 + i * 100 + 40), max_tokens=50))
    *short, long = first_tokens(drive, ["short0", "short1", "short2", "short3", "long"])
    assert max(short) <= 3
    assert max(short) < long <= 25, "it had at least half of each step"
    drive.run()
    drive.check_answers()


def test_offers_keep_their_bounds() -> None:
    """Whatever prompts want: the first gets rows, none gets more than is left, and what joins stays small."""
    for seed in range(2000):
        rng = random.Random(seed)
        num_rows = rng.randint(1, 100)
        share, join_rows = rng.randint(1, num_rows), rng.randint(1, 100)
        budget = PrefillBudget(num_rows, share, join_rows)
        finished, joined, left = False, 0, num_rows
        for i in range(20):
            wanted = rng.randint(1, 150)
            offered = budget.offer(wanted)
            assert 0 <= offered <= left
            assert offered in (0, wanted) or offered == min(share, left)
            if i == 0:
                assert offered > 0
            if not finished and wanted <= left:
                assert offered == wanted
            if not offered:
                continue
            taken = rng.choice([offered, rng.randint(1, offered)])
            joined += taken if finished else 0
            left -= taken
            finished |= taken == wanted
            budget.take(taken, finishes=taken == wanted)
            assert joined <= join_rows
