"""What one request must not do to the others: freeze the loop, go silent, or be judged by how busy the server is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.types import Message

from phloem.server.sse import EventStream
from tests.server.conftest import Running, serving
from tests.server.fake_engine import FakeEngine, FakeTokenizer

Serve = Callable[..., Running]


class SlowTokenizer(FakeTokenizer):
    """Takes as long as a large prompt does, without the interpreter lock, as the real one."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        if len(text) > 1000:
            time.sleep(1.0)
        return super().encode(text[:1000], add_special)


def test_health_answers_at_once_under_load(serve: Serve) -> None:
    server = serve(FakeEngine.saying("x" * 200, delay_s=0.02))
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(server.chat, "y" * 500) for _ in range(20)]
        while server.engine.num_live < 20:
            time.sleep(0.01)
        with httpx.Client(base_url=server.url, timeout=1.0, trust_env=False) as client:
            for _ in range(10):
                assert client.get("/health").status_code == 200
        assert all(answer.result().status_code == 200 for answer in answers)


def test_large_prompts_do_not_hold_up_running_streams(serve: Serve) -> None:
    engine = FakeEngine.saying("x" * 150, delay_s=0.02, tokenizer=SlowTokenizer(), max_model_len=100_000)
    server = serve(engine)
    gaps: list[float] = []
    body = {"prompt": "hi", "stream": True, "max_tokens": 150}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        large = [
            threading.Thread(
                target=server.post, args=("/v1/completions", {"prompt": "y" * 10_000_000, "max_tokens": 1})
            )
            for _ in range(2)
        ]
        for thread in large:
            thread.start()
        last = time.monotonic()
        for line in lines:
            if line:
                now = time.monotonic()
                gaps.append(now - last)
                last = now
    for thread in large:
        thread.join()
    assert max(gaps) < 0.7, max(gaps)


def many(before: str, part: str, after: str, count: int) -> bytes:
    """A body with a list of that many parts."""
    return f"{{{before}[{part * count}{part.rstrip(',')}]{after}}}".encode()


USER = '"messages":[{"role":"user","content":"x"}],'


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", many('"prompt":', "1,", "", 1_900_000), 400, "prompt"),
        ("/v1/completions", many('"prompt":', "1,", "", 2_100_000), 413, None),
        ("/v1/completions", many('"prompt":', "[],", "", 480_000), 400, "prompt"),
        ("/v1/completions", many('"prompt":', "[],", "", 600_000), 413, None),
        ("/v1/chat/completions", many('"messages":', "1,", "", 1_900_000), 400, "messages[0]"),
        ("/v1/chat/completions", many('"messages":[{"role":"user","content":', '"",', "}]", 900_000), 400, "messages"),
        ("/v1/chat/completions", many(USER + '"tools":', "1,", "", 1_900_000), 400, "tools"),
        ("/v1/chat/completions", many(USER + '"guided_choice":', '"a",', "", 1_900_000), 400, "guided_choice"),
        ("/v1/chat/completions", many(USER + '"guided_json":{"enum":', "1,", "}", 1_900_000), 400, "guided_json"),
        ("/v1/responses", many('"input":', "1,", "", 1_900_000), 400, "input[0]"),
        ("/detokenize", many('"tokens":', '"a",', "", 1_900_000), 400, "tokens[0]"),
        ("/generate", many('"text":"a","sampling_params":', "1,", "", 1_900_000), 400, "sampling_params"),
    ],
)
def test_bodies_of_many_small_parts_are_refused_soon(
    serve: Serve, path: str, body: bytes, status: int, param: str | None
) -> None:
    """Each wrong item of a list would be an error of its own: half a minute and 2 GB for a body of 4 MB."""
    server = serve(FakeEngine())
    began = time.monotonic()
    response = server.http.post(path, content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    assert time.monotonic() - began < 8.0


@pytest.mark.parametrize("field", ["logit_bias", "chat_template_kwargs"])
def test_maps_of_many_entries_are_refused_soon(serve: Serve, field: str) -> None:
    entries = ",".join(f'"k{number}":"x"' for number in range(500_000))
    began = time.monotonic()
    response = serve().http.post("/v1/chat/completions", content=f'{{{USER}"{field}":{{{entries}}}}}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert time.monotonic() - began < 8.0


async def run_stream(events: AsyncGenerator[bytes, None], receive: Any, **options: Any) -> tuple[list[Message], bool]:
    """Messages that a stream sends, and whether its generation was closed."""
    sent: list[Message] = []
    closed = False

    async def send(message: Message) -> None:
        sent.append(message)

    async def closing() -> None:
        nonlocal closed
        closed = True

    await EventStream(events, closing=closing, **options)({"type": "http"}, receive, send)
    return sent, closed


async def stay() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_silence_is_filled_with_comments() -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.35)
        yield b"data: 1\n\n"

    sent, closed = await run_stream(slow(), stay, keep_alive_s=0.1)
    bodies = [message.get("body") for message in sent[1:]]
    assert bodies[:-2].count(b": keep-alive\n\n") in (2, 3, 4)
    assert bodies[-2:] == [b"data: 1\n\n", b""]
    assert closed


async def test_events_that_are_always_ready_do_not_hide_a_disconnect() -> None:
    num_sent = 0

    async def ready() -> AsyncGenerator[bytes, None]:
        nonlocal num_sent
        while num_sent < 10_000:
            num_sent += 1
            yield b"data: 1\n\n"

    async def gone() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    _, closed = await run_stream(ready(), gone)
    assert closed
    assert num_sent < 100


async def test_generation_is_closed_even_if_it_never_began() -> None:
    async def never() -> AsyncGenerator[bytes, None]:
        yield b""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    _, closed = await run_stream(never(), gone)
    assert closed


def test_official_client_ignores_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.server.sse.KEEP_ALIVE_S", 0.05)
    with serving(FakeEngine.saying("abc", delay_s=0.2)) as server:
        raw = server.post("/v1/completions", {"prompt": "x", "stream": True}).text
        assert ": keep-alive" in raw
        parts = server.openai.completions.create(model="fake-model", prompt="x", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "abc"
