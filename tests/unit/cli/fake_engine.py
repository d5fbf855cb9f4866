"""An engine for tests of the terminal: answers from a script, counts as a cache would, runs no model.

As a program it holds the chat of `phloem run` over itself, one word each 20 ms.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from phloem.cli.run import talk
from phloem.cli.serve_args import RunArgs
from phloem.config import EngineConfig
from phloem.errors import InvalidRequestError
from phloem.server.engine_api import Engine
from phloem.types import FinishReason, Request, SamplingParams, TextDelta


class FakeTokenizer:
    """One token a character."""

    eos_ids = frozenset({0})

    def render_chat(self, messages: list[dict[str, Any]], tools: object, add_generation_prompt: bool) -> str:
        assert tools is None
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        assert not add_special, "a chat template writes its own special tokens"
        return [ord(c) for c in text]


class FakeEngine:
    """Answers each request with the words of `answer`; a prompt that contains "too long" is refused."""

    def __init__(self, answer: str = "Paris is it.", delay_s: float = 0.0) -> None:
        self.tokenizer = FakeTokenizer()
        self.answer = answer
        self.delay_s = delay_s
        self.prompts: list[str] = []
        self.aborted: list[str] = []

    def describe(self) -> Mapping[str, object]:
        return {"model": "fake"}

    async def submit(self, request: Request) -> AsyncGenerator[TextDelta, None]:
        prompt = "".join(map(chr, request.prompt))
        if "too long" in prompt:
            raise InvalidRequestError("the prompt is too long")
        known = self.prompts[-1] if self.prompts else ""
        self.prompts.append(prompt)
        cached = len(known) if prompt.startswith(known) else 0
        return self._stream(request, cached)

    async def _stream(self, request: Request, cached: int) -> AsyncGenerator[TextDelta, None]:
        words = self.answer.split(" ")
        finished = False
        try:
            for index, word in enumerate(words):
                await asyncio.sleep(self.delay_s)
                last = index == len(words) - 1
                finished = last
                yield TextDelta(
                    request_id=request.request_id,
                    index=0,
                    text=word if index == 0 else " " + word,
                    token_ids=[index],
                    finish_reason=FinishReason.STOP if last else None,
                    num_prompt_tokens=len(request.prompt),
                    cached_tokens=cached,
                    num_output_tokens=index + 1,
                )
        finally:
            if not finished:
                self.aborted.append(request.request_id)


def as_engine(fake: FakeEngine) -> Engine:
    """The fake under the type that the chat asks for; it has just the methods that the chat calls."""
    return fake  # type: ignore[return-value]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background hands down "ignored"
    engine = FakeEngine(" ".join(f"word{n}" for n in range(500)), delay_s=0.02)
    sys.exit(talk(as_engine(engine), RunArgs(EngineConfig(model="fake"), SamplingParams())))
