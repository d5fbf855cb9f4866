"""A thin OpenAI-compatible server around OpenVINO GenAI, so that the load client can measure it like any other.

Runs as a program in the environment of that library (`python -P openvino_shim.py MODEL PORT`), of which it imports
nothing but that library. Owns the bridge from HTTP to its continuous batching pipeline, with prefix caching on. Answers
chat requests, streamed, with the fields that the load client sends; must not be taken for a server to use.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import queue
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

KV_CACHE_GIB = 4


@dataclass
class Job:
    """One request: what to generate, and where its news go: (text, finished) for each step."""

    messages: list[dict[str, Any]]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    fixed: bool = False
    news: asyncio.Queue[tuple[str, bool]] = field(default_factory=asyncio.Queue)
    prompt_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    shown: int = 0

    def tell(self, text: str, finished: bool) -> None:
        self.loop.call_soon_threadsafe(self.news.put_nowait, (text, finished))


class Engine(threading.Thread):
    """The one thread that touches the pipeline."""

    def __init__(self, model: str, properties: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._library: Any = importlib.import_module("openvino_genai")
        scheduler = self._library.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 512
        self._pipeline = self._library.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running: list[tuple[Any, Job]] = []
        self._num_requests = 0

    def submit(self, job: Job) -> None:
        """Queue a job; from any thread."""
        self._waiting.put(job)

    def run(self) -> None:
        while True:
            while not self._running or not self._waiting.empty():
                self._add(self._waiting.get())
            self._pipeline.step()
            self._running = [(handle, job) for handle, job in self._running if not self._read(handle, job)]

    def _add(self, job: Job) -> None:
        prompt = self._tokenizer.apply_chat_template(job.messages, add_generation_prompt=True)
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).input_ids
        job.prompt_tokens = ids.shape[1]
        config = self._library.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.min_new_tokens = job.max_tokens if job.fixed else 0
        config.do_sample = False
        config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        self._running.append((self._pipeline.add_request(self._num_requests, ids, config), job))
        self._num_requests += 1

    def _read(self, handle: Any, job: Job) -> bool:
        """Pass on what a request has generated; True at its end."""
        finished = str(handle.get_status()).rpartition(".")[2] != "RUNNING"
        while handle.can_read():
            for output in handle.read().values():
                job.ids += output.generated_ids
        text = self._tokenizer.decode(job.ids)
        if not finished and text.endswith("�"):
            text = text[: job.shown]
        news, job.shown = text[job.shown :], len(text)
        if news or finished:
            job.tell(news, finished)
        return finished


async def handle(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection until it ends."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
            path = head.split(" ")[1]
            if path == "/v1/chat/completions":
                await stream(engine, json.loads(body), writer)
            elif path == "/v1/models":
                send(writer, 200, {"data": [{"id": "openvino"}]})
            else:
                send(writer, 200 if path == "/health" else 404, {})
            await writer.drain()
    writer.close()


def send(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    """A whole JSON answer."""
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def stream(engine: Engine, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer a chat request with events."""
    fixed = body.get("min_tokens") == body["max_tokens"]
    job = Job(body["messages"], body["max_tokens"], asyncio.get_running_loop(), fixed)
    engine.submit(job)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def event(data: str) -> None:
        raw = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(raw), raw))

    finished = False
    while not finished:
        text, finished = await job.news.get()
        reason = "length" if finished else None
        event(json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}))
        await writer.drain()
    usage = {"prompt_tokens": job.prompt_tokens, "completion_tokens": len(job.ids)}
    event(json.dumps({"choices": [], "usage": usage}))
    event("[DONE]")
    writer.write(b"0\r\n\r\n")


async def serve(model: str, port: int, properties: dict[str, Any]) -> None:
    """Load the model, then listen on loopback for ever."""
    engine = Engine(model, properties)
    engine.start()
    listener = await asyncio.start_server(lambda r, w: handle(engine, r, w), "127.0.0.1", port)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}))
