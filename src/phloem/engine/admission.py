"""Checks at the border of the engine: what a request may ask for, before anything is queued.

Owns the limits and their messages. Must not know HTTP or the scheduler.
"""

from __future__ import annotations

from dataclasses import replace
from secrets import randbits

import numpy as np

from phloem.errors import ContextLengthError, InvalidRequestError, PoolCapacityError
from phloem.types import Request

MAX_SEQUENCES = 128
"""Most sequences of one request (n)."""
MAX_PRIORITY = (1 << 31) - 1
"""What the tree stores as an urgency: 32 bits."""


def check_request(request: Request, *, vocab_size: int, max_model_len: int, kv_tokens: int) -> Request:
    """Return the request with its seed resolved. O(prompt).

    Raises ContextLengthError or PoolCapacityError when the prompt leaves no room for one token,
    InvalidRequestError for an empty prompt, token ids outside the vocabulary, a bad n or priority.
    """
    prompt, params = request.prompt, request.params
    num_prompt = len(prompt)
    room = 0 if params.max_tokens == 0 else 1
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty: at least one token is needed", param="prompt")
    if num_prompt + room > max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, and the context length is {max_model_len} tokens, of which at least "
            "one is needed for the answer; shorten the prompt",
            param="prompt",
        )
    if num_prompt > kv_tokens:
        raise PoolCapacityError(
            f"the prompt has {num_prompt} tokens, and the KV pool holds {kv_tokens}; shorten the prompt or start the "
            "server with a larger --max-total-tokens",
            param="prompt",
        )
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise InvalidRequestError(f"token id {bad} is outside the vocabulary (0 to {vocab_size - 1})", param="prompt")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param=name
                )
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {request.priority}", param="priority"
        )
    if not 1 <= request.n <= MAX_SEQUENCES:
        raise InvalidRequestError(f"n must be from 1 to {MAX_SEQUENCES}, got {request.n}", param="n")
    if params.seed is None:
        params = replace(params, seed=randbits(63))
    return replace(request, params=params, prompt=np.ascontiguousarray(prompt, dtype=np.int32))
