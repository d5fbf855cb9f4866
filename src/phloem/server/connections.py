"""TCP connections that cost no more than they should: slow headers, silent readers and crowds are cut off.

Owns the time and number limits below HTTP. Must not know routes.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

ACCEPT_BATCH = 64
"""Connections that the event loop accepts in one go. Those over the limit are closed a turn or two later, so the file
descriptors of a few such batches stay in reserve: running out of them would stall accepting for seconds."""

_RESERVED_FILES = 64 + 3 * ACCEPT_BATCH
_MAX_CONNECTIONS = 16384


@dataclass(slots=True)
class ConnectionLimits:
    """Limits of one server, and its connections that are not answering a request, longest silent first."""

    max_connections: int = _MAX_CONNECTIONS
    header_timeout_s: float = 15.0
    write_timeout_s: float = 60.0
    idle: dict[GuardedProtocol, None] = field(default_factory=dict)


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows, and return how many connections that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_CONNECTIONS + _RESERVED_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(16, min(_MAX_CONNECTIONS, soft - _RESERVED_FILES))


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with limits. One object per connection; `limits` is set on a subclass for each server.

    A connection must complete its request head within `header_timeout_s`. A client that stops reading
    for `write_timeout_s` while data waits is cut off, which ends its request. When there are
    `max_connections`, a new one takes the place of the one that was silent longest; if all are
    busy it is closed.
    """

    limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self.limits
        if len(self.connections) > limits.max_connections:
            victim = next(iter(limits.idle), self)
            victim.cut()
            if victim is self:
                return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.idle.pop(self, None)
        for timer in (self._header_timer, self._write_timer):
            _cancel(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)
        self._write_timer = None

    def cut(self) -> None:
        """Close at once, whatever is still to be sent."""
        self.limits.idle.pop(self, None)
        if self.transport is not None:
            self.transport.abort()

    def _watch(self) -> None:
        """Keep the idle list and the header timer in step with what the connection does."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.limits.idle.pop(self, None)
            _cancel(self._header_timer)
            self._header_timer = None
            return
        self.limits.idle.setdefault(self, None)
        if self._header_timer is None and self.timeout_keep_alive_task is None:
            self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self.cut)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer that may not be there."""
    if timer is not None:
        timer.cancel()
