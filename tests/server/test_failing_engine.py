"""What clients see when the engine itself dies: ends of streams, health, and refusals; nothing hangs."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from phloem.engine.async_engine import AsyncEngine
from phloem.runner.null_runner import NullRunner
from phloem.types import StepPlan, StepResult
from tests.helpers.fake_model import fake_parts
from tests.server.conftest import serving
from tests.server.fake_engine import VOCAB, FakeTokenizer


class DyingRunner(NullRunner):
    """Slow steps, until `dies` is set: then a result that no scheduler can go on from."""

    def __init__(self) -> None:
        super().__init__(num_slots=4096, vocab_size=VOCAB)
        self.dies = threading.Event()

    def step(self, plan: StepPlan) -> StepResult:
        time.sleep(0.01)
        result = super().step(plan)
        result.step_id += self.dies.is_set()
        return result


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_ends_streams_and_refuses_all() -> None:
    runner = DyingRunner()
    engine = AsyncEngine(replace(fake_parts(runner=runner), tokenizer=cast("Any", FakeTokenizer())))
    body = {"prompt": "hi", "stream": True, "max_tokens": 900, "ignore_eos": True}
    ends: list[str] = []

    def read(lines: Any) -> None:
        ends.append("\n".join(lines))

    with serving(cast("Any", engine)) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        with (
            client.stream("POST", "/v1/completions", json=body) as first,
            client.stream("POST", "/v1/completions", json=body) as second,
        ):
            readers = []
            for response in (first, second):
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                readers.append(threading.Thread(target=read, args=(lines,)))
                readers[-1].start()
            assert server.http.get("/health").status_code == 200
            runner.dies.set()
            for reader in readers:
                reader.join(5.0)
                assert not reader.is_alive()
        for text in ends:
            *_, last, done = [line for line in text.splitlines() if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
            assert done == "data: [DONE]"
        assert server.http.get("/health").status_code == 503
        for path, fields in (
            ("/v1/completions", body),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
            ("/generate", {"text": "hi"}),
        ):
            response = server.post(path, fields, timeout=5.0)
            assert response.status_code == 503, response.text
            assert response.headers["retry-after"]
        assert server.http.get("/health_generate", timeout=5.0).status_code == 503
    engine.close()
