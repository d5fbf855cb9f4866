"""Reading request bodies: bounded in bytes, time and nesting, and checked against a model.

Owns the way from bytes on the wire to a validated model. Must not know what the fields mean.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from phloem.errors import InvalidRequestError, PayloadTooLargeError, RequestTimeoutError
from phloem.server.http_errors import from_validation

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)

_MAX_CONTAINERS = 500_000
_MAX_VALUES = 2_000_000

BODY_TIMEOUT_S = 120.0
"""Most seconds that a client may take to send its body."""


async def read_model(request: Request, kind: type[M], max_bytes: int) -> M:
    """Read and validate a JSON body.

    Raises PayloadTooLargeError, RequestTimeoutError, or InvalidRequestError naming the field. JSON nests
    at most 200 deep (the parser's own limit). Fields that the model does not know are ignored.
    """
    content = await read_body(request, max_bytes)
    check_structure(content)
    try:
        data = from_json(content or b"{}", allow_inf_nan=True)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body nests too deep") from None
    if not isinstance(data, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {type(data).__name__}")
    unknown = data.keys() - kind.model_fields.keys()
    if unknown and logger.isEnabledFor(logging.DEBUG):
        logger.debug("ignoring unknown fields: %s", ", ".join(sorted(repr(name[:80]) for name in unknown)))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def check_structure(content: bytes) -> None:
    """Refuse bodies whose many small parts would keep the event loop busy for seconds. Counts what texts hold too."""
    if len(content) > _MAX_CONTAINERS:
        containers = content.count(b"[") + content.count(b"{")
        if containers > _MAX_CONTAINERS or content.count(b",") > _MAX_VALUES:
            raise PayloadTooLargeError(
                f"the body may hold at most {_MAX_CONTAINERS} opening brackets and {_MAX_VALUES} commas"
            )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body of at most `max_bytes`; more is refused before it is read where its length is declared."""
    declared = request.headers.get("content-length", "")
    too_large = PayloadTooLargeError(f"the request body may have at most {max_bytes} bytes")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except ClientDisconnect:
        raise RequestTimeoutError("the client went away before its body was complete") from None
    return bytes(content)
