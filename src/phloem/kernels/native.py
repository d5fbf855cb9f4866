"""The native kernels as the rest of the package imports them.

Owns the names only. Must not know models, files or the cache.
"""

from phloem._kernels import Decoder, PackedMatrix, supported_isas

__all__ = ["Decoder", "PackedMatrix", "supported_isas"]
