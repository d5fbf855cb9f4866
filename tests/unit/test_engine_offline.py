"""The blocking engine: batches, best-of, streams, fork and score, without a model and once with the real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem import AsyncEngine, Engine, EngineConfig, SamplingParams
from phloem.engine.generation import GenerationStream, Handle
from phloem.errors import ContextLengthError, EngineUnavailableError, InvalidRequestError, StepFailedError
from phloem.runner.null_runner import NullRunner, next_token
from phloem.sched.sequence import derive_seed
from phloem.types import DEFAULT_NAMESPACE, FinishReason, Namespace
from tests.helpers.fake_model import VOCAB, fake_parts
from tests.helpers.ranking_runner import RankingRunner

GREETING = "Once upon a time there was a tree"


def open_engine(**options: Any) -> Engine:
    options.setdefault("runner", RankingRunner(num_slots=options.get("num_pages", 4096), vocab_size=VOCAB))
    return Engine(fake_parts(**options))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine() as engine:
        yield engine
        stats = engine.stats()
        assert (stats["kv_num_pages_protected"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 8, "ignore_eos": True, **options})


def expected(prompt: str, count: int, index: int = 0, seed: int = 1) -> tuple[int, ...]:
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(next_token(np.array(tokens, dtype=np.int32), derive_seed(seed, index), VOCAB))
    return tuple(tokens[len(prompt.encode()) :])


def test_one_prompt_gives_one_generation_and_a_list_gives_a_list(engine: Engine) -> None:
    one = engine.generate(GREETING, params())
    assert one.sequences[0].token_ids == expected(GREETING, 8)
    assert one.sequences[0].finish_reason is FinishReason.LENGTH
    many = engine.generate([GREETING, "other", list(GREETING.encode())], params())
    assert [item.sequences[0].token_ids for item in many] == [
        expected(GREETING, 8),
        expected("other", 8),
        expected(GREETING, 8),
    ]
    assert engine.generate([], params()) == []
    assert engine.generate(np.array([1, 2, 3]), params()).prompt_token_ids.tolist() == [1, 2, 3]


def test_params_may_differ_by_prompt(engine: Engine) -> None:
    short, long = engine.generate(["a", "b"], [params(max_tokens=2), params(max_tokens=5)])
    assert (len(short.sequences[0].token_ids), len(long.sequences[0].token_ids)) == (2, 5)
    with pytest.raises(InvalidRequestError, match="2 prompts, got 1"):
        engine.generate(["a", "b"], [params()])


def test_n_sequences_compute_the_prompt_once(engine: Engine) -> None:
    found = engine.generate(GREETING, params(), n=5)
    assert [item.token_ids for item in found.sequences] == [expected(GREETING, 8, i) for i in range(5)]
    assert found.usage.num_prompt_tokens == 5 * len(GREETING)
    assert found.usage.num_computed_tokens == len(GREETING) + 4
    assert engine.stats()["num_prefill_rows"] == len(GREETING) + 4


def test_best_of_keeps_the_likeliest_by_mean_logprob(engine: Engine) -> None:
    everything = engine.generate(GREETING, params(logprobs=0), n=6)
    means = {item.token_ids: item.mean_logprob for item in everything.sequences}
    best = engine.generate(GREETING, params(), n=2, best_of=6)
    wanted = sorted(means, key=lambda ids: -(means[ids] or 0.0))[:2]
    assert [item.token_ids for item in best.sequences] == wanted
    assert best.sequences[0].logprobs is None, "nobody asked for them"
    assert best.usage.num_output_tokens == 6 * 8, "what was drawn and dropped is counted too"
    with pytest.raises(InvalidRequestError, match=r"best_of must be at least n \(3\), got 2"):
        engine.generate(GREETING, params(), n=3, best_of=2)


def test_a_batch_larger_than_the_queue_runs_through(engine: Engine) -> None:
    with open_engine(max_waiting=6, max_running=2) as small:
        prompts = [f"{i:03}" for i in range(60)]
        found = small.generate(prompts, params(max_tokens=3))
    assert [item.sequences[0].token_ids for item in found] == [expected(prompt, 3) for prompt in prompts]


def test_a_bad_prompt_stops_the_batch_before_anything_is_computed(engine: Engine) -> None:
    with pytest.raises(ContextLengthError):
        engine.generate([GREETING, [1] * 5000], params())
    with pytest.raises(InvalidRequestError, match="a prompt must be"):
        engine.generate([GREETING, [["nested"]]], params())  # type: ignore[list-item]
    assert engine.stats()["num_steps"] == 0


def test_a_failed_step_is_reported_in_its_generation() -> None:
    runner = NullRunner(num_slots=4096, vocab_size=VOCAB, fail_at=frozenset({4}))
    with open_engine(runner=runner) as engine:
        failed = engine.generate(GREETING, params(max_tokens=20))
        assert isinstance(failed.error, StepFailedError)
        assert failed.sequences[0].finish_reason is FinishReason.ERROR
        assert failed.sequences[0].token_ids == expected(GREETING, 4)
        assert engine.generate(GREETING, params()).error is None


def test_progress_bar_goes_to_standard_error(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.generate(["a", "b", "c"], params(), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err


def test_stream_gives_the_same_as_generate(engine: Engine) -> None:
    whole = engine.generate(GREETING, params(max_tokens=30))
    with engine.stream(GREETING, params(max_tokens=30)) as stream:
        text = "".join(delta.text for delta in stream)
    assert text == whole.text
    assert stream.result().sequences == engine.generate(GREETING, params(max_tokens=30)).sequences


@pytest.mark.parametrize("forget", [False, True])
def test_a_stream_left_early_is_aborted(engine: Engine, forget: bool) -> None:
    if forget:
        deltas = list(islice(engine.stream(GREETING, params(max_tokens=900)), 3))
    else:
        with engine.stream(GREETING, params(max_tokens=900)) as stream:
            deltas = list(islice(stream, 3))
    assert len(deltas) == 3
    deadline = time.monotonic() + 2.0
    while engine.stats()["num_aborted"] < 1 and time.monotonic() < deadline:
        engine.generate("x", params(max_tokens=1))
    assert engine.stats()["num_aborted"] == 1


def test_fork_continues_from_the_very_tokens(engine: Engine) -> None:
    trunk = engine.generate(GREETING, params(max_tokens=20))
    before = engine.stats()["num_prefill_rows"] + engine.stats()["num_decode_rows"]
    forked = engine.fork(trunk.handle(), 5, params(max_tokens=1))
    place = [*GREETING.encode(), *trunk.sequences[0].token_ids]
    assert forked.prompt_token_ids.tolist() == place
    # The trunk's last token was drawn and never computed: one row; the other four read the same row's K/V.
    assert engine.stats()["num_prefill_rows"] + engine.stats()["num_decode_rows"] - before == 5
    assert forked.usage.num_cached_tokens == 5 * (len(place) - 1)
    with_text = engine.fork(trunk.handle(), 2, params(max_tokens=1), text=" and then")
    assert with_text.prompt_token_ids.tolist() == [*place, *b" and then"]


def test_fork_of_a_running_generation(engine: Engine) -> None:
    with engine.stream(GREETING, params(max_tokens=200)) as stream:
        tokens = [delta.token_ids[0] for delta in islice(stream, 10)]
        handle = stream.handle()
        assert handle.token_ids.tolist() == [*GREETING.encode(), *tokens]
        forked = engine.fork(handle, 3, params(max_tokens=4))
        assert forked.sequences[0].token_ids == expected(GREETING, 14)[10:], "seed and position decide, not the fork"
        assert forked.usage.num_cached_tokens >= 3 * (len(handle.token_ids) - 1)
        assert stream.result().sequences[0].token_ids == expected(GREETING, 200)


def test_a_handle_keeps_its_namespace(engine: Engine) -> None:
    secret = Namespace("", "", "salt")
    trunk = engine.generate(GREETING, params(), namespace=secret)
    assert trunk.handle().namespace == secret
    assert engine.fork(trunk.handle(), 1, params()).usage.num_cached_tokens > 0
    open_place = Handle(DEFAULT_NAMESPACE, trunk.handle().token_ids)
    assert engine.fork(open_place, 1, params()).usage.num_cached_tokens == 0


def test_score_computes_the_prompt_once_and_only_the_rows_that_count(engine: Engine) -> None:
    prompt = "x" * 600
    words = ["yes", "no", "perhaps"]
    scores = engine.score(prompt, words)
    assert [bytes(score.token_ids).decode() for score in scores] == words
    assert all(len(score.logprobs) == len(score.token_ids) for score in scores)
    length = sum(len(word) for word in words)
    assert engine.stats()["num_prefill_rows"] <= 600 + length + 3
    rows = engine.stats()["num_prefill_rows"]
    again = engine.score(prompt, words)
    assert engine.stats()["num_prefill_rows"] - rows == length + 3, "one row before each, and its own"
    assert again == scores
    for score, word in zip(scores, words, strict=True):
        assert score.logprobs == RankingRunner.logprobs_of(prompt.encode(), word.encode())
        assert score.mean == pytest.approx(score.total / len(word))


def test_score_refuses_what_has_no_tokens(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        engine.score("", ["a"])
    with pytest.raises(InvalidRequestError, match="continuation is empty"):
        engine.score("a", ["b", ""])
    assert engine.stats()["num_steps"] == 0


def test_calls_from_threads_run_in_one_batch(engine: Engine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: engine.generate(f"{GREETING}{i}", params(max_tokens=40)), range(8)))
    assert [item.sequences[0].token_ids for item in found] == [expected(f"{GREETING}{i}", 40) for i in range(8)]
    assert engine.stats()["num_prefill_rows"] < 2 * len(GREETING) + 8


def test_a_closed_engine_says_so() -> None:
    engine = open_engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        engine.generate(GREETING, params())


async def test_the_async_engine_has_the_same_calls() -> None:
    engine = AsyncEngine(fake_parts())
    trunk = await engine.generate(GREETING, params())
    assert trunk.sequences[0].token_ids == expected(GREETING, 8)
    (listed,) = await engine.generate([GREETING], params())
    assert listed.sequences[0].token_ids == expected(GREETING, 8)
    stream = await engine.stream(GREETING, params(), n=2)
    assert isinstance(stream, GenerationStream)
    assert len((await stream.result()).sequences) == 2
    assert len((await engine.fork(trunk.handle(), 3, params())).sequences) == 3
    assert [len(score.token_ids) for score in await engine.score(GREETING, ["ab", "c"])] == [2, 1]
    engine.close()


def test_the_demo_model(demo_model: Path) -> None:
    config = EngineConfig(model=str(demo_model), max_total_tokens=4096, max_model_len=2048)
    with Engine.load(config) as engine:
        chat = [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "What is the capital city of France?"},
        ]
        answer = engine.generate(chat, SamplingParams(temperature=0.0, max_tokens=12))
        assert "Paris" in answer.text, answer.text
        right, wrong = engine.score("The capital of France is", [" Paris", " Tokyo"])
        assert right.total > wrong.total
        forked = engine.fork(answer.handle(), 2, SamplingParams(temperature=0.0, max_tokens=3))
        assert forked.usage.num_cached_tokens == 2 * (len(forked.prompt_token_ids) - 1)
        assert forked.sequences[0].token_ids == forked.sequences[1].token_ids
