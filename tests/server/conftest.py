"""Servers for the tests of the HTTP side: in process for speed, on a real socket where sockets matter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from phloem.config import ServerConfig
from phloem.server.app import create_app
from phloem.server.connections import ConnectionLimits
from phloem.server.serve import bind, make_uvicorn, url_of
from tests.server.fake_engine import FakeEngine


class Running:
    """A server on a free port, and clients of it."""

    def __init__(self, url: str, engine: FakeEngine, key: str) -> None:
        self.url = url
        self.engine = engine
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=20.0, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=url + "/v1", api_key=key or "none", max_retries=0, http_client=httpx.Client(trust_env=False)
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def close(self) -> None:
        self.http.close()
        self.openai.close()


@contextmanager
def serving(
    engine: FakeEngine, config: ServerConfig | None = None, *, limits: ConnectionLimits | None = None, **options: Any
) -> Iterator[Running]:
    """Run a server on a thread of this process."""
    config = config or ServerConfig()
    listener = bind("127.0.0.1", 0)
    app = create_app(engine, config, **options)
    server = make_uvicorn(app, limits or ConnectionLimits())
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    running = Running(url_of(listener), engine, config.api_keys[0] if config.api_keys else "")
    try:
        while not server.started:
            thread.join(0.01)
        yield running
    finally:
        running.close()
        server.should_exit = True
        thread.join(20.0)
        assert not thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Start servers that end with the test. After each, nothing may be left running in its engine."""
    from contextlib import ExitStack

    engines: list[FakeEngine] = []
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, config: ServerConfig | None = None, **options: Any) -> Running:
            engine = engine or FakeEngine()
            engines.append(engine)
            return stack.enter_context(serving(engine, config, **options))

        yield start
    assert all(engine.num_live == 0 for engine in engines)
