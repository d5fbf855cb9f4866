"""POST /v1/embeddings: one vector for each input, pooled from the hidden states of the loaded model.

Owns the JSON of this route. What a vector is worth is the model's business: one that was trained to chat has hidden
states, and no one trained those to tell texts apart.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.errors import InvalidRequestError, StepFailedError, UnsupportedError
from phloem.server.answering import respond
from phloem.server.body import read_model
from phloem.server.context import Caller, ServerContext, caller_of, context_of
from phloem.server.generation import Generation
from phloem.server.prompts import encode_prompts, split_prompts
from phloem.server.protocol import Body
from phloem.server.requests import make_request
from phloem.types import Float32Array, Pooling, SamplingParams


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: int | None = None


async def embeddings(request: HttpRequest) -> Response:
    """A vector of length 1 for each input."""
    context = context_of(request)
    context.check_ready()
    body = await read_model(request, EmbeddingsBody, context.config.max_body_bytes)
    generation = await prepare(context, caller_of(request), body)
    return await respond(request, generation, lambda: collect(context, body, generation))


async def collect(context: ServerContext, body: EmbeddingsBody, generation: Generation) -> dict[str, Any]:
    """Wait for all vectors."""
    data = []
    for index, answer in enumerate(await generation.collect()):
        assert answer.embedding is not None
        vector = unit(answer.embedding)
        shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = generation.usage
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    return {"object": "list", "model": context.model_names[0], "data": data, "usage": counts}


async def prepare(context: ServerContext, caller: Caller, body: EmbeddingsBody) -> Generation:
    """Check everything and tokenise; nothing is queued yet."""
    context.check_model(body.model)
    if body.dimensions is not None:
        raise UnsupportedError(
            "dimensions is not served: this model was not trained for shorter vectors", param="dimensions"
        )
    if body.input is None:
        raise InvalidRequestError("input is missing", param="input")
    prompts = await encode_prompts(context, split_prompts(body.input, "input"), param="input")
    job_id = f"embd-{uuid4().hex}"
    pooling = Pooling(body.pooling or "mean")
    requests = [
        make_request(
            context,
            caller,
            f"{job_id}-{position}",
            prompt.token_ids,
            SamplingParams(max_tokens=0),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            pooling=pooling,
        )
        for position, prompt in enumerate(prompts)
    ]
    return Generation(context, job_id, requests, {"prompt": "input"})


def unit(vector: Float32Array) -> Float32Array:
    """The vector at length 1, little-endian. Raises StepFailedError where it is not finite."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length):
        raise StepFailedError("the model's hidden states are not finite: damaged weights?")
    return (vector / (length or 1.0)).astype("<f4")
