"""The scheduler over the real cache: what runs, what is reused, who waits, and how everything ends."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest

from phloem.bench.drive import Drive, make_request
from phloem.config import SchedulePolicy
from phloem.errors import QueueFullError, RequestTimeoutError, StepFailedError
from phloem.kv.manager import KVCacheManager
from phloem.types import FinishReason, Namespace, Pooling, SamplingParams


def manager(num_pages: int = 4096, page_size: int = 1, **options: object) -> KVCacheManager:
    return KVCacheManager(num_pages=num_pages, page_size=page_size, **options)  # type: ignore[arg-type]


def cached_after(drive: Drive, name: str, length: int) -> int:
    drive.add(make_request(name, range(length), max_tokens=1))
    drive.run()
    return drive.answer(name).cached_tokens


def test_cached_tokens_are_exact_to_the_token() -> None:
    drive = Drive(manager(20000), max_model_len=20000)
    assert cached_after(drive, "a", 100) == 0
    assert cached_after(drive, "b", 10000) == 100
    assert cached_after(drive, "c", 10000) == 9999
    assert cached_after(drive, "d", 1000) == 999
    assert cached_after(drive, "e", 100) == 99
    assert cached_after(drive, "f", 10001) == 10000
    drive.manager.flush()
    assert cached_after(drive, "g", 1000) == 0


def test_reuse_is_not_limited_to_one_chunk() -> None:
    drive = Drive(manager(), chunk_size=64)
    assert cached_after(drive, "a", 1000) == 0
    assert cached_after(drive, "b", 1000) == 999


def test_second_turn_reuses_prompt_and_answer_but_the_last_token() -> None:
    drive = Drive(manager())
    drive.add(make_request("turn1", range(50), max_tokens=20))
    drive.run()
    history = [*range(50), *drive.answer("turn1").token_ids]
    drive.add(make_request("turn2", [*history, 7, 8, 9], max_tokens=5))
    drive.run()
    assert drive.answer("turn2").cached_tokens == len(history) - 1
    history2 = [*history, 7, 8, 9, *drive.answer("turn2").token_ids]
    drive.add(make_request("turn3", [*history2, 1], max_tokens=5))
    drive.run()
    assert drive.answer("turn3").cached_tokens == len(history2) - 1


@pytest.mark.parametrize("chunk_size", [64, 512, 4096])
def test_identical_prompts_at_once_cost_one_prefill(chunk_size: int) -> None:
    drive = Drive(manager(8192), chunk_size=chunk_size)
    for i in range(32):
        drive.add(make_request(f"r{i}", range(2000), max_tokens=3, seed=i))
    drive.run()
    drive.check_answers()
    assert drive.scheduler.stats.num_prefill_rows <= 2000 * 1.02 + 32
    assert drive.scheduler.stats.num_deduplicated_tokens > 0


def test_common_trunk_is_computed_once_for_prompts_that_arrive_together() -> None:
    drive = Drive(manager(8192), chunk_size=256)
    for i in range(10):
        drive.add(make_request(f"r{i}", [*range(1000), 500 + i, 3, 4], max_tokens=2))
    drive.run()
    drive.check_answers()
    assert drive.scheduler.stats.num_prefill_rows <= 1000 + 10 * 3


def test_n_sequences_share_the_prompt_and_differ_by_seed() -> None:
    drive = Drive(manager())
    drive.add(make_request("r", range(300), max_tokens=8, n=5, seed=3))
    drive.run()
    drive.check_answers()
    assert drive.scheduler.stats.num_prefill_rows == 300 + 4
    assert len({tuple(drive.answer("r", i).token_ids) for i in range(5)}) == 5


def test_a_running_request_is_reused_before_it_ends() -> None:
    drive = Drive(manager())
    drive.add(make_request("long", range(100), max_tokens=500))
    drive.run(until=lambda: bool(drive.answer("long").token_ids))
    drive.add(make_request("other", [*range(100), 5], max_tokens=1))
    drive.run(until=lambda: drive.answer("other").finish_reason is not None)
    assert drive.answer("other").cached_tokens == 100
    drive.run()
    drive.check_answers()


def test_namespaces_never_share() -> None:
    drive = Drive(manager())
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        drive.add(make_request(name, range(100), max_tokens=2, namespace=Namespace("m", "", salt)))
        drive.run()
    assert [drive.answer(name).cached_tokens for name in "abc"] == [0, 0, 99]


def test_prompt_of_the_whole_pool_evicts_what_is_unused() -> None:
    drive = Drive(manager(1000))
    for i in range(50):
        drive.add(make_request(f"r{i}", range(i * 20, i * 20 + 19), max_tokens=1))
        drive.run()
    drive.add(make_request("big", range(100, 900), max_tokens=5))
    drive.run()
    drive.check_answers()
    drive.add(make_request("whole", [3] * 1000, max_tokens=5))
    drive.run()
    assert len(drive.answer("whole").token_ids) == 1, "1,000 slots hold the prompt; one token needs no slot"


@pytest.mark.parametrize("policy", get_args(SchedulePolicy))
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_mixes_equal_runs_alone(policy: SchedulePolicy, page_size: int) -> None:
    retractions = 0
    for seed in range(12):
        rng = random.Random(f"{policy} {page_size} {seed}")
        pages = max(rng.choice([40, 80, 200]) // page_size, 3)
        drive = Drive(
            manager(pages, page_size),
            fail_at=rng.sample(range(200), 3) if rng.random() < 0.3 else (),
            vocab_size=50,
            max_model_len=64,
            max_running=rng.choice([1, 3, 8]),
            chunk_size=rng.choice([1, 5, 16, 64]),
            policy=policy,
        )
        drive.scheduler.join_rows = rng.choice([1, 8, drive.scheduler.chunk_size])
        _drive_random_mix(drive, rng)
        drive.check_answers()
        retractions += drive.scheduler.stats.num_retractions
    assert retractions > 0, "the pools are meant to be too small"


def _drive_random_mix(drive: Drive, rng: random.Random) -> None:
    trunk = [rng.randrange(50) for _ in range(60)]
    todo = []
    for i in range(25):
        length = rng.randint(1, 39)
        shared = rng.randint(0, length)
        prompt = trunk[:shared] + [rng.randrange(50) for _ in range(length - shared)]
        params = SamplingParams(max_tokens=rng.choice([0, 1, 5, 20, None]), seed=rng.randrange(5))
        todo.append(
            make_request(
                f"r{i}",
                prompt,
                params=params,
                n=rng.choice([1, 1, 1, 3]),
                priority=rng.choice([0, 0, 1]),
                client=rng.choice("ab"),
                pooling=(None, Pooling.MEAN, Pooling.LAST)[i % 3] if params.max_tokens == 0 else None,
            )
        )
    while todo or drive.scheduler.has_work:
        if todo and rng.random() < 0.5:
            drive.add(todo.pop())
        if rng.random() < 0.03 and drive.requests:
            drive.scheduler.abort(rng.choice(list(drive.requests)))
        drive.step()
        assert drive.now_s < 5000
    assert drive.manager.stats().num_pages_protected == 0


def test_retracted_requests_resume_without_a_trace() -> None:
    drive = Drive(manager(1000), chunk_size=128)
    for i in range(6):
        drive.add(make_request(f"r{i}", range(i * 100, i * 100 + 100), max_tokens=300, seed=i))
    # Expect too little of everyone, so that all are admitted and memory runs out.
    drive.scheduler.estimate.ratio = 0.0
    drive.run()
    drive.check_answers()
    assert drive.scheduler.stats.num_retractions > 0
    assert all(len(drive.answer(f"r{i}").token_ids) == 300 for i in range(6))


def test_oldest_is_never_retracted() -> None:
    drive = Drive(manager(300), chunk_size=64, policy="fcfs")
    drive.scheduler.estimate.ratio = 0.0
    for i in range(4):
        drive.add(make_request(f"r{i}", range(i * 50, i * 50 + 50), max_tokens=200))
    oldest = next(iter(drive.scheduler.backlog.queue))
    drive.run()
    drive.check_answers()
    assert drive.scheduler.stats.num_retractions > 0
    assert oldest.num_retractions == 0


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "retracted"])
def test_abort_in_every_state(when: str) -> None:
    drive = Drive(manager(400), chunk_size=32, max_running=8, policy="fcfs")
    drive.scheduler.estimate.ratio = 0.0
    drive.add(make_request("first", range(200), max_tokens=150))
    drive.add(make_request("victim", range(500, 600), max_tokens=200))
    victim = next(s for s in drive.scheduler.backlog.queue if s.request.request_id == "victim")
    reached = {
        "queued": lambda: True,
        "prefilling": lambda: 0 < victim.num_computed < 100,
        "decoding": lambda: victim.num_output > 3,
        "retracted": lambda: victim.num_retractions > 0 and victim.waiting_slot >= 0,
    }[when]
    drive.run(until=reached)
    assert reached()
    assert drive.scheduler.abort("victim")
    assert not drive.scheduler.abort("victim"), "it ended once"
    drive.run()
    drive.check_answers()
    assert drive.answer("victim").finish_reason is FinishReason.ABORT
    assert drive.answer("first").finish_reason is FinishReason.LENGTH


def test_failed_step_fails_only_its_requests() -> None:
    drive = Drive(manager(), fail_at=[2])
    drive.add(make_request("a", range(10), max_tokens=10))
    drive.run(until=lambda: drive.runner.num_steps == 3)
    drive.add(make_request("b", range(10), max_tokens=10))
    drive.run()
    drive.check_answers()
    assert isinstance(drive.answer("a").error, StepFailedError)
    assert drive.answer("b").finish_reason is FinishReason.LENGTH


def test_queue_full_and_deadline() -> None:
    drive = Drive(manager(), max_waiting=3, max_running=1)
    for i in range(3):
        drive.add(make_request(f"r{i}", range(10), max_tokens=50, deadline_s=20.0 if i == 2 else None))
    with pytest.raises(QueueFullError, match="limit is 3"):
        drive.scheduler.add(make_request("r3", range(10)), now_s=0.0)
    drive.run()
    drive.check_answers()
    assert isinstance(drive.answer("r2").error, RequestTimeoutError)
    assert [drive.answer(f"r{i}").finish_reason for i in range(2)] == [FinishReason.LENGTH] * 2


def test_no_request_is_overtaken_for_ever() -> None:
    """A cold request among hot ones is admitted within (older waiting + 32) admissions of its client."""
    drive = Drive(manager(100000), max_running=1, chunk_size=512)
    drive.scheduler.tokens_per_s = 0.0  # no aging: the bound alone
    drive.add(make_request("warm", range(400), max_tokens=1))
    drive.run()
    drive.add(make_request("cold", range(500, 900), max_tokens=1))
    for i in range(100):
        drive.add(make_request(f"hot{i}", [*range(400), i], max_tokens=1))
    drive.run()
    drive.check_answers()
    place = drive.order_of_first_token.index("cold") - 1
    assert 1 <= place <= 32


def test_clients_share_the_engine_fairly() -> None:
    """One client floods; the other's requests, later and fewer, are served beside them, not after them."""
    drive = Drive(manager(400000), max_running=2, chunk_size=512)
    rng = np.random.default_rng(0)
    for i in range(200):
        drive.add(make_request(f"flood{i}", rng.integers(0, 1000, 500).tolist(), max_tokens=2, client="flood"))
    for i in range(20):
        drive.add(make_request(f"calm{i}", rng.integers(0, 1000, 500).tolist(), max_tokens=2, client="calm"))
    drive.run()
    drive.check_answers()
    last_calm = max(drive.order_of_first_token.index(f"calm{i}") for i in range(20))
    # Equal service means about 20 of the flood before the last of the calm; a quantum of 8,192 tokens is 17 requests.
    assert last_calm < 20 + 20 + 3 * 17


def test_priority_goes_first_and_the_others_lose_nothing() -> None:
    drive = Drive(manager(600), max_running=4, policy="priority")
    for i in range(15):
        drive.add(make_request(f"low{i}", range(i * 30, i * 30 + 30), max_tokens=60, priority=0))
    drive.run(until=lambda: len(drive.answer("low0").token_ids) > 5)
    for i in range(3):
        drive.add(make_request(f"high{i}", range(i * 30 + 500, i * 30 + 530), max_tokens=60, priority=5))
    drive.run()
    drive.check_answers()
    order = drive.order_of_first_token
    assert max(order.index(f"high{i}") for i in range(3)) < order.index("low5")


def test_scoring_a_prompt_returns_a_logprob_for_each_position() -> None:
    drive = Drive(manager(), chunk_size=16)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, seed=0)
    for name, score_from in (("all", 1), ("again", 1), ("tail", 90)):
        drive.add(make_request(name, range(100), params=params, score_from=score_from))
        drive.run()
        logprobs = drive.answer(name).prompt_logprobs
        assert [item.token_id for item in logprobs if item] == list(range(score_from, 100))
        assert all(item is not None and len(item.top) == 2 for item in logprobs)
    assert drive.answer("tail").cached_tokens == 89, "only the rows that give the asked logprobs are computed"


def test_ten_thousand_waiting_are_fine() -> None:
    drive = Drive(manager(200000), max_running=4, max_waiting=20000, chunk_size=512)
    for i in range(10000):
        drive.add(make_request(f"r{i}", [i % 100, *range(30)], max_tokens=1))
    for _ in range(20):
        drive.step()
    assert len(drive.scheduler.backlog.queue) < 10000
    drive.scheduler.abort_all(StepFailedError("enough"))
    drive.run()
    assert all(answer.finish_reason is not None for answer in drive.answers.values())


def test_a_page_that_may_be_changed_for_an_equal_one_gets_no_more_rows_in_the_step() -> None:
    """One prompt is inside a page that another sequence fills first, by drawing the same tokens."""
    drive = Drive(KVCacheManager(num_pages=64, page_size=16), chunk_size=16, max_running=2, policy="fcfs")
    drive.add(make_request("ahead", range(20), max_tokens=40))
    while len(drive.answer("ahead").token_ids) < 11:
        drive.step()
    drive.scheduler.mixed_prefill_rows = 8
    drive.add(make_request("behind", [*range(20), *drive.expected_tokens("ahead", 0, 20)], max_tokens=1))
    drive.add(make_request("waiting", range(500, 540), max_tokens=1))
    drive.run()
    drive.check_answers()
