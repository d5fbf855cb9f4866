"""Errors as HTTP answers in the shape of the OpenAI API.

Owns the mapping from exceptions to status, body and headers. No traceback, path or prompt gets into a body.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails, to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from phloem.errors import AuthenticationError, EngineUnavailableError, InvalidRequestError, PhloemError, QueueFullError

logger = logging.getLogger(__name__)

_UNAVAILABLE_RETRY_S = 5
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_body(error: PhloemError) -> dict[str, Any]:
    """The `error` object that OpenAI clients read."""
    return {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}


def error_headers(error: PhloemError) -> dict[str, str]:
    """Headers that belong to an error: when to try again, how to authenticate."""
    if isinstance(error, QueueFullError):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, EngineUnavailableError):
        return {"Retry-After": str(_UNAVAILABLE_RETRY_S)}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def anthropic_error(error: PhloemError) -> dict[str, Any]:
    """An error as clients of the Messages API read it."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: PhloemError, path: str = "") -> Response:
    """A whole answer for an error, in the form of the API that `path` belongs to."""
    body = anthropic_error(error) if path.startswith("/v1/messages") else {"error": error_body(error)}
    return json_response(body, error.http_status, error_headers(error))


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strict JSON: NaN and infinities cannot appear (they would be null)."""
    return Response(to_json(content), status, headers, media_type="application/json")


def internal_error(request_id: str) -> PhloemError:
    """What a client is told about a fault of ours; the log has the rest under the same id."""
    return PhloemError(f"an internal error happened; the server's log has it under request id {request_id}")


def from_validation(error: pydantic.ValidationError) -> InvalidRequestError:
    """The first wrong field of a body, as our error: which field, what was expected, what came.

    Where a field may have several forms, each of them has its complaints; the one about the deepest place is told,
    since that is of the form that was meant.
    """
    errors = error.errors(include_url=False, include_context=False)
    wrong = max((item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]), key=_depth)
    param = _field_path(wrong["loc"])
    expected = wrong["msg"][0].lower() + wrong["msg"][1:]
    kind = "" if wrong["type"] == "missing" else f" (got {_describe(wrong['input'])})"
    return InvalidRequestError(f"{param or 'body'}: {expected}{kind}", param=param or None)


def _field_path(location: Sequence[int | str]) -> str:
    """'messages[0].content' of pydantic's location, without the names of union branches."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if _is_field(part))
    return "".join(parts).removeprefix(".")


def _depth(error: ErrorDetails) -> tuple[int, bool]:
    """How deep the place of an error lies, and whether the form was right there and only its value wrong."""
    return sum(_is_field(part) for part in error["loc"]), not error["type"].endswith("_type")


def _is_field(part: int | str) -> bool:
    """Whether a part of a location is a field or a position, no branch of a union ('str', 'list[int]', 'NamedTool')."""
    if isinstance(part, int):
        return True
    return part.isidentifier() and part[0].islower() and part not in ("str", "int", "float", "bool", "dict", "list")


def _describe(value: object) -> str:
    """A wrong value, short enough for a message."""
    if isinstance(value, bool | int | float | str) or value is None:
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a value of type {type(value).__name__}"


async def on_phloem_error(request: Request, error: Exception) -> Response:
    """Exception handler of our own errors."""
    assert isinstance(error, PhloemError)
    if error.http_status >= 500:
        logger.warning("answering %d: %s", error.http_status, error.message)
    return error_response(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler of the router's own errors (no such route, wrong method)."""
    assert isinstance(error, HTTPException)
    body = {
        "message": f"{error.detail}: {request.method} {request.url.path[:200]}",
        "type": "invalid_request_error",
        "param": None,
        "code": _HTTP_CODES.get(error.status_code, "http_error"),
    }
    return json_response({"error": body}, error.status_code, dict(error.headers or {}))
