"""Atomic spans: runs of positions, an image's, that a match may not end inside.

Owns the ids that stand for such positions in a token sequence. Must not know images or the vision model: a digest of
the content comes in.

An id below zero is a position of a span. Bit 30 marks the first one, the other 30 bits come from a hash of the digest,
the span's length and the position, so the same content at another length shares nothing. The tree reads only the sign
and the mark: a match that would end before an id that is not a first one steps back to the start of its span.
"""

from __future__ import annotations

import hashlib

import numpy as np

from phloem.errors import InvalidRequestError
from phloem.types import Int32Array

MIN_DIGEST_BYTES = 16
MIN_SPAN = 5
"""Five positions carry 150 bits of the digest; fewer could let two images meet."""


def span_ids(digest: bytes, num_positions: int) -> Int32Array:
    """The ids of a span, int32[num_positions], all below zero. O(num_positions).

    Raises InvalidRequestError for a digest below 128 bits or a span below five positions.
    """
    if len(digest) < MIN_DIGEST_BYTES:
        raise InvalidRequestError(f"a span needs a digest of at least {MIN_DIGEST_BYTES} bytes, got {len(digest)}")
    if num_positions < MIN_SPAN:
        raise InvalidRequestError(f"a span needs at least {MIN_SPAN} positions, got {num_positions}")
    seed = hashlib.blake2b(num_positions.to_bytes(8, "little") + digest, digest_size=32).digest()
    stream = hashlib.shake_128(seed).digest(4 * num_positions)
    bits = np.frombuffer(stream, dtype="<u4") & np.uint32(0x3FFFFFFF)
    bits = bits | np.uint32(0x80000000)
    bits[0] |= np.uint32(0x40000000)
    return bits.astype(np.uint32).view(np.int32)
