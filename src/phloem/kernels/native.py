"""The native kernels as the rest of the package imports them.

Owns the names only. Must not know models, files or the cache.
"""

from phloem import _kernels
from phloem._kernels import (
    Decoder,
    PackedMatrix,
    matmul,
    measure_bandwidth,
    measure_peak,
    supported_isas,
    time_matmul,
)

LIBRARY = _kernels.__file__
"""Path of the compiled module."""

__all__ = [
    "LIBRARY",
    "Decoder",
    "PackedMatrix",
    "matmul",
    "measure_bandwidth",
    "measure_peak",
    "supported_isas",
    "time_matmul",
]
