"""The native decoder against the torch decoder, and its border: bad plans are refused and change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phloem._kernels import Decoder, PackedMatrix, supported_isas
from phloem.errors import CheckpointError, StepFailedError, UsageError
from phloem.models.load import random_weights as plain_weights
from phloem.models.spec import RopeSpec
from phloem.runner.native_runner import NativeRunner
from phloem.runner.torch_runner import TorchRunner
from tests.kernels.reference import random_spec, random_weights, step_plan

SPECS: dict[str, dict[str, Any]] = {
    "odd": {},
    "llama": {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": False, "head_dim": 32},
    "tied": {"tie_word_embeddings": True, "num_kv_heads": 6, "rope": RopeSpec(theta=100.0, kind="linear", factor=2.0)},
    "gelu": {"activation": "gelu", "vocab_size": 128, "hidden_size": 64},
    "gelu_tanh": {"activation": "gelu_tanh", "num_kv_heads": 1, "head_dim": 8},
}


def prompt_and_branch(vocab: int) -> Any:
    """A 150-token prompt in scattered slots, and a second sequence that shares its first 100 slots."""
    rng = np.random.default_rng(3)
    slots = rng.permutation(400).astype(np.int32)
    first = rng.integers(0, vocab, 150).tolist()
    second = first[:100] + rng.integers(0, vocab, 30).tolist()
    return step_plan([(first, 0, slots[:150]), (second[100:], 100, np.append(slots[:100], slots[200:230]))])


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("name", SPECS)
def test_logits_match_the_torch_decoder(name: str, isa: str) -> None:
    spec = random_spec(**SPECS[name])
    weights = random_weights(spec)
    plan = prompt_and_branch(spec.vocab_size)
    expected = TorchRunner(spec, weights, 400).logits(plan)
    native = NativeRunner(
        spec, weights, num_slots=400, quantization="none", kv_cache_dtype="f32", num_threads=2, isa=isa
    )
    np.testing.assert_allclose(native.logits(plan), expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "bound"),
    [("none", "f16", 0.1), ("none", "int8", 1.0), ("q8", "f32", 3.0), ("q8", "f16", 3.0), ("q4", "f16", 25.0)],
)
def test_rounding_stays_within_its_bound(quantization: Any, kv_cache_dtype: Any, bound: float) -> None:
    """What a rounding costs, in units of what the torch decoder loses by computing in bfloat16 with an f16 cache.

    8 bits with a scale per 32 values, for weights and activations, are about 2.3 of these units here.
    """
    spec = random_spec(hidden_size=256, intermediate_size=512, head_dim=64, num_heads=4, qk_norm=False)
    weights = random_weights(spec)
    plan = prompt_and_branch(spec.vocab_size)
    expected = TorchRunner(spec, weights, 400).logits(plan)
    unit = TorchRunner(spec, weights, 400, dtype=torch.bfloat16, kv_dtype="f16").logits(plan) - expected
    native = NativeRunner(spec, weights, num_slots=400, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    error = native.logits(plan) - expected
    assert np.square(error).mean() < bound**2 * np.square(unit).mean()


@pytest.mark.parametrize("kv_cache_dtype", ["f16", "f32", "int8"])
@pytest.mark.parametrize("quantization", ["none", "q8", "q4"])
def test_the_width_of_registers_changes_no_bit(quantization: Any, kv_cache_dtype: Any) -> None:
    """All but the portable build, which rounds a product before it adds it, give equal logits."""
    for head_dim in (8, 24, 64):  # tails of eight lanes, and none
        spec = random_spec(head_dim=head_dim)
        weights = random_weights(spec)
        plan = prompt_and_branch(spec.vocab_size)
        found = [
            NativeRunner(
                spec, weights, num_slots=400, quantization=quantization, kv_cache_dtype=kv_cache_dtype, isa=isa
            ).logits(plan)
            for isa in supported_isas()
            if isa != "portable"
        ]
        for logits in found:
            np.testing.assert_array_equal(logits, found[0])


def test_bad_plans_are_refused_and_write_nothing() -> None:
    spec = random_spec()
    weights = random_weights(spec)
    subject, untouched = (NativeRunner(spec, weights, num_slots=400, num_threads=1) for _ in range(2))
    good = prompt_and_branch(spec.vocab_size)
    before = subject.logits(good)
    changes: list[tuple[str, int, int]] = [
        ("token_ids", 3, spec.vocab_size),
        ("token_ids", 3, -1),
        ("positions", 5, 7),
        ("positions", 0, -1),
        ("write_slots", 2, 400),
        ("write_slots", 2, -2),
        ("seq_table_row", 1, 2),
        ("seq_row_start", 1, 400),
        ("seq_row_start", 0, 1),
    ]
    for field, index, value in changes:
        array = getattr(good, field).copy()
        array[index] = value
        with pytest.raises(StepFailedError, match="is wrong"):
            subject.logits(replace(good, **{"write_slots": good.write_slots[::-1].copy(), field: array}))
    table = good.slot_table.copy()
    table[1, 17] = 400
    with pytest.raises(StepFailedError, match="slot of the table is wrong: got 400 at 17"):
        subject.logits(replace(good, slot_table=table))
    with pytest.raises(StepFailedError):
        subject.logits(replace(good, positions=good.positions[:-1]))
    np.testing.assert_array_equal(before, untouched.logits(good))
    tail = step_plan([([5], 149, good.slot_table[0])], written=set(range(400)))
    np.testing.assert_array_equal(subject.logits(tail), untouched.logits(tail))


def test_an_empty_step_and_a_step_without_logits() -> None:
    spec = random_spec()
    subject = NativeRunner(spec, random_weights(spec), num_slots=8)
    plan = step_plan([([1, 2], 0, np.arange(2, dtype=np.int32))])
    assert subject.logits(replace(plan, logit_rows=[])).shape == (0, spec.vocab_size)
    result = subject.step(plan)
    assert len(result.token_ids) == 2
    assert np.isfinite(result.logprobs).all()


def test_overflowing_values_stay_in_their_sequence() -> None:
    """A row whose activations overflow must not poison a neighbour, nor an earlier row of the same tile."""
    spec = random_spec()
    weights = random_weights(spec)
    embed = weights["embed"].data.view(np.float32).copy()
    embed[7] = 1e30
    weights["embed"] = replace(weights["embed"], data=embed.view(np.uint8))
    subject = NativeRunner(spec, weights, num_slots=16, quantization="none")
    slots = np.arange(8, dtype=np.int32)
    alone = subject.logits(step_plan([([1, 2, 3], 0, slots)]))
    beside = subject.logits(step_plan([([1, 2, 3, 7], 0, slots), ([7, 7], 0, slots[4:])]))
    np.testing.assert_array_equal(beside[:3], alone)


def test_wrong_models_are_refused() -> None:
    spec = random_spec()
    weights = random_weights(spec)
    with pytest.raises(CheckpointError, match="head_dim must be a multiple of 8"):
        NativeRunner(random_spec(head_dim=20), random_weights(random_spec(head_dim=20)), num_slots=8)
    with pytest.raises(CheckpointError, match=r"expected \[101, 72\], got \[101, 80\]"):
        NativeRunner(spec, weights | {"embed": random_weights(random_spec(hidden_size=80))["embed"]}, num_slots=8)
    with pytest.raises(UsageError, match="isa mmx is not available"):
        NativeRunner(spec, weights, num_slots=8, isa="mmx")  # type: ignore[arg-type]
    weights.pop("layers.1.up")
    with pytest.raises(StepFailedError, match="weights are missing"):
        NativeRunner(spec, weights, num_slots=8).logits(step_plan([([1], 0, np.zeros(1, np.int32))]))


def test_unknown_weight_names_are_refused() -> None:
    spec = random_spec()
    decoder = Decoder(
        vocab_size=spec.vocab_size, hidden_size=72, intermediate_size=88, num_layers=2, num_heads=6, num_kv_heads=2,
        head_dim=24, rms_norm_eps=1e-6, activation="silu", kv_cache_dtype="f16", num_slots=8, num_threads=1,
        group_shared_prefixes=True, isa="portable",
    )  # fmt: skip
    for name in ("layers.2.q", "layers.x.q", "layers.0.z", "layers.0", "wte", "layers.99999999999999999999.q"):
        with pytest.raises(ValueError, match="unknown weight"):
            decoder.set_matrix(name, PackedMatrix("q8", 16, 16))
    with pytest.raises(ValueError, match="expected 72 values, got 3"):
        decoder.set_vector("final_norm", np.ones(3, np.float32))


def test_describe_names_what_runs() -> None:
    spec = random_spec()
    facts = NativeRunner(spec, plain_weights(spec), num_slots=8, num_threads=2, kv_cache_dtype="int8").describe()
    assert facts["isa"] == supported_isas()[-1]
    assert facts["num_threads"] == 2
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * (24 + 4)
    assert facts["weight_formats"] == ["f16"]
