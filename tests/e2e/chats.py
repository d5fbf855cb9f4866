"""Sends a file of conversations to a server and judges what it reused: `scripts/chats URL`.

Owns the client side: many chats at a time, streamed, greedy, each turn with the model's own answers before it. The
ideal is a token-level cache of unlimited size that lets requests share work which is still under way; it is computed
from token ids, and a server that reaches it computes not one prompt token more. Knows a server by its routes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CHATS = Path(__file__).resolve().parents[1] / "data" / "chats.jsonl"
TIMEOUT_S = 600.0


@dataclass
class Turn:
    """One request as the client saw it; times are of one monotonic clock."""

    chat: str
    number: int
    prompt: list[int]
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    text: str = ""
    answer: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def cached(self) -> int:
        return int(self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))

    @property
    def computed(self) -> int:
        return len(self.prompt) - self.cached

    def take(self, chunk: dict[str, Any]) -> None:
        """Take in one event of the stream."""
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            ids = choice.get("token_ids") or []
            if ids and not self.answer:
                self.first_s = time.monotonic()
            self.answer += ids
            self.text += choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])

    def faults(self) -> list[str]:
        """What is wrong with this turn by itself."""
        found = [self.error] if self.error else []
        if len(self.finish_reasons) != 1:
            found.append(f"{len(self.finish_reasons)} finish reasons")
        elif self.finish_reasons[0] not in ("stop", "length"):
            found.append(f"finish reason {self.finish_reasons[0]}")
        for name, ids in (("prompt_tokens", self.prompt), ("completion_tokens", self.answer)):
            if self.usage.get(name) != len(ids):
                found.append(f"{name} {self.usage.get(name)}, expected {len(ids)}")
        if "cached_tokens" not in self.usage.get("prompt_tokens_details", {}):
            found.append("no cached_tokens")
        elif not 0 <= self.cached < len(self.prompt):
            found.append(f"{self.cached} cached of {len(self.prompt)}")
        return found


class Ideal:
    """The prompt tokens that an unlimited cache computes for a set of turns, from a tree of their token ids.

    A token of the tree is computed once: by the first prompt that holds it, or when it was generated (never the last
    token of an answer, whose K/V nobody computes). A prompt whose last token is there already computes that row again,
    for its logits. `least` and `most` differ only where the clock cannot tell which of two requests came first and it
    matters, so never in chats of which each answer is followed up by its own chat.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._children: dict[tuple[int, int], int] = {}
        self._prompts: defaultdict[int, list[Turn]] = defaultdict(list)
        self._ends: defaultdict[int, list[Turn]] = defaultdict(list)
        self._answers: defaultdict[int, list[Turn]] = defaultdict(list)
        for turn in turns:
            self._add(turn)
        bounds = [self._bounds(node) for node in self._prompts]
        self.least = sum(least for least, _ in bounds)
        self.most = sum(most for _, most in bounds)

    def _add(self, turn: Turn) -> None:
        node = 0
        for token in turn.prompt:
            node = self._children.setdefault((node, token), len(self._children) + 1)
            self._prompts[node].append(turn)
        self._ends[node].append(turn)
        for token in turn.answer[:-1]:
            node = self._children.setdefault((node, token), len(self._children) + 1)
            self._answers[node].append(turn)

    def _bounds(self, node: int) -> tuple[int, int]:
        """Least and most rows of this token that prompts compute."""
        through, ends, answers = self._prompts[node], self._ends.get(node, []), self._answers.get(node, [])
        if answers:
            if all(any(answer.end_s <= prompt.sent_s for answer in answers) for prompt in through):
                return len(ends), len(ends)
            if any(answer.sent_s < prompt.first_s for answer in answers for prompt in through):
                return len(ends), len(ends) + 1
        others = [turn for turn in through if len(turn.prompt) > len(ends[0].prompt)] if ends else through
        if not ends or not others:
            return max(1, len(ends)), max(1, len(ends))
        if min(turn.first_s for turn in ends) <= min(turn.sent_s for turn in others):
            return len(ends), len(ends)
        certain = min(turn.first_s for turn in others) <= min(turn.sent_s for turn in ends)
        return len(ends) + certain, len(ends) + 1


@dataclass
class Report:
    """All turns of a run, and what an unlimited cache would have computed."""

    turns: list[Turn]
    seconds: float
    evicted_pages: int
    ideal: Ideal = field(init=False)

    def __post_init__(self) -> None:
        self.ideal = Ideal([turn for turn in self.turns if not turn.error])

    @property
    def computed(self) -> int:
        return sum(turn.computed for turn in self.turns)

    def faults(self) -> list[str]:
        """Everything that is not as it must be; empty for a good run."""
        found = [f"{turn.chat} turn {turn.number}: {fault}" for turn in self.turns for fault in turn.faults()]
        before: dict[str, Turn] = {}
        for turn in self.turns:
            last = before.get(turn.chat)
            if last is not None:
                own = min(common_prefix(last.prompt + last.answer[:-1], turn.prompt), len(turn.prompt) - 1)
                if turn.cached < own:
                    found.append(f"{turn.chat} turn {turn.number}: {turn.cached} cached, its own last turn left {own}")
            before[turn.chat] = turn
        if not self.ideal.least <= self.computed <= self.ideal.most:
            found.append(f"{self.computed} prompt tokens computed, ideal {self.ideal.least} to {self.ideal.most}")
        if self.evicted_pages:
            found.append(f"{self.evicted_pages} pages were evicted: the server's pool is too small for this run")
        return found

    def lines(self) -> Iterable[str]:
        """The table for people."""
        yield f"{'chat':26} turns  prompt  cached   hit%  answer  TTFT s  tok/s"
        by_chat: defaultdict[str, list[Turn]] = defaultdict(list)
        for turn in self.turns:
            by_chat[turn.chat].append(turn)
        for chat, turns in [*by_chat.items(), ("all", self.turns)]:
            prompt, cached = sum(len(turn.prompt) for turn in turns), sum(turn.cached for turn in turns)
            answer = sum(len(turn.answer) for turn in turns)
            ttft = sum(turn.first_s - turn.sent_s for turn in turns) / len(turns)
            span = sum(turn.end_s - turn.sent_s for turn in turns) if chat != "all" else self.seconds
            yield (
                f"{chat:26.26} {len(turns):5} {prompt:7} {cached:7} {100 * cached / max(prompt, 1):6.1f} {answer:7} "
                f"{ttft:7.2f} {answer / span if span else 0.0:6.1f}"
            )
        longest = max(len(turn.prompt) + len(turn.answer) for turn in self.turns)
        ideal = " to ".join(map(str, sorted({self.ideal.least, self.ideal.most})))
        yield f"prompt tokens computed {self.computed}, ideal {ideal}; longest context {longest}; {self.seconds:.1f} s"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def read_chats(path: Path = CHATS) -> list[dict[str, Any]]:
    """The conversations of a file. Raises ValueError naming a line that is not as described beside the file."""
    chats = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        chat = json.loads(line)
        system_fits = chat.get("system") is None or isinstance(chat["system"], str)
        if not (isinstance(chat.get("id"), str) and system_fits and chat.get("turns")):
            raise ValueError(f"{path}, line {number}: expected id, system and turns")
        chats.append(chat)
    return chats


class Runner:
    """Runs chats against one server."""

    def __init__(self, client: httpx.AsyncClient, *, at_once: int, max_tokens: int) -> None:
        self._client = client
        self._places = asyncio.Semaphore(at_once)
        self._max_tokens = max_tokens

    async def run(self, chats: Sequence[dict[str, Any]]) -> Report:
        """All chats from an empty cache. Raises httpx.HTTPError when the server cannot be reached."""
        (await self._client.post("/flush_cache")).raise_for_status()
        evicted = await self._evicted_pages()
        began = time.monotonic()
        done = await asyncio.gather(*(self._chat(chat) for chat in chats))
        seconds = time.monotonic() - began
        return Report([turn for turns in done for turn in turns], seconds, await self._evicted_pages() - evicted)

    async def _evicted_pages(self) -> int:
        stats = (await self._client.get("/server_info")).raise_for_status().json()["stats"]
        return int(stats["kv_num_evicted_pages"])

    async def _chat(self, chat: dict[str, Any]) -> list[Turn]:
        messages = [{"role": "system", "content": chat["system"]}] if chat["system"] else []
        turns: list[Turn] = []
        async with self._places:
            for number, text in enumerate(chat["turns"], 1):
                messages.append({"role": "user", "content": text})
                answer = await self._client.post("/tokenize", json={"messages": messages})
                turn = Turn(chat["id"], number, answer.raise_for_status().json()["tokens"])
                turns.append(turn)
                await self._send(turn, messages)
                if turn.error:
                    break
                messages.append({"role": "assistant", "content": turn.text})
        return turns

    async def _send(self, turn: Turn, messages: list[dict[str, str]]) -> None:
        body = {
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        turn.sent_s = time.monotonic()
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                turn.error = f"status {response.status_code}: {(await response.aread()).decode()}"
                return
            ended = False
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    ended = data == "[DONE]"
                    if not ended:
                        turn.take(json.loads(data))
        turn.end_s = time.monotonic()
        if not ended and not turn.error:
            turn.error = "the stream ended without [DONE]"


async def run(url: str, chats: Sequence[dict[str, Any]], *, at_once: int = 8, max_tokens: int = 48) -> Report:
    """Send the chats to the server at `url`, whose cache is flushed first."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        return await Runner(client, at_once=at_once, max_tokens=max_tokens).run(chats)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing lost and the ideal reached; 1: not so; 2: wrong use, or no server."""
    parser = argparse.ArgumentParser(prog="chats", description="Serve a file of chats and judge what was reused.")
    parser.add_argument("url", help="address of a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--file", type=Path, default=CHATS, help="JSON lines with id, system and turns")
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="chats at a time")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="longest answer")
    arguments = parser.parse_args(argv)
    try:
        chats = read_chats(arguments.file)
        coroutine = run(arguments.url, chats, at_once=arguments.at_once, max_tokens=arguments.max_tokens)
        report = asyncio.run(coroutine)
    except (OSError, ValueError, httpx.HTTPError) as error:
        print(f"chats: error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    print("\n".join(report.lines()))
    faults = report.faults()
    for fault in faults:
        print(f"chats: {fault}", file=sys.stderr)
    print("nothing lost, reuse ideal" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
