"""Rotary tables: owns the frequencies of every rope kind, for the torch and the native forward alike.

Must not know torch, kernels or files: numbers from a RopeSpec, in float64 until the last rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.models.spec import RopeSpec
from phloem.types import Float32Array


class RopeTables(NamedTuple):
    """float32 [max_len, head_dim / 2] each, row = position; YaRN's attention factor is already in them."""

    cos: Float32Array
    sin: Float32Array


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> NDArray[np.float64]:
    """Angle per position of each pair, float64 [head_dim / 2]."""
    plain: NDArray[np.float64] = np.power(rope.theta, -np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.freq_factors:
        plain = plain / np.asarray(rope.freq_factors, np.float64)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def rope_tables(rope: RopeSpec, head_dim: int, max_len: int) -> RopeTables:
    """Cos and sin for positions 0 to max_len - 1. Cost: 8 bytes per position and pair, O(max_len * head_dim)."""
    angles = np.arange(max_len, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    scale = attention_factor(rope)
    return RopeTables((np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32))


def attention_factor(rope: RopeSpec) -> float:
    """Factor on cos and sin: 1 but for YaRN, which sharpens attention by 0.1 ln(factor) + 1 unless told otherwise."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0


def _llama3(plain: NDArray[np.float64], rope: RopeSpec) -> NDArray[np.float64]:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended by how often they turn."""
    turns = rope.original_max_position * plain / (2.0 * math.pi)
    blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return plain * (blend + (1.0 - blend) / rope.factor)


def _yarn(plain: NDArray[np.float64], rope: RopeSpec, head_dim: int) -> NDArray[np.float64]:
    """Pairs that turn more than beta_fast times are kept, fewer than beta_slow stretched, a ramp over pairs between."""

    def pair_of(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2.0 * math.pi)
        return head_dim * math.log(wavelength) / (2.0 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    ramp: NDArray[np.float64] = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain * ((1.0 - ramp) + ramp / rope.factor)
