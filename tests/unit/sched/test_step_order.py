"""The order of a step's sequences: those that share the longest path of the tree are neighbours."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from phloem.bench.drive import Drive, make_request
from phloem.kv.manager import KVCacheManager
from phloem.types import StepPlan

TILE = 64
"""Keys that an attention kernel loads at once."""


def tiles_loaded(plan: StepPlan) -> int:
    """Tiles of K/V that the step loads when only neighbours share: each leading full one common to both, once."""
    total = 0
    before = np.empty(0, dtype=np.int32)
    for s in range(plan.num_seqs):
        length = int(plan.positions[plan.seq_row_start[s + 1] - 1]) + 1
        slots = plan.slot_table[plan.seq_table_row[s], :length]
        full = min(len(slots), len(before)) // TILE * TILE
        different = np.flatnonzero(slots[:full] != before[:full])
        shared = (int(different[0]) if len(different) else full) // TILE
        total += -(-length // TILE) - shared
        before = slots
    return total


def test_interleaved_groups_load_what_they_share_once() -> None:
    """Two trunks, each with two branches, each with four leaves, in the order of arrival that shares least."""
    drive = Drive(KVCacheManager(num_pages=20000), max_running=16, chunk_size=4096)
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    trunks = [tokens(4 * TILE) for _ in range(2)]
    branches = [[tokens(3 * TILE) for _ in range(2)] for _ in range(2)]
    for leaf in range(4):
        for branch in range(2):
            for trunk in range(2):
                prompt = trunks[trunk] + branches[trunk][branch] + tokens(TILE // 2)
                drive.add(make_request(f"{trunk}{branch}{leaf}", prompt, max_tokens=8))
    drive.run()
    drive.check_answers()
    assert drive.plans
    decode = drive.plans[-1]
    assert decode.num_seqs == decode.num_rows == 16
    assert tiles_loaded(decode) == 2 * 4 + 4 * 3 + 16 * 1
    assert tiles_loaded(drive.plans[0]) <= 2 * 4 + 4 * 3 + 16 * 1, "the step that computes the prompts"


def test_a_retracted_sequence_finds_its_neighbours_again() -> None:
    drive = Drive(KVCacheManager(num_pages=700), max_running=6, chunk_size=512, policy="fcfs")
    drive.scheduler.estimate.ratio = 0.0
    rng = random.Random(1)
    trunks = [[rng.randrange(1000) for _ in range(TILE)] for _ in range(2)]
    for i in range(6):
        drive.add(make_request(f"r{i}", [*trunks[i % 2], i], max_tokens=150))
    num_retracted = 0
    while drive.scheduler.has_work:
        drive.step()
        assert drive.plans
        plan = drive.plans.pop()
        trunk_of_row = plan.slot_table[plan.seq_table_row, 0].tolist()
        if plan.num_seqs == plan.num_rows:
            assert sum(a != b for a, b in pairwise(trunk_of_row)) <= 1
            num_retracted = drive.scheduler.stats.num_retractions
    drive.check_answers()
    assert num_retracted > 0, "decode steps after a retraction are meant to be seen"
