"""ModelSpec: what a decoder-only transformer is, read from a checkpoint.

Owns architecture names and their peculiarities: the only file that knows them. Must not know torch, kernels or
how weights are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, half-split ("rotate half") layout: pair i is (x[i], x[i + head_dim / 2]).

    Sources: RoFormer (Su et al. 2021); YaRN (Peng et al. 2023); the llama3 rule of Llama 3.1's release.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    """YaRN's factor on cos and sin; 0: derived as 0.1 ln(factor) + 1."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and switches of one decoder-only transformer of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
