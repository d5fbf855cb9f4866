"""Rotary tables against transformers' frequencies and against properties of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phloem.models.rope import attention_factor, inverse_frequencies, rope_tables
from phloem.models.spec import RopeSpec, spec_from_hf
from tests.helpers.models import SIZES

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 8192, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ],
    ids=lambda p: p["rope_type"],
)
def test_frequencies_equal_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = transformers.LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters={"rope_theta": 5e5, **parameters})
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None)
    rope = spec_from_hf(config.to_dict()).rope
    np.testing.assert_allclose(inverse_frequencies(rope, head_dim), expected.numpy(), rtol=2e-6)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_default_frequencies_fall_from_one() -> None:
    frequencies = inverse_frequencies(RopeSpec(theta=10000.0), 64)
    assert frequencies[0] == 1.0
    assert frequencies[16] == pytest.approx(0.01, rel=1e-15)
    assert (np.diff(frequencies) < 0).all()


def test_freq_factors_divide() -> None:
    factors = tuple(float(1 + i) for i in range(8))
    plain = inverse_frequencies(RopeSpec(), 16)
    np.testing.assert_array_equal(inverse_frequencies(RopeSpec(freq_factors=factors), 16), plain / factors)


def test_dynamic_is_default_within_the_trained_length() -> None:
    plain = inverse_frequencies(RopeSpec(), 16)
    np.testing.assert_array_equal(inverse_frequencies(RopeSpec(kind="dynamic", factor=4.0), 16), plain)


def test_tables_are_right_to_float32_even_far_out() -> None:
    """Angles in float32 would be wrong by 1e-3 at position 100,000."""
    tables = rope_tables(RopeSpec(theta=1e5), 64, 100_001)
    assert tables.cos.shape == tables.sin.shape == (100_001, 32)
    assert tables.cos.dtype == tables.sin.dtype == np.float32
    angle = 100_000 * np.longdouble(1e5) ** (-np.arange(0, 64, 2).astype(np.longdouble) / 64)
    np.testing.assert_allclose(tables.cos[-1], np.cos(angle).astype(np.float64), atol=6e-8)
    np.testing.assert_allclose(tables.sin[-1], np.sin(angle).astype(np.float64), atol=6e-8)
    np.testing.assert_array_equal(tables.cos[0], 1.0)
    np.testing.assert_array_equal(rope_tables(RopeSpec(theta=1e5), 64, 50).cos, tables.cos[:50])
