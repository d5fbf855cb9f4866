"""KV memory: owns the arrays that slots point into, and their size.

Must not know which slot belongs to whom (kv) nor how attention reads them (models, kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phloem.config import KVCacheDtype
from phloem.models.spec import ModelSpec

KVDtype = Literal["f16", "f32"]

_BYTES_PER_ELEMENT: dict[KVCacheDtype, int] = {"f16": 2, "f32": 4, "int8": 1}
_NUMPY: dict[KVDtype, np.dtype[Any]] = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """K (after rotary) and V, each [num_layers, num_slots, num_kv_heads, head_dim], finite from the start."""

    k: NDArray[Any]
    v: NDArray[Any]

    @property
    def num_slots(self) -> int:
        return int(self.k.shape[1])


def kv_bytes_per_token(spec: ModelSpec, dtype: KVCacheDtype) -> int:
    """Bytes of one slot over all layers; int8 adds a float32 scale per token and head."""
    scale_bytes = 4 if dtype == "int8" else 0
    return 2 * spec.num_layers * spec.num_kv_heads * (spec.head_dim * _BYTES_PER_ELEMENT[dtype] + scale_bytes)


def allocate_kv(spec: ModelSpec, num_slots: int, dtype: KVDtype) -> KVBuffers:
    """Zeroed buffers; the system hands out their memory as it is first touched.

    Zeros matter: a masked lane may be multiplied by weight 0, and 0 * NaN is NaN.
    """
    shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
    return KVBuffers(np.zeros(shape, _NUMPY[dtype]), np.zeros(shape, _NUMPY[dtype]))
