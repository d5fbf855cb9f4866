"""Routes beside generation: models, health, version, cache, facts about the server, tokenising.

Owns their JSON. Must not generate.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import phloem
from phloem.errors import InvalidRequestError
from phloem.server.body import read_model
from phloem.server.context import ServerContext, context_of
from phloem.server.http_errors import json_response
from phloem.server.messages import Conversation, check_template_kwargs, normalise, render, tools_as_json
from phloem.server.prompts import check_length
from phloem.server.protocol import DetokenizeBody, TokenizeBody

_SECRET_FIELDS = frozenset({"api_keys", "admin_api_key"})


async def models(request: HttpRequest) -> Response:
    """GET /v1/models."""
    context = context_of(request)
    return json_response({"object": "list", "data": [_model(context, name) for name in context.model_names]})


async def model(request: HttpRequest) -> Response:
    """GET /v1/models/{id}. The id is compared with the served names, and nothing else is done with it."""
    context = context_of(request)
    name = request.path_params["model_id"]
    context.check_model(name)
    return json_response(_model(context, name))


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "phloem",
        "root": context.model_names[0],
        "parent": None,
        "max_model_len": context.engine.max_model_len,
    }


async def health(request: HttpRequest) -> Response:
    """GET /health: 200 while the server serves, busy or not; 503 while it loads, drains or has failed."""
    state = context_of(request).state()
    return json_response({"status": state}, 200 if state == "ready" else 503)


async def version(_request: HttpRequest) -> Response:
    """GET /version."""
    return json_response({"version": phloem.__version__})


async def flush_cache(request: HttpRequest) -> Response:
    """POST /flush_cache: drop all cached K/V that no running request uses."""
    freed = await context_of(request).engine.flush_cache()
    return json_response({"success": True, **freed})


async def server_info(request: HttpRequest) -> Response:
    """GET /server_info: facts and counters for operators. No keys, no paths of the machine's files."""
    context = context_of(request)
    config = {name: value for name, value in asdict(context.config).items() if name not in _SECRET_FIELDS}
    return json_response(
        {
            "version": phloem.__version__,
            "state": context.state(),
            "uptime_s": round(time.time() - context.started_s, 3),
            "model": context.model_names,
            "engine": dict(context.engine.describe()),
            "stats": dict(context.engine.stats()),
            "server": config,
        }
    )


async def metrics(request: HttpRequest) -> Response:
    """GET /metrics, in the Prometheus text format."""
    return Response(context_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenize(request: HttpRequest) -> Response:
    """POST /tokenize: ids of a text or of a rendered conversation."""
    context = context_of(request)
    body = await read_model(request, TokenizeBody, context.config.max_body_bytes)
    context.check_model(body.model)
    engine = context.engine
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = body.messages

        def encode() -> list[int]:
            conversation = Conversation(
                messages=normalise(messages),
                tools=tools_as_json(body.tools),
                add_generation_prompt=body.add_generation_prompt is not False,
                template_kwargs=check_template_kwargs(body.chat_template_kwargs, body.chat_template),
            )
            text = render(engine, conversation)
            check_length(engine, text)
            return engine.tokenizer.encode(text, bool(body.add_special_tokens))
    else:
        prompt = body.prompt or ""
        check_length(engine, prompt)

        def encode() -> list[int]:
            return engine.tokenizer.encode(prompt, body.add_special_tokens is not False)

    ids = await context.in_pool(encode)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": engine.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = [engine.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
    return json_response(answer)


async def detokenize(request: HttpRequest) -> Response:
    """POST /detokenize: text of ids."""
    context = context_of(request)
    body = await read_model(request, DetokenizeBody, context.config.max_body_bytes)
    context.check_model(body.model)
    ids, size = body.tokens, context.engine.tokenizer.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise InvalidRequestError(f"tokens must lie inside the vocabulary (0 to {size - 1})", param="tokens")
    text = await context.in_pool(lambda: context.engine.tokenizer.decode(ids, bool(body.skip_special_tokens)))
    return json_response({"prompt": text, "text": text})
