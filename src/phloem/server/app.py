"""The HTTP application: which path leads to which function.

Owns the table of routes. The functions live in the modules that it imports.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import phloem
from phloem.config import ServerConfig
from phloem.errors import PhloemError
from phloem.server import admin, anthropic, chat, completions, embeddings, native, responses
from phloem.server.context import ServerContext
from phloem.server.engine_api import Engine
from phloem.server.http_errors import on_http_exception, on_phloem_error
from phloem.server.middleware import Guard
from phloem.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Handler = Callable[[HttpRequest], Awaitable[Response]]


def create_app(
    engine: Engine | None, config: ServerConfig | None = None, *, share_cache_across_keys: bool = False
) -> FastAPI:
    """The application around an engine; with None it answers 503 until `app.state.context.attach` gets one."""
    context = ServerContext(config or ServerConfig(), share_cache_across_keys=share_cache_across_keys)
    if engine is not None:
        context.attach(engine)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        context.close()

    app = FastAPI(
        title="Phloem",
        version=phloem.__version__,
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers={PhloemError: on_phloem_error, HTTPException: on_http_exception},
    )
    app.state.context = context
    app.add_middleware(Guard, context=context)
    _add_routes(app)
    return app


def _add_routes(app: FastAPI) -> None:
    """Every route of the server."""
    _post(app, "/v1/chat/completions", chat.chat_completions, ChatBody)
    _post(app, "/v1/completions", completions.completions, CompletionBody)
    _post(app, "/v1/messages", anthropic.messages, anthropic.MessagesBody)
    _post(app, "/v1/messages/count_tokens", anthropic.count_tokens, anthropic.MessagesBody)
    _post(app, "/v1/responses", responses.create, responses.ResponsesBody)
    _get(app, "/v1/responses/{response_id}", responses.retrieve)
    _route(app, "DELETE", "/v1/responses/{response_id}", responses.delete, {})
    _post(app, "/generate", native.generate, native.GenerateBody)
    _post(app, "/v1/embeddings", embeddings.embeddings, embeddings.EmbeddingsBody)
    for path in ("/abort", "/abort_request"):
        _post(app, path, native.abort, native.AbortBody)
    _get(app, "/health_generate", native.health_generate)
    _get(app, "/metrics", admin.metrics)
    _post(app, "/tokenize", admin.tokenize, TokenizeBody)
    _post(app, "/detokenize", admin.detokenize, DetokenizeBody)
    _post(app, "/flush_cache", admin.flush_cache)
    _get(app, "/flush_cache", admin.flush_cache)
    _get(app, "/v1/models", admin.models)
    _get(app, "/v1/models/{model_id:path}", admin.model)
    _get(app, "/health", admin.health)
    _get(app, "/version", admin.version)
    _get(app, "/server_info", admin.server_info)
    _get(app, "/get_server_info", admin.server_info)


def _get(app: FastAPI, path: str, handler: Handler) -> None:
    _route(app, "GET", path, handler, {})


def _post(app: FastAPI, path: str, handler: Handler, body: type[BaseModel] | None = None) -> None:
    """Handlers read their bodies themselves (bounded, and with our errors); the schema is for the documentation."""
    extra: dict[str, Any] = {}
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}}
    _route(app, "POST", path, handler, extra)


def _route(app: FastAPI, method: str, path: str, handler: Handler, extra: dict[str, Any]) -> None:
    names = re.findall(r"\{(\w+)", path)
    if names:
        schema = {"type": "string"}
        extra["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    summary = (handler.__doc__ or "").partition("\n")[0]
    app.add_api_route(
        path,
        handler,
        methods=[method],
        summary=summary,
        operation_id=f"{method.lower()}{path.replace('/', '_').replace('{', '').replace(':path}', '')}",
        response_class=Response,
        openapi_extra=extra,
    )


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: each model that it names put in its place. Our models do not refer to themselves."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rpartition("/")[2]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved
