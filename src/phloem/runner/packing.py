"""Stored tensors to packed matrices: owns which packed format a stored one becomes, and what is lost.

Must not know layers, files or the cache of packed weights.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phloem.config import Quantization
from phloem.kernels.native import PackedMatrix
from phloem.models.weights import RawTensor, dequantize

PackedFormat = Literal["q4", "q4m", "q8", "f16", "bf16", "f32"]

_EXACT: dict[str, PackedFormat] = {"q8_0": "q8", "q4_0": "q4", "q4_1": "q4m"}
_FLOAT: dict[str, PackedFormat] = {"f32": "f32", "f16": "f16", "bf16": "bf16"}
_ROWS_AT_ONCE = 2048


def packed_format(tensor: RawTensor, quantization: Quantization | None) -> PackedFormat:
    """The packed format of a stored matrix.

    q8_0, q4_0 and q4_1 keep their values exactly. q4_k keeps its 4-bit values; its scales are rounded to f16. The
    other block formats become q8. Float weights stay what they are unless `quantization` says `q8` or `q4`; with `q4`
    embedding and head are q8 all the same, since they are most sensitive and every token reads them.
    """
    if tensor.format in _EXACT:
        return _EXACT[tensor.format]
    if tensor.format == "q4_k":
        return "q4m"
    if tensor.format in _FLOAT and quantization in (None, "none"):
        return _FLOAT[tensor.format]
    if tensor.format in _FLOAT and quantization == "q4" and tensor.name not in ("embed", "head"):
        return "q4m"
    return "q8"


def pack(tensor: RawTensor, quantization: Quantization | None) -> PackedMatrix:
    """Pack a stored matrix [n, k]. Cost: one pass over its bytes, more for formats that must be converted."""
    n, k = tensor.shape
    matrix = PackedMatrix(packed_format(tensor, quantization), n, k)
    for begin in range(0, n, _ROWS_AT_ONCE):
        rows = tensor.data[begin : begin + _ROWS_AT_ONCE]
        if tensor.format in _EXACT or tensor.format in _FLOAT:
            matrix.fill(begin, tensor.format, np.ascontiguousarray(rows))
        elif tensor.format == "q4_k":
            matrix.fill(begin, "q4_1", q4_k_as_q4_1(rows))
        else:
            part = RawTensor(tensor.name, (len(rows), k), tensor.format, rows)
            matrix.fill(begin, "f32", np.ascontiguousarray(dequantize(part)).view(np.uint8))
    return matrix


def q4_k_as_q4_1(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks of 256 with 6-bit scales (q4_k) as eight blocks of 32 with f16 scales (q4_1) each.

    A q4_k block is d f16, dmin f16, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles; its value is
    d * scale * q - dmin * minimum.
    """
    blocks = rows.reshape(-1, 144)
    d = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    out = np.empty((len(blocks), 8, 20), np.uint8)
    both = np.stack([d[:, :1] * scales, -d[:, 1:] * minima], axis=2).astype(np.float16)
    out[:, :, :4] = both.view(np.uint8)
    # 32 bytes hold 32 weights of an even sub-block in their low bits, of the next one in their high bits.
    nibbles = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 8, 32)
    out[:, :, 4:] = values[:, :, :16] | (values[:, :, 16:] << 4)
    return out.reshape(len(rows), -1)
