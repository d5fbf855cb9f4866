"""Building engine requests for a route.

Owns what every request gets alike: namespace, client, stop ids.
"""

from __future__ import annotations

from phloem.server.context import Caller, ServerContext
from phloem.types import Int32Array, Pooling, Request, SamplingParams, TokenMasker


def make_request(
    context: ServerContext,
    caller: Caller,
    request_id: str,
    token_ids: Int32Array,
    params: SamplingParams,
    *,
    n: int = 1,
    cache_salt: str | None = None,
    priority: int = 0,
    masker: tuple[TokenMasker, ...] = (),
    score_from: int = 0,
    pooling: Pooling | None = None,
) -> Request:
    """One engine request of a caller."""
    return Request(
        request_id=request_id,
        prompt=token_ids,
        params=params,
        namespace=context.namespace(caller, cache_salt),
        n=n,
        priority=priority,
        client=caller.key_id or caller.address,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=frozenset(context.engine.tokenizer.eos_ids),
        masker=masker,
        score_from=score_from,
        pooling=pooling,
    )
