"""TorchRunner: a plan in, tokens out; K/V only where the plan says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phloem.models.load import LoadedModel, load_model, random_weights
from phloem.runner.kv_buffers import allocate_kv, kv_bytes_per_token
from phloem.runner.torch_runner import TorchRunner
from phloem.types import ModelRunner
from tests.helpers.models import greedy_plan, hf_model, save_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_folder(hf_model("llama"), tmp_path_factory.mktemp("tiny")))


def test_a_step_draws_the_largest_logit(tiny: LoadedModel) -> None:
    runner: ModelRunner = TorchRunner(tiny.spec, tiny.weights, 32, max_len=16)
    assert runner.vocab_size == 320
    plan = greedy_plan(7, [[1, 2, 3], [4]], [0, 0], 16)
    result = runner.step(plan)
    logits = TorchRunner(tiny.spec, tiny.weights, 32, max_len=16).logits(plan)
    assert logits.dtype == np.float32
    assert result.step_id == 7
    assert result.token_ids.tolist() == logits.argmax(axis=1).tolist()
    runner.close()


def test_only_the_planned_slots_are_written(tiny: LoadedModel) -> None:
    runner = TorchRunner(tiny.spec, tiny.weights, 32, max_len=16)
    plan = greedy_plan(0, [[1, 2, 3], [4, 5]], [0, 0], 16)
    plan.write_slots[1] = -1
    runner.logits(plan)
    written = (runner.kv.k != 0).any(dim=3).any(dim=2).all(dim=0).numpy()
    assert np.flatnonzero(written).tolist() == [0, 2, 16, 17]
    assert ((runner.kv.v != 0).any(dim=3).any(dim=2).all(dim=0).numpy() == written).all()


def test_slots_may_lie_in_any_order(tiny: LoadedModel, rng: np.random.Generator) -> None:
    prompts = [rng.integers(0, 320, 12).tolist(), rng.integers(0, 320, 9).tolist()]
    plan = greedy_plan(0, prompts, [0, 0], 16, every_row=True)
    plain = TorchRunner(tiny.spec, tiny.weights, 32, max_len=16).logits(plan)
    order = rng.permutation(32).astype(np.int32)
    plan.slot_table, plan.write_slots = order[plan.slot_table], order[plan.write_slots]
    np.testing.assert_array_equal(TorchRunner(tiny.spec, tiny.weights, 32, max_len=16).logits(plan), plain)


def test_a_plan_without_logit_rows_gives_none(tiny: LoadedModel) -> None:
    plan = greedy_plan(0, [[1, 2, 3]], [0], 16)
    plan.logit_rows = []
    result = TorchRunner(tiny.spec, tiny.weights, 16, max_len=16).step(plan)
    assert result.token_ids.shape == result.logprobs.shape == (0,)


def test_half_precision_stays_near(tiny: LoadedModel, rng: np.random.Generator) -> None:
    prompt = rng.integers(0, 320, 12).tolist()
    plan = greedy_plan(0, [prompt], [0], 16, every_row=True)
    exact = TorchRunner(tiny.spec, tiny.weights, 16, max_len=16).logits(plan)
    half_kv = TorchRunner(tiny.spec, tiny.weights, 16, max_len=16, kv_dtype="f16").logits(plan)
    low = TorchRunner(tiny.spec, tiny.weights, 16, max_len=16, dtype=torch.bfloat16).logits(plan)
    assert 0 < np.abs(half_kv - exact).max() < 0.01 * np.abs(exact).max()
    assert 0 < np.abs(low - exact).max() < 0.1 * np.abs(exact).max()


def test_random_weights_run(tiny: LoadedModel) -> None:
    runner = TorchRunner(tiny.spec, random_weights(tiny.spec), 16, max_len=16)
    assert np.isfinite(runner.logits(greedy_plan(0, [[1, 2, 3]], [0], 16))).all()


def test_kv_sizes(tiny: LoadedModel, demo_model: Path) -> None:
    assert kv_bytes_per_token(load_model(demo_model).spec, "f16") == 2 * 30 * 3 * 64 * 2
    buffers = allocate_kv(tiny.spec, 10, "f32")
    assert buffers.num_slots == 10
    assert buffers.k.nbytes + buffers.v.nbytes == 10 * kv_bytes_per_token(tiny.spec, "f32")
    assert not buffers.k.any()
