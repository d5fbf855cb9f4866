"""What a model costs on the native path: bytes that stay in memory, bytes and operations per token.

Owns that arithmetic. Must not know how fast a machine is, nor read any weights: shapes and formats are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phloem.config import KVCacheDtype, Quantization
from phloem.kernels.native import PackedMatrix
from phloem.models.spec import ModelSpec
from phloem.models.weights import RawTensor
from phloem.runner.kv_buffers import kv_bytes_per_token
from phloem.runner.packing import packed_format


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes; an operation is a multiplication or an addition."""

    weight_bytes: int
    """All matrices, packed."""
    read_bytes: int
    """Weights that a forward pass with logits reads, whatever its number of rows."""
    kv_bytes_per_token: int
    """K and V of one token: kept for each, and read for each by every later one."""
    prefill_ops: int
    """Products for one token of a prompt."""
    decode_ops: int
    """The same for a token whose logits are wanted."""
    attention_ops: int
    """Per token, for each token that it attends."""
    formats: tuple[str, ...]


def footprint(
    spec: ModelSpec, weights: Mapping[str, RawTensor], quantization: Quantization | None, kv_cache_dtype: KVCacheDtype
) -> Footprint:
    """The footprint of a model with these settings."""
    sizes = {}
    formats = set()
    for name, tensor in weights.items():
        if len(tensor.shape) == 2:
            formats.add(packed_format(tensor, quantization))
            sizes[name] = PackedMatrix(packed_format(tensor, quantization), *tensor.shape).nbytes
    total = sum(sizes.values())
    layers = sum(2 * weights[name].shape[0] * weights[name].shape[1] for name in sizes if name not in ("embed", "head"))
    return Footprint(
        weight_bytes=total,
        # An embedding that is not the head as well is read by the row.
        read_bytes=total - sizes["embed"] if "head" in sizes else total,
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_cache_dtype),
        prefill_ops=layers,
        decode_ops=layers + 2 * spec.vocab_size * spec.hidden_size,
        attention_ops=4 * spec.num_layers * spec.num_heads * spec.head_dim,
        formats=tuple(sorted(formats)),
    )
