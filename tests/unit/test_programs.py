"""Programs: what states keep, what branches share, what chat turns write; on an engine and through a server."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from phloem import AsyncEngine, Engine, EngineConfig, SamplingParams
from phloem.engine.generation import GeneratedSequence
from phloem.errors import ContextLengthError, EngineUnavailableError, InvalidRequestError, StepFailedError
from phloem.programs import AsyncProgram, AsyncState, Program
from phloem.programs.server_backend import ServerBackend
from phloem.runner.null_runner import NullRunner
from phloem.server.app import create_app
from phloem.types import FinishReason
from tests.helpers.fake_model import VOCAB, CharTokenizer, fake_parts
from tests.helpers.ranking_runner import RankingRunner

THOUGHT = "The thought that all five candidates have in common. " * 8
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


class ChatTokenizer(CharTokenizer):
    """Byte 1 is BOS, 2 opens a turn, 3 closes it. Content is trimmed, and past answers lose their reasoning."""

    special_ids = frozenset({0, 1, 2, 3})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [*([1] if add_special else []), *text.encode()]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if not (skip_special and i in self.special_ids)).decode(errors="replace")

    def render_chat(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> str:
        parts = ["\x01"]
        for place, message in enumerate(messages):
            content = message["content"].strip()
            if message["role"] == "assistant" and place < len(messages) - 1:
                content = content.rpartition("</think>")[2]
            parts.append(f"\x02{message['role']}\n{content}\x03\n")
        return "".join(parts) + ("\x02assistant\n" if add_generation_prompt else "")


class MergingTokenizer(ChatTokenizer):
    """A template that puts all user turns into the first one: turns cannot be added one by one."""

    def render_chat(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> str:
        return "\x02" + " ".join(message["content"] for message in messages) + "\x03"


def parts(tokenizer: Any = None, **options: Any) -> Any:
    options.setdefault("runner", RankingRunner(num_slots=16384, vocab_size=VOCAB))
    made = fake_parts(num_pages=16384, max_model_len=4096, **options)
    return replace(made, tokenizer=tokenizer or ChatTokenizer())


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(parts())
    yield engine
    for _ in range(200):  # a sequence that ended at a stop string is aborted a moment later
        if engine.stats()["kv_num_pages_protected"] == 0:
            break
        await asyncio.sleep(0.01)
    assert engine.stats()["kv_num_pages_protected"] == 0
    engine.close()


@pytest.fixture(params=["engine", "server"])
async def program(request: pytest.FixtureRequest, engine: AsyncEngine) -> AsyncIterator[AsyncProgram]:
    target: Any = engine
    if request.param == "server":
        target = ServerBackend("http://server/v1", transport=httpx.ASGITransport(create_app(engine)))
    async with AsyncProgram(target, SHORT, seed=7) as program:
        yield program


@pytest.fixture
def blocking() -> Iterator[Engine]:
    with Engine(parts()) as engine:
        yield engine


def ids_of(state: AsyncState) -> list[int]:
    return state._token_ids


# --- what a state keeps ---


async def test_token_ids_only_grow_and_pieces_are_encoded_by_themselves(program: AsyncProgram) -> None:
    state = program.start("Hello")
    first = await state.gen("first")
    assert ids_of(state)[:6] == [1, *b"Hello"], "BOS before a plain text"
    kept = list(ids_of(state))
    assert len(kept) == 6 + 8
    state += " and "
    state += "then"
    assert state.text == f"Hello{first} and then"
    second = await state.gen("second", max_tokens=3, logprobs=0)
    assert ids_of(state)[: len(kept) + 9] == [*kept, *b" and then"]
    assert (state["first"], state["second"]) == (first, second)
    assert state.text == f"Hello{first} and then{second}"
    detail = state.details["second"]
    assert isinstance(detail, GeneratedSequence)
    assert detail.finish_reason is FinishReason.LENGTH
    before = ids_of(state)[:-3]
    assert [item.logprob for item in detail.logprobs or ()] == pytest.approx(
        RankingRunner.logprobs_of(before, ids_of(state)[-3:])
    )
    # All but the last drawn token of the first answer was in the tree.
    assert detail.cached_tokens == len(kept) - 1


async def test_a_seed_repeats_a_program_and_each_gen_has_its_own(program: AsyncProgram) -> None:
    async def run(again: AsyncProgram) -> list[str]:
        state = again.start("Hello")
        branches = await state.fork(3)
        texts = await asyncio.gather(*(branch.gen() for branch in branches))
        return [*texts, await state.gen(), await again.start("Hello").gen()]

    first = await run(AsyncProgram(program.backend, SHORT, seed=3))
    assert len(set(first)) == 5
    assert await run(AsyncProgram(program.backend, SHORT, seed=3)) == first
    assert await run(AsyncProgram(program.backend, SHORT, seed=4)) != first
    fixed = [await program.start("Hello").gen(seed=5) for _ in range(2)]
    assert fixed[0] == fixed[1]


async def test_a_stop_string_is_cut_and_the_tokens_before_it_stay(program: AsyncProgram) -> None:
    free = await program.start("abc").gen(seed=1, max_tokens=60, temperature=0.5)
    plain = [at for at in range(10, len(free) - 2) if free[at : at + 2].isascii() and "\ufffd" not in free[:at]]
    at = plain[0] if plain else next(i for i in range(3, 50) if free[i].isascii())
    stop = free[at]
    at = free.index(stop)
    state = program.start("abc")
    text = await state.gen(seed=1, max_tokens=60, temperature=0.5, stop=stop)
    assert text == free[:at]
    detail_ids = ids_of(state)[4:]
    assert bytes(i for i in detail_ids if i > 3).decode(errors="replace") == text


async def test_stop_inside_a_token_encodes_the_rest_anew() -> None:
    class Words(CharTokenizer):
        """Byte 200 is the word 'end.\\n'."""

        def token_bytes(self, token_id: int) -> bytes:
            return b"end.\n" if token_id == 200 else bytes([token_id])

    class Fixed(NullRunner):
        def step(self, plan: Any) -> Any:
            result = super().step(plan)
            for i, row in enumerate(plan.logit_rows):
                result.token_ids[i] = [ord("T"), ord("h"), 200][min(row.position - 1, 2)]
            return result

    engine = AsyncEngine(parts(Words(), runner=Fixed(num_slots=16384, vocab_size=VOCAB)))
    state = AsyncProgram(engine).start("x")
    assert await state.gen(stop="\n") == "Thend."
    assert ids_of(state) == [*b"x", *b"Th", *b"end."]
    other = AsyncProgram(engine).start("x")
    assert await other.gen(stop="\n", include_stop=True) == "Thend.\n"
    assert ids_of(other) == [*b"x", *b"Th", 200]
    engine.close()


async def test_the_end_of_text_token_is_not_kept(program: AsyncProgram) -> None:
    free = program.start("abc")
    await free.gen(seed=1)
    *kept, third = ids_of(free)[:7]
    state = program.start("abc")
    await state.gen(seed=1, stop_token_ids=(third,))
    assert ids_of(state) == kept


async def test_select_takes_the_likeliest_and_costs_only_its_rows(program: AsyncProgram, engine: AsyncEngine) -> None:
    state = program.start(THOUGHT)
    choices = [" yes", " no", " perhaps so"]
    prompt = b"\x01" + THOUGHT.encode()
    scores = {choice: RankingRunner.logprobs_of(prompt, choice.encode()) for choice in choices}
    chosen = await state.select(choices, "answer")
    assert chosen == max(choices, key=lambda choice: sum(scores[choice]) / len(choice))
    assert state["answer"] == chosen
    assert ids_of(state) == [*prompt, *chosen.encode()]
    total = await program.start(THOUGHT).select(choices, by="total")
    assert total == max(choices, key=lambda choice: sum(scores[choice]))
    rows = sum(len(choice) + 1 for choice in choices)
    assert engine.stats()["num_prefill_rows"] <= len(prompt) + 2 * rows
    with pytest.raises(InvalidRequestError, match="nothing to choose"):
        await state.select([])
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        await program.start().select(["a"])
    with pytest.raises(InvalidRequestError, match="choice is empty"):
        await state.select(["a", ""])


# --- branches ---


async def test_five_candidates_of_one_thought_compute_it_once(program: AsyncProgram, engine: AsyncEngine) -> None:
    """The parent is computed once, whether the candidates are drawn or scored: 5x fewer rows than without a cache."""
    trunk = program.start(THOUGHT)
    await trunk.gen("thought")
    before = engine.stats()["num_prefill_rows"]
    used = program.usage
    branches = await trunk.fork(5)
    for i, branch in enumerate(branches):
        branch.append(f" Candidate {i}:")
    await asyncio.gather(*(branch.gen("step") for branch in branches))
    rows = engine.stats()["num_prefill_rows"] - before
    without_cache = 5 * (len(ids_of(trunk)) + len(" Candidate 0:"))
    assert program.usage.num_prompt_tokens - used.num_prompt_tokens == without_cache
    assert rows <= 5 * len(" Candidate 0:") + 1, "the last drawn token of the thought, and each candidate's own text"
    assert without_cache / rows >= 5.0
    assert program.usage.num_computed_tokens - used.num_computed_tokens == rows


async def test_a_cold_trunk_is_computed_once_for_branches_that_start_together(
    program: AsyncProgram, engine: AsyncEngine
) -> None:
    branches = await program.start(THOUGHT).fork(8)
    await asyncio.gather(*(branch.gen() for branch in branches))
    assert engine.stats()["num_prefill_rows"] <= len(THOUGHT) + 1 + 7


@pytest.mark.parametrize("through_server", [False, True])
async def test_without_sharing_the_answers_are_the_same_and_all_is_computed(
    engine: AsyncEngine, through_server: bool
) -> None:
    transport = httpx.ASGITransport(create_app(engine))

    async def run(share: bool) -> tuple[list[str], AsyncProgram]:
        target = ServerBackend("http://server", share=share, transport=transport) if through_server else engine
        program = AsyncProgram(target, SHORT, seed=11, share=share)
        branches = await program.start(THOUGHT).fork(5)
        texts = list(await asyncio.gather(*(branch.gen() for branch in branches)))
        texts += await asyncio.gather(*(branch.select(["a", "bc"]) for branch in branches))
        await program.close()
        return texts, program

    shared, with_tree = await run(True)
    alone, without = await run(False)
    assert shared == alone
    assert without.usage.num_cached_tokens == 0
    assert without.usage.num_prompt_tokens == with_tree.usage.num_prompt_tokens
    assert without.usage.num_computed_tokens >= 5 * with_tree.usage.num_computed_tokens


async def test_fork_and_join(program: AsyncProgram) -> None:
    trunk = program.start("Once")
    await trunk.gen("opening")
    branches = await trunk.fork(3)
    for i, branch in enumerate(branches):
        branch.append(f" {i}")
        await branch.gen("line")
        assert trunk.text in branch.text
    assert "line" not in trunk.variables
    found = trunk.join(branches)
    assert found["line"] == [branch["line"] for branch in branches]
    assert found["opening"] == [trunk["opening"]] * 3
    length = len(ids_of(trunk))
    trunk.join(branches, best=branches[1])
    assert trunk["line"] == branches[1]["line"]
    assert trunk.text == branches[1].text
    assert ids_of(trunk) == ids_of(branches[1])
    await trunk.gen()
    assert len(ids_of(trunk)) > len(ids_of(branches[1])) > length


async def test_a_state_does_one_thing_at_a_time(engine: AsyncEngine) -> None:
    state = AsyncProgram(engine, SHORT).start("x")
    results = await asyncio.gather(state.gen(), state.gen(), return_exceptions=True)
    assert [type(result) for result in results] == [str, InvalidRequestError]
    assert len(ids_of(state)) == 2 + 8


# --- chat turns ---


async def test_turns_are_what_the_template_writes(program: AsyncProgram, engine: AsyncEngine) -> None:
    state = program.start()
    state.system("Be kind.")
    state.user(" Hi ")
    answer = await state.reply("answer", seed=2)
    state.user("More")
    with state.turn("assistant"):
        state += "Well,"
        await state.gen("more", seed=2)
    await state.fork(1)
    rendered = "\x01\x02system\nBe kind.\x03\n\x02user\n Hi \x03\n\x02assistant\n"
    assert state.text.startswith(rendered + answer + "\x03\n\x02user\nMore\x03\n\x02assistant\nWell,")
    assert state.text.endswith(state["more"] + "\x03\n")
    drawn = state.details["answer"]
    assert isinstance(drawn, GeneratedSequence)
    assert ids_of(state)[: len(rendered) + 8] == [*rendered.encode(), *drawn.token_ids]


async def test_a_template_that_cuts_past_answers_does_not_touch_ours(engine: AsyncEngine) -> None:
    state = AsyncProgram(engine, SHORT).start()
    state.user("a")
    state.assistant("<think>long</think>b")
    state.user("c")
    await state.gen()
    assert "<think>long</think>b\x03\n\x02user\nc\x03\n" in state.text


async def test_a_template_that_rewrites_turns_is_refused_and_nothing_is_lost() -> None:
    engine = AsyncEngine(parts(MergingTokenizer()))
    state = AsyncProgram(engine, SHORT).start()
    state.user("a")
    state.user("b")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="rewrites earlier turns"):
            await state.gen()
    assert ids_of(state) == []
    engine.close()


async def test_turns_do_not_nest(engine: AsyncEngine) -> None:
    state = AsyncProgram(engine, SHORT).start()
    with state.turn("user"), pytest.raises(InvalidRequestError, match="still open"):
        state.system("no")


# --- errors ---


async def test_errors_come_as_what_they_are(program: AsyncProgram) -> None:
    with pytest.raises(ContextLengthError, match=r"5001 tokens.*4096"):
        await program.start("x" * 5000).gen()
    with pytest.raises(InvalidRequestError, match="temperature"):
        await program.start("x").gen(temperature=-1.0)
    with pytest.raises(TypeError, match="max_tokenz"):
        await program.start("x").gen(max_tokenz=3)


async def test_a_failed_step_is_raised() -> None:
    runner = NullRunner(num_slots=16384, vocab_size=VOCAB, fail_at=frozenset({2}))
    engine = AsyncEngine(parts(runner=runner))
    state = AsyncProgram(engine, SHORT).start("x")
    with pytest.raises(StepFailedError):
        await state.gen()
    assert len(await state.gen()) > 0, "the state is as it was and may go on"
    assert len(ids_of(state)) == 2 + 8
    engine.close()


async def test_no_server_is_a_clear_error() -> None:
    async with AsyncProgram("http://127.0.0.1:9") as program:
        with pytest.raises(EngineUnavailableError, match="is a server running there"):
            await program.start("x").gen()


async def test_a_full_server_is_asked_again_and_a_key_is_sent() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) < 3:
            return httpx.Response(429, headers={"Retry-After": "0"}, json={"error": {}})
        return httpx.Response(200, json={"tokens": [1]})

    backend = ServerBackend("http://server", api_key="secret", transport=httpx.MockTransport(answer))
    assert await backend.encode("x", True) == [1]
    assert len(seen) == 3
    assert seen[0].headers["Authorization"] == "Bearer secret"
    await backend.close()


# --- blocking programs ---


def test_a_blocking_program_is_plain_python(blocking: Engine) -> None:
    with Program(blocking, SHORT, seed=5) as program:
        state = program.start("Hello")
        state += " you"
        state.gen("first")
        branches = state.fork(4)
        branches += " and"
        texts = branches.gen("next", max_tokens=3)
        assert len(set(texts)) == 4
        assert branches.select([" a", " b"], "pick") == [branch["pick"] for branch in branches]
        longer = branches[:2].map(lambda branch: branch.gen(max_tokens=2) + branch.gen(max_tokens=1))
        assert len(longer) == 2
        assert state.join(branches, best=branches[3])["next"] == texts
        assert state["next"] == texts[3]
        assert state.text.endswith(state["pick"])
        assert program.usage.num_output_tokens == 8 + 4 * 3 + 2 * 3
    assert blocking.generate("still open", SHORT).error is None


def test_map_runs_items_at_once_and_repeats_by_seed(blocking: Engine) -> None:
    def ask(state: Any, question: str) -> str:
        state.user(question)
        return str(state.reply())

    questions = [f"question {i}" for i in range(12)]
    runs = [Program(blocking, SHORT, seed=1).map(ask, questions) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 12


@pytest.mark.parametrize("name", ["tree_of_thoughts", "self_consistency", "monte_carlo_tree_search", "tool_agent"])
def test_the_examples_run_and_share(name: str, blocking: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    solve = importlib.import_module(name).solve
    if inspect.iscoroutinefunction(solve):
        program: Any = AsyncProgram(blocking.async_engine, seed=1)
        answer = blocking.run(solve(program))
    else:
        program = Program(blocking, seed=1)
        answer = solve(program)
    assert answer
    assert program.usage.num_prompt_tokens >= 5 * program.usage.num_computed_tokens
    assert program.usage.num_computed_tokens <= blocking.stats()["num_prefill_rows"]


def test_the_demo_model_answers_and_chooses(demo_model: Path) -> None:
    config = EngineConfig(model=str(demo_model), max_total_tokens=8192, max_model_len=2048)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with Engine.load(config) as engine, Program(engine, greedy) as program:
        state = program.start()
        state.system("You know the capital of every country. " + "You answer in one word. " * 20)
        state.user("What is the capital of France?")
        assert "Paris" in state.reply("answer")
        before, rows = program.usage, engine.stats()["num_prefill_rows"]
        branches = state.fork(5)
        for branch, country in zip(branches, ("Italy", "Spain", "Japan", "Egypt", "Greece"), strict=True):
            branch.user(f"And of {country}?")
        branches.reply("answer", max_tokens=8)
        without_cache = program.usage.num_prompt_tokens - before.num_prompt_tokens
        assert without_cache >= 5 * (engine.stats()["num_prefill_rows"] - rows)
        assert "Rome" in branches[0]["answer"]
        state.join(branches, best=branches[0])
        state.user("Is it in Europe?")
        with state.turn("assistant"):
            assert state.select(["Yes", "Banana"]) == "Yes"
