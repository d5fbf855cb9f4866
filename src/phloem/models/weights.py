"""RawTensor: one weight as the file stores it, and the names under which the engine knows weights.

Owns canonical names and the neutral tensor record. Must not know torch, kernels or file formats.

Canonical names (shapes are [out, in], Hugging Face layout, q and k in half-split RoPE order):

    embed [vocab, hidden]            head [vocab, hidden] (absent when tied)      final_norm [hidden]
    layers.{i}.attn_norm [hidden]    layers.{i}.mlp_norm [hidden]
    layers.{i}.q [heads * d, hidden]   .k [kv_heads * d, hidden]   .v [kv_heads * d, hidden]   .o [hidden, heads * d]
    layers.{i}.q_bias .k_bias .v_bias .o_bias    layers.{i}.q_norm [d]  .k_norm [d]
    layers.{i}.gate [inter, hidden]  .up [inter, hidden]  .down [hidden, inter]   .gate_bias .up_bias .down_bias
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TensorFormat = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A weight in its stored format: `data` is uint8 [rows, bytes per row], C-contiguous, possibly memory-mapped.

    Block formats (GGUF) lie along the last dimension, so rows can be permuted or cut freely.
    """

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    data: NDArray[np.uint8]
