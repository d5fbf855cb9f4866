"""Cached tokens of the demo model, to the token: a request reuses all that an earlier one computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem.config import EngineConfig
from phloem.engine.async_engine import AsyncEngine
from phloem.engine.loading import EngineParts, load_parts
from phloem.types import Namespace, Request, SamplingParams

# Nothing is evicted here; 20,000 tokens are 440 MiB.
POOL = 20_000


@pytest.fixture(scope="module", params=[(1, 8192), (16, 2048)], ids=["page-1", "page-16"])
def parts(request: pytest.FixtureRequest, demo_model: Path) -> EngineParts:
    """The demo model: its whole context with the default page size, a shorter one with larger pages."""
    page_size, context = request.param
    config = EngineConfig(model=str(demo_model), max_total_tokens=POOL, page_size=page_size, max_model_len=context)
    return load_parts(config)


@pytest.fixture(scope="module")
def shared_engine(parts: EngineParts) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(parts)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: AsyncEngine, parts: EngineParts) -> Iterator[Client]:
    """The engine with an empty cache; at the end nothing may be held, and the tree must be sound."""
    client = Client(shared_engine, parts)
    yield client
    manager = parts.scheduler.manager
    manager.check_invariants()
    stats = manager.stats()
    assert stats.num_pages_protected == stats.num_cursors == stats.num_wants == 0
    assert stats.num_pages_free + stats.num_pages_evictable == stats.num_pages_total


class Client:
    """Sends token prompts and keeps what came back."""

    def __init__(self, engine: AsyncEngine, parts: EngineParts) -> None:
        self.engine = engine
        self.page_size = parts.config.page_size
        self.context = parts.scheduler.max_model_len
        self.computed_rows = lambda: parts.scheduler.stats.num_prefill_rows
        self._num_requests = 0

    def whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    async def flush(self) -> None:
        await self.engine.flush_cache()

    async def ask(
        self, prompt: Sequence[int], *, max_tokens: int = 1, salt: str = "", **fields: Any
    ) -> tuple[int, list[int]]:
        """Cached tokens of the prompt, and the answer's token ids."""
        self._num_requests += 1
        request = Request(
            f"request-{id(self)}-{self._num_requests}",
            np.array(prompt, np.int32),
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            namespace=Namespace(cache_salt=salt),
            **fields,
        )
        cached, answer = 0, []
        async with aclosing(await self.engine.submit(request)) as stream:
            async for delta in stream:
                assert delta.error is None
                assert delta.num_prompt_tokens == len(prompt)
                cached = delta.cached_tokens
                answer += delta.token_ids
        return cached, answer


async def test_numbered_tokens(engine: Client) -> None:
    """The list of token ranges, in this order, from an empty cache."""
    await engine.flush()
    longest = engine.context - 1
    steps = [
        (range(100), 0),
        (range(longest), 100),
        (range(longest), longest - 1),
        (range(1000), 999),
        (range(100), 99),
        (range(2), 1),
        (range(1), 0),
        ([*range(50), *range(20_000, 20_100)], 50),
        ([*range(50), *range(20_000, 20_100), 7], 150),
        ([*range(50), *range(20_000, 20_050), 7], 100),
        ([5, *range(100)], 0),
        (range(longest), longest - 1),
    ]
    for number, (prompt, expected) in enumerate(steps):
        cached, _ = await engine.ask(prompt)
        assert cached == expected_cached(engine, len(prompt), expected), f"step {number}"


def expected_cached(engine: Client, num_prompt: int, shared: int) -> int:
    """What a match of `shared` tokens is worth: whole pages, and the last token is always computed."""
    return min(engine.whole_pages(shared if shared < num_prompt - 1 else num_prompt), num_prompt - 1)


async def test_flush_and_salt(engine: Client) -> None:
    await engine.flush()
    prompt = list(range(300, 800))
    warm = expected_cached(engine, 500, 499)
    assert [(await engine.ask(prompt))[0] for _ in range(2)] == [0, warm]
    assert [(await engine.ask(prompt, salt="other"))[0] for _ in range(2)] == [0, warm]
    assert (await engine.ask(prompt))[0] == warm
    await engine.flush()
    assert [(await engine.ask(prompt))[0] for _ in range(2)] == [0, warm]


async def test_three_turns(engine: Client) -> None:
    """A turn reuses prompt and answer of the one before, but for the last sampled token: its K/V was never computed."""
    await engine.flush()
    cached, answer = await engine.ask(range(500, 700), max_tokens=40)
    assert (cached, len(answer)) == (0, 40)
    context = [*range(500, 700), *answer]
    for question in (range(900, 930), range(1000, 1001), range(1100, 1200)):
        reusable = len(context) - 1
        context += question
        cached, answer = await engine.ask(context, max_tokens=24)
        assert cached == engine.whole_pages(reusable)
        context += answer


async def test_branches_of_a_chat(engine: Client) -> None:
    """Another answer to an earlier turn starts from that turn, and both branches stay."""
    await engine.flush()
    first = list(range(2000, 2150))
    _, answer = await engine.ask(first, max_tokens=17)
    context = first + answer
    assert (await engine.ask([*context, *range(60)]))[0] == engine.whole_pages(len(context) - 1)
    # The last sampled token is in the tree now, since the next turn's prompt held it.
    assert (await engine.ask([*context, *range(100, 160)]))[0] == engine.whole_pages(len(context))
    assert (await engine.ask([*context[:155], 3, 4]))[0] == engine.whole_pages(155)
    assert (await engine.ask([*context, *range(60), 9]))[0] == engine.whole_pages(len(context) + 60)


async def test_same_prompt_many_times_at_once(engine: Client) -> None:
    """32 equal prompts cost one prefill: each of the others computes its last row only."""
    await engine.flush()
    prompt = list(range(3000, 3320))
    before = engine.computed_rows()
    answers = await asyncio.gather(*(engine.ask(prompt, max_tokens=4) for _ in range(32)))
    assert len({tuple(answer) for _, answer in answers}) == 1
    assert sum(len(prompt) - cached for cached, _ in answers) == len(prompt) + 31
    assert engine.computed_rows() - before <= len(prompt) + 31


async def test_sequences_of_one_request_share_its_prompt(engine: Client) -> None:
    await engine.flush()
    prompt = list(range(4000, 4200))
    before = engine.computed_rows()
    warm = expected_cached(engine, 200, 199)
    cached, _ = await engine.ask(prompt, n=4, max_tokens=3)
    assert cached in (0, warm)  # that of the sequence which spoke last
    assert engine.computed_rows() - before <= len(prompt) + 3 * (len(prompt) - warm)
    assert (await engine.ask(prompt))[0] == warm
