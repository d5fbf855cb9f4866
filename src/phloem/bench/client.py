"""Sends jobs to an OpenAI-compatible server and notes what comes back and when.

Owns the mapping between jobs and the wire. Must not know workloads or figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from phloem.bench.http import HttpClient, ProtocolError
from phloem.bench.jobs import Exchange, Job
from phloem.errors import PhloemError


class ServerError(PhloemError):
    """The server under test cannot be reached or used."""


class OpenAIClient:
    """One server and one model of it.

    `fixed_output` asks for exactly `max_tokens` tokens, in each dialect that servers have for it (`min_tokens` and
    `ignore_eos`), so that engines can be compared on equal work.
    """

    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", fixed_output: bool = False, timeout_s: float = 600.0
    ) -> None:
        self._http = HttpClient(url, api_key=api_key)
        self.url = url
        self.model = model
        self._fixed_output = fixed_output
        self._timeout_s = timeout_s

    async def connect(self) -> None:
        """Find the model's name unless it was given. Raises ServerError."""
        if self.model:
            return
        try:
            answer = await self.call("GET", "/v1/models")
        except (OSError, ProtocolError) as error:
            raise ServerError(f"no server at {self.url}: {error}") from None
        models = answer.get("data") if isinstance(answer, dict) else None
        if not models:
            raise ServerError(f"{self.url}/v1/models names no model; is this an OpenAI-compatible server?")
        self.model = str(models[0]["id"])

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """One JSON exchange; None where the status is not 200. Raises OSError or ProtocolError."""
        data = b"" if body is None else json.dumps(body).encode()
        response = await self._http.request(method, path, data)
        return json.loads(response.body or b"null") if response.status == 200 else None

    async def send(self, exchange: Exchange) -> None:
        """Send one job, streamed; fill in its text and record. What goes wrong becomes `record.error`."""
        record, job = exchange.record, exchange.job
        path = "/v1/chat/completions" if job.messages else "/v1/completions"
        events: list[bytes] = []
        times: list[float] = []

        def on_event(data: bytes, now: float) -> None:
            events.append(data)
            times.append(now)

        body = json.dumps(self._body(job)).encode()
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.request("POST", path, body, on_event)
        except TimeoutError:
            record.error = f"no answer within {self._timeout_s:.0f} s"
        except (OSError, ProtocolError) as error:
            record.error = f"{type(error).__name__}: {error}"
        else:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_message(response.body)}"
            else:
                read_events(exchange, events, [at - began for at in times])

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _body(self, job: Job) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "seed": job.seed,
        }
        body.update({"messages": job.messages} if job.messages else {"prompt": job.prompt})
        if self._fixed_output:
            body.update(min_tokens=job.max_tokens, ignore_eos=True)
        body.update(job.extra)
        return body


def read_events(exchange: Exchange, events: list[bytes], times: list[float]) -> None:
    """Fill in text and record from the events of a stream. All are parsed in one call, after the last has come."""
    record = exchange.record
    done = bool(events) and events[-1] == b"[DONE]"
    try:
        chunks: list[dict[str, Any]] = json.loads(b"[" + b",".join(events[: len(events) - done]) + b"]")
    except ValueError:
        record.error = "an event of the stream is not JSON"
        return
    texts: list[str] = []
    for chunk, at in zip(chunks, times, strict=False):
        if chunk.get("error"):
            record.error = f"in the stream: {_message(json.dumps(chunk).encode())}"
            return
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or choice.get("text")
            if text:
                record.chunk_s.append(at)
                texts.append(text)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        _take_usage(exchange, chunk)
    exchange.text = "".join(texts)
    if not done:
        record.error = "the stream ended without [DONE]"
    elif not texts:
        record.error = "the answer has no text"
    record.output_tokens = record.output_tokens or len(texts)


def _take_usage(exchange: Exchange, chunk: dict[str, Any]) -> None:
    record = exchange.record
    usage = chunk.get("usage")
    if usage:
        record.prompt_tokens = usage.get("prompt_tokens", 0)
        record.output_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            record.cached_tokens = details["cached_tokens"]
    timings = chunk.get("timings")
    if timings and record.cached_tokens is None and "cache_n" in timings:
        record.cached_tokens = timings["cache_n"]


def _message(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of whatever came."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
