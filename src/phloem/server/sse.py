"""Answers that end when the client does: event streams with keep-alive comments, and plain ones that can be cancelled.

Owns disconnects and pacing. Must not know what the events say. Back-pressure is the transport's: a client that does
not read blocks `send`, and then nothing more is pulled from the events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""Silence after which a comment is sent, so that nothing between server and client gives up."""

DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: str = "") -> bytes:
    """One server-sent event; `data` is JSON and so without line breaks."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends events as they come; when the client goes away the generator is closed at once.

    `closing` is awaited in any case, also when the generator was never started.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        closing: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        head = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(None, 200, head, "text/event-stream; charset=utf-8")
        self._events = events
        self._closing = closing
        self._keep_alive_s = KEEP_ALIVE_S if keep_alive_s is None else keep_alive_s
        self._last_sent_s = 0.0

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        helpers = [asyncio.ensure_future(wait_disconnect(receive)), asyncio.ensure_future(self._keep_alive(send))]
        try:
            await asyncio.wait([pump, *helpers], return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (pump, *helpers):
                task.cancel()
            await asyncio.gather(pump, *helpers, return_exceptions=True)
            await self._events.aclose()
            await self._closing()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._touch()
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._touch()
            # Where events and transport are always ready nothing above waits, and a disconnect would never be seen.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment after each silence. Ends only by cancellation."""
        loop = asyncio.get_running_loop()
        self._touch()
        while True:
            wait_s = self._last_sent_s + self._keep_alive_s - loop.time()
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)
                continue
            await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
            self._touch()

    def _touch(self) -> None:
        self._last_sent_s = asyncio.get_running_loop().time()


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGoneError(Exception):
    """Nobody is left to answer."""


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client goes away (then ClientGoneError). The body must be read before."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(task, watcher, return_exceptions=True)
