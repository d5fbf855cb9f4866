"""The end of every route that generates: start, then stream or wait, and close whatever happens.

Owns that order. Must not know what an answer says.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.server.generation import Generation
from phloem.server.http_errors import json_response
from phloem.server.sse import EventStream, run_while_connected


async def respond(
    request: HttpRequest,
    generation: Generation,
    whole: Callable[[], Coroutine[Any, Any, Any]],
    events: AsyncGenerator[bytes, None] | None = None,
) -> Response:
    """`events` as a stream where they are given, else what `whole` returns as JSON.

    What `generation.start` raises comes from here, before anything was answered.
    """
    await generation.start()
    if events is not None:
        return EventStream(events, closing=generation.close)
    try:
        return json_response(await run_while_connected(request, whole()))
    finally:
        await generation.close()
