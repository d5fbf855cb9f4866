"""Embeddings of an engine against hidden states of transformers: whatever is cached, chunked or retracted."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from phloem.config import EngineConfig
from phloem.engine.async_engine import AsyncEngine
from phloem.types import Float32Array, Pooling, Request, SamplingParams
from tests.helpers.models import hf_model, save_folder


async def embed(engine: AsyncEngine, name: str, prompt: list[int], pooling: Pooling) -> tuple[Float32Array, int]:
    """The vector of a prompt and how much of it was cached."""
    request = Request(name, np.array(prompt, np.int32), SamplingParams(max_tokens=0), pooling=pooling)
    async with aclosing(await engine.submit(request)) as stream:
        deltas = [delta async for delta in stream]
    assert [delta.error for delta in deltas] == [None]
    assert deltas[0].embedding is not None
    return deltas[0].embedding, deltas[0].cached_tokens


@pytest.mark.parametrize(("backend", "tolerance"), [("torch", 1e-4), ("native", 1e-3)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_pooled_states_equal_transformers(
    architecture: str, backend: str, tolerance: float, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = hf_model(architecture)
    shared = rng.integers(0, 320, 40).tolist()
    prompts = [shared + rng.integers(0, 320, length).tolist() for length in (30, 1, 57)] + [shared, [5]]
    with torch.no_grad():
        states = [
            model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].numpy() for prompt in prompts
        ]
    config = EngineConfig(
        model=str(save_folder(model, tmp_path)),
        backend=backend,  # type: ignore[arg-type]
        quantization="none",
        kv_cache_dtype="f32",
        chunked_prefill_size=16,
        max_total_tokens=400,
    )
    wanted = {Pooling.MEAN: [s.mean(axis=0) for s in states], Pooling.LAST: [s[-1] for s in states]}

    async def check() -> None:
        engine = AsyncEngine.load(config)
        try:
            for round_ in range(2):
                for pooling, expected in wanted.items():
                    jobs = [
                        embed(engine, f"{round_}-{pooling}-{i}", prompt, pooling) for i, prompt in enumerate(prompts)
                    ]
                    for (vector, cached), right, prompt in zip(
                        await asyncio.gather(*jobs), expected, prompts, strict=True
                    ):
                        assert np.abs(vector - right).max() < tolerance * np.abs(right).max()
                        if pooling is Pooling.LAST and round_:
                            assert cached == len(prompt) - 1, "all but the last token's row is in the cache"
        finally:
            engine.close()

    asyncio.run(check())
