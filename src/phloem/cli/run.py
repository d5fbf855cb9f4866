"""`phloem run`: a chat in the terminal, with the figures of each turn.

Owns the history and the terminal. Must not know HTTP, nor how an engine works: any `Engine` will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phloem.cli.report import ProgressLine, engine_facts, say
from phloem.cli.serve_args import RunArgs, parse_run
from phloem.errors import InvalidRequestError, PhloemError
from phloem.server.engine_api import Engine
from phloem.types import FinishReason, Request, SamplingParams

HELP = """\
  /reset         forget the conversation (its K/V stays cached)
  /system TEXT   start anew with this system message; without TEXT, with none
  /help          this list
  /exit          leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C stops an answer."""

LEAVE = ("/exit", "/quit", "/bye")


@dataclass(slots=True)
class TurnStats:
    """Figures of one turn. Times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    end: str = ""

    def __str__(self) -> str:
        speed = f", {(self.output_tokens - 1) / self.decode_s:.1f} tok/s" if self.decode_s > 0.0 else ""
        end = f", {self.end}" if self.end else ""
        return (
            f"[{self.prompt_tokens} prompt tokens, {self.cached_tokens} cached, "
            f"first token {self.ttft_s:.2f} s, {self.output_tokens} tokens{speed}{end}]"
        )


@dataclass(slots=True)
class Chat:
    """One conversation with an engine."""

    engine: Engine
    params: SamplingParams
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def answer(self, text: str, stats: TurnStats) -> None:
        """Print the answer to `text` as it comes and keep both in the history; a cancelled answer is kept as it is.

        An answer that fails leaves the history as it was. `stats` is filled as the answer grows.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._request(messages)
        stats.prompt_tokens = len(request.prompt)
        pieces: list[str] = []
        try:
            await self._stream(request, pieces, stats)
        except PhloemError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def _request(self, messages: list[dict[str, Any]]) -> Request:
        self.turns += 1
        tokenizer = self.engine.tokenizer
        text = tokenizer.render_chat(messages, tools=None, add_generation_prompt=True)
        return Request(
            request_id=f"chat-{self.turns}",
            prompt=np.array(tokenizer.encode(text, add_special=False), dtype=np.int32),
            params=self.params,
            eos_token_ids=tokenizer.eos_ids,
        )

    async def _stream(self, request: Request, pieces: list[str], stats: TurnStats) -> None:
        started_s = time.perf_counter()
        first_s = 0.0
        async with contextlib.aclosing(await self.engine.submit(request)) as stream:
            async for delta in stream:
                if delta.error is not None:
                    raise delta.error
                stats.cached_tokens = delta.cached_tokens
                stats.output_tokens = delta.num_output_tokens
                now_s = time.perf_counter()
                if delta.token_ids and not first_s:
                    first_s, stats.ttft_s = now_s, now_s - started_s
                if first_s:
                    stats.decode_s = now_s - first_s
                if delta.finish_reason is FinishReason.LENGTH:
                    stats.end = "length limit"
                if delta.text:
                    pieces.append(delta.text)
                    print(delta.text, end="", flush=True)


def run(argv: Sequence[str]) -> int:
    """Chat until the user leaves. Raises StartupError before the first prompt when the model cannot be loaded."""
    from phloem.engine.async_engine import AsyncEngine

    args = parse_run(argv)
    for warning in args.warnings:
        say(f"warning: {warning}")
    progress = ProgressLine()
    try:
        engine = AsyncEngine.load(args.engine, progress)
    finally:
        progress.close()
    try:
        for line in engine_facts(engine.describe()):
            say(line)
        return talk(engine, args)
    finally:
        engine.close()


def talk(engine: Engine, args: RunArgs) -> int:
    """The loop of question and answer. Returns the exit code: 1 when a piped question failed."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        print("Ask something; /help lists the commands.")
    chat = Chat(engine, args.params, args.system)
    chat.reset()
    failed = 0
    # Ctrl-C stops an answer inside _turn; anywhere else it leaves.
    with contextlib.suppress(EOFError, KeyboardInterrupt), asyncio.Runner() as runner:
        while (text := input(">>> " if interactive else "").strip()) not in LEAVE:
            if text.startswith("/"):
                _command(chat, text)
            elif text:
                failed += not _turn(runner, chat, text)
    if interactive:
        print()
    return 1 if failed and not interactive else 0


def _turn(runner: asyncio.Runner, chat: Chat, text: str) -> bool:
    """One question and its answer; False when it failed. Ctrl-C ends the answer and keeps what was said."""
    stats = TurnStats()
    try:
        runner.run(chat.answer(text, stats))
    except KeyboardInterrupt:
        stats.end = "stopped"
    except InvalidRequestError as error:
        say(f"{error.message}; or start anew with /reset")
        return False
    except PhloemError as error:
        say(f"error: {error.message}")
        return False
    print(flush=True)
    print(_dim(str(stats)), file=sys.stderr, flush=True)
    return True


def _command(chat: Chat, text: str) -> None:
    name, _, rest = text.partition(" ")
    if name in ("/reset", "/clear"):
        chat.reset()
    elif name == "/system":
        chat.system = rest.strip()
        chat.reset()
    elif name == "/help":
        print(HELP)
    else:
        print(f"unknown command {name}\n{HELP}")


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else text
