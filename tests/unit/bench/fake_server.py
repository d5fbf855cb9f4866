"""A tiny OpenAI-compatible server for tests: streams words at a fixed pace. Runs as a program too."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


class FakeServer:
    """`reply` maps a request body to (status, words to stream, usage). Keeps the bodies it saw."""

    def __init__(self, *, gap_s: float = 0.0, framing: str = "chunked", fail_every: int = 0) -> None:
        self.gap_s = gap_s
        self.framing = framing
        self.fail_every = fail_every
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0
        self.num_open = 0
        self.peak_open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    (int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                keep = await self.answer(head.split()[1], body, writer)
                await writer.drain()
                if not keep:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if path == "/health":
            return self.send_json(writer, 200, {})
        if path == "/v1/models":
            return self.send_json(writer, 200, {"data": [{"id": "fake"}]})
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return self.send_json(writer, 404, {"error": {"message": "no such route"}})
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return self.send_json(writer, 429, {"error": {"message": "queue full"}})
        self.num_open += 1
        self.peak_open = max(self.peak_open, self.num_open)
        try:
            return await self.stream(body, writer)
        finally:
            self.num_open -= 1

    def send_json(self, writer: asyncio.StreamWriter, status: int, value: object) -> bool:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True

    async def stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        chunked = self.framing == "chunked"
        framing = b"Transfer-Encoding: chunked\r\n" if chunked else b"Connection: close\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n" + framing + b"\r\n")

        def send(value: object) -> None:
            text = value if isinstance(value, str) else json.dumps(value)
            data = f"data: {text}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)

        send(ROLE)
        loop = asyncio.get_running_loop()
        start = loop.time()
        for i in range(body["max_tokens"]):
            if self.gap_s:
                await asyncio.sleep(max(0.0, start + (i + 1) * self.gap_s - loop.time()))
            send({"choices": [{"index": 0, "delta": {"content": f" w{i}"}, "finish_reason": None}]})
            await writer.drain()
        send({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        prompt = sum(len(m["content"].split()) for m in body.get("messages", ()))
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }
        send({"choices": [], "usage": usage})
        send("[DONE]")
        if chunked:
            writer.write(b"0\r\n\r\n")
        return chunked


@asynccontextmanager
async def serving(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serve `handle` on a free port of this loop; yields the URL and ends all connections on leaving."""
    handlers: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        writers.append(writer)
        await handle(reader, writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        for writer in writers:
            writer.close()
        await asyncio.gather(*[writer.wait_closed() for writer in writers], return_exceptions=True)


@asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[str]:
    """Serve a FakeServer; yields the URL."""
    async with serving(server.handle) as url:
        yield url


async def main() -> None:
    """`fake_server.py GAP_S`: serve for ever, printing the port first."""
    server = FakeServer(gap_s=float(sys.argv[1]))
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
