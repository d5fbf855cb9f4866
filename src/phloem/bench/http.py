"""A lean HTTP/1.1 client for streamed answers: bytes in, server-sent events out, at a few microseconds an event.

Owns sockets and framing (chunked, sized, until close; keep-alive). Must not know what the events mean. General clients
cost several times more per event, and a load generator that shares the machine with the server must not be the limit.
"""

from __future__ import annotations

import asyncio
import selectors
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

READ_BYTES = 1 << 16
TICK_S = 0.001
"""Events of this long are read in one go: time stamps are at most this late, and the client wakes far less often."""

OnEvent = Callable[[bytes, float], None]
"""Takes the data of one server-sent event and the `time.perf_counter()` at which it was read."""


class ProtocolError(Exception):
    """The server closed the connection early or sent something that is not HTTP/1.1."""


@dataclass(slots=True)
class Response:
    """Status and, unless the body was a stream of events, the body."""

    status: int
    body: bytes


class _BodyReader:
    """Decodes the body of one response as it comes; `feed` returns True when it is complete."""

    def __init__(self, head: bytes) -> None:
        fields = dict(_header(line) for line in head.split(b"\r\n")[1:] if b":" in line)
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"").lower()
        length = fields.get(b"content-length")
        self._left = int(length) if length is not None else -1
        self.until_close = not self._chunked and self._left < 0
        self.is_stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self.closes = self.until_close or fields.get(b"connection", b"").lower() == b"close"
        self._buffer = b""

    def feed(self, data: bytes, sink: Callable[[bytes], None]) -> bool:
        if not self._chunked:
            if self._left >= 0:
                data = data[: self._left]
                self._left -= len(data)
            if data:
                sink(data)
            return self._left == 0
        buffer = self._buffer + data if self._buffer else data
        start = 0
        while True:
            end = buffer.find(b"\r\n", start)
            if end < 0:
                break
            try:
                size = int(buffer[start:end].split(b";", 1)[0], 16)
            except ValueError:
                raise ProtocolError(f"bad chunk size {buffer[start:end][:40]!r}") from None
            if len(buffer) < end + 4 + size:
                break
            if size == 0:
                return True
            sink(buffer[end + 2 : end + 2 + size])
            start = end + 4 + size
        self._buffer = buffer[start:]
        return False


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


class _Connection(asyncio.BufferedProtocol):
    """One socket; one request at a time. Reads into a buffer that is kept: a fresh one per read costs far more."""

    def __init__(self) -> None:
        self._buffer = bytearray(READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None
        self._on_event: OnEvent | None = None
        self._head = b""
        self._status = 0
        self._reader: _BodyReader | None = None
        self._body: list[bytes] = []
        self._events = b""
        self._now = 0.0
        self.usable = True
        self.heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes, on_event: OnEvent) -> asyncio.Future[Response]:
        """Write a request; the future ends with its response, events go to `on_event` as they come."""
        assert self._transport is not None
        assert self._done is None, "a request is under way"
        self._done = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._head, self._reader, self._body, self._events = b"", None, [], b""
        self.heard = False
        self._transport.write(request)
        return self._done

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._now = time.perf_counter()
        self.heard = True
        try:
            self._take(bytes(memoryview(self._buffer)[:nbytes]))
        except (ProtocolError, ValueError) as error:
            self._fail(ProtocolError(str(error)))

    def _take(self, data: bytes) -> None:
        if self._done is None:
            self.close()
            return
        if self._reader is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            words = head.split(b" ", 2)
            if not words[0].startswith(b"HTTP/1.") or len(words) < 2:
                raise ProtocolError(f"not an HTTP/1.1 response: {head[:60]!r}")
            self._status = int(words[1][:3])
            self._reader = _BodyReader(head)
        sink = self._take_events if self._reader.is_stream and self._status == 200 else self._body.append
        if self._reader.feed(data, sink):
            self._finish()

    def _take_events(self, data: bytes) -> None:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = (self._events + data if self._events else data).split(b"\n\n")
        self._events = events.pop()
        assert self._on_event is not None
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(event[5:].strip(), self._now)
                continue
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._on_event(b"\n".join(lines), self._now)

    def _finish(self) -> None:
        assert self._reader is not None
        done, self._done = self._done, None
        if self._reader.closes:
            self.close()
        if done is not None and not done.done():
            done.set_result(Response(self._status, b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        self.close()
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is not None and self._reader is not None and self._reader.until_close and exc is None:
            self._finish()
        elif self._done is not None:
            self._fail(ProtocolError(f"the server closed the connection before the answer was complete ({exc})"))

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()


class HttpClient:
    """Requests to one server over as many kept-alive connections as are needed at once."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL such as http://127.0.0.1:30000, got {url!r}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        base = parts.path.rstrip("/")
        self._base = base.removesuffix("/v1")
        headers = [f"Host: {parts.netloc}", "Accept: text/event-stream, application/json"]
        if api_key:
            headers.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(headers)
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"", on_event: OnEvent | None = None) -> Response:
        """One exchange. Raises ProtocolError or OSError; a kept-alive connection that proves dead is replaced once."""
        lines = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}\r\n"
        if method != "GET":
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = lines.encode() + b"\r\n" + body
        while True:
            connection = self._take_idle()
            reused = connection is not None
            if connection is None:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
            try:
                response = await connection.send(request, on_event or _ignore)
            except ProtocolError:
                if reused and not connection.heard:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.usable:
                self._idle.append(connection)
            return response

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None


def _ignore(_data: bytes, _now: float) -> None:
    """Drops events that nobody asked for."""


class _TickSelector(selectors.DefaultSelector):
    """Lets events gather for a tick before it looks, so that many streams cost one wake-up."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > TICK_S:
            time.sleep(TICK_S)
        return super().select(timeout)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on an event loop that reads in ticks of TICK_S."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_TickSelector())) as runner:
        return runner.run(main)
