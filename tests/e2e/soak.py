"""A server under full load of every kind for minutes: `scripts/soak`.

Starts a server with a small KV pool, so that it evicts and retracts all the time, and lets many clients send chats,
streams, tools, grammars, batches, embeddings, nonsense, and go away at any moment. At the end nothing may be lost, no
answer may have been a fault of the server, memory must be flat, and every page of the pool free or evictable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 1800.0
ANSWER_S = 1800.0
TICK_S = 0.5
PAUSE_S = 5.0
"""A tick that took longer than this was a pause of the machine."""

SERVER_FLAGS = ("--port", "0", "--max-total-tokens", "8000", "--max-model-len", "2048", "--max-running-requests", "16")
MAX_GROWTH = 0.03
"""Share by which the median memory of the last third may be above that of the middle third."""

WORDS = (
    "radix",
    "tree",
    "page",
    "token",
    "cache",
    "prefix",
    "rain",
    "river",
    "stone",
    "日本",
    "naïve",
    "😀",
    "{",
    "\n",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Linz", "Graz"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NONSENSE: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages": [{"role": "nobody"}]}'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
    ("/v1/completions", b'{"prompt": [[]]}'),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/completions", b"[" * 5000),
    ("/generate", b'{"text": "a", "sampling_params": {"regex": "("}}'),
    ("/v1/embeddings", b'{"input": ""}'),
    ("/v1/messages", b'{"messages": []}'),
    ("/v1/no-such-route", b"{}"),
)


class LostError(Exception):
    """An answer that is missing, cut or wrong."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise LostError(what)


@dataclass
class Soak:
    """The clients of one run. `outcomes` counts (kind, status), `lost` says what went wrong."""

    client: httpx.AsyncClient
    rng: random.Random
    is_over: bool = False
    num_pauses: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    num_sent: int = 0

    async def work(self) -> None:
        """One client: request after request, of any kind, until the end."""
        kinds = [
            self.chat,
            self.chat_stream,
            self.completion,
            self.tools,
            self.schema,
            self.regex,
            self.responses,
            self.messages,
            self.generate,
            self.embeddings,
            self.small_routes,
            self.nonsense,
            self.leave_stream,
            self.leave_body,
            self.leave_waiting,
            self.aborted,
        ]
        while not self.is_over:
            kind = self.rng.choice(kinds)
            self.num_sent += 1
            num_pauses = self.num_pauses
            try:
                status = await asyncio.wait_for(kind(), ANSWER_S)
            except (httpx.HTTPError, LostError, TimeoutError, ValueError, KeyError, IndexError) as error:
                await asyncio.sleep(2 * TICK_S)
                # A pause of the machine makes every time limit pass at once, the server's too.
                if isinstance(error, httpx.TransportError | TimeoutError) and self.num_pauses > num_pauses:
                    status = "paused"
                else:
                    status = "lost"
                    self.lost.append(f"{kind.__name__}: {type(error).__name__} {error}")
            self.outcomes[kind.__name__, status] += 1

    def text(self) -> str:
        """Some words after one of a few long beginnings, so that prefixes are shared and evicted."""
        trunk = random.Random(self.rng.randrange(6)).choices(WORDS, k=self.rng.choice((20, 120, 400)))
        return " ".join(trunk + self.rng.choices(WORDS, k=self.rng.randrange(1, 30)))

    def fields(self) -> dict[str, Any]:
        return {
            "max_tokens": self.rng.choice((1, 8, 24, 60)),
            "temperature": self.rng.choice((0, 1)),
            "ignore_eos": self.rng.random() < 0.5,
            "cache_salt": self.rng.choice((None, None, "a", "b")),
        }

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self.text()}], **self.fields(), **fields}

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        response = await self.client.post(path, json=body)
        require(response.status_code == 200, f"{path} {response.status_code} {response.text[:200]}")
        return response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream that runs to its end."""
        found: list[dict[str, Any]] = []
        last = ""
        async with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            require(response.status_code == 200, f"{path} stream {response.status_code}")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        found.append(json.loads(last))
        require(bool(found) and not any("error" in item for item in found), f"{path}: error event")
        if path not in ("/v1/messages", "/v1/responses"):
            require(last == "[DONE]", f"{path}: the stream ended without [DONE]")
        return found

    async def chat(self) -> str:
        answer = await self.post("/v1/chat/completions", self.chat_body(stop=["river"]))
        usage, (choice,) = answer["usage"], answer["choices"]
        require(choice["finish_reason"] in ("stop", "length"), "finish_reason")
        require("river" not in (choice["message"]["content"] or ""), "a stop string in the answer")
        require(usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"], "cached_tokens")
        return "ok"

    async def chat_stream(self) -> str:
        body = self.chat_body(stream_options={"include_usage": True}, logprobs=True, n=self.rng.choice((1, 1, 3)))
        events = await self.events("/v1/chat/completions", body)
        reasons = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
        require(len(reasons) == body["n"], f"{len(reasons)} finish reasons for n {body['n']}")
        require(events[-1]["usage"]["completion_tokens"] >= len(reasons), "usage")
        text = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
        require("\ud83d" not in text, "half a character")
        return "ok"

    async def completion(self) -> str:
        prompt = [self.rng.randrange(1000, 1010) for _ in range(self.rng.randrange(1, 300))]
        body = {"prompt": [prompt, self.text()], "n": 2, "logprobs": 2, "echo": self.rng.random() < 0.3}
        answer = await self.post("/v1/completions", {**self.fields(), **body})
        require([choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3], "choices")
        return "ok"

    async def tools(self) -> str:
        body = self.chat_body(tools=[TOOL], tool_choice=self.rng.choice(("required", "auto")), max_tokens=200)
        (choice,) = (await self.post("/v1/chat/completions", body))["choices"]
        for call in choice["message"].get("tool_calls", ()) if choice["finish_reason"] != "length" else ():
            arguments = json.loads(call["function"]["arguments"])
            require(body["tool_choice"] == "auto" or set(arguments) == {"city", "n"}, f"arguments {arguments}")
        return "ok"

    async def schema(self) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        (choice,) = (await self.post("/v1/chat/completions", self.chat_body(response_format=form)))["choices"]
        if choice["finish_reason"] != "length":
            require(set(json.loads(choice["message"]["content"])) == {"city", "n"}, "schema")
        return "ok"

    async def regex(self) -> str:
        pattern = f"(red|green){{1,{self.rng.randrange(2, 9)}}}"
        events = await self.events("/v1/completions", {"prompt": self.text(), **self.fields(), "regex": pattern})
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        if events[-1]["choices"][0]["finish_reason"] != "length":
            require(re.fullmatch(pattern, text) is not None, f"{text!r} is not {pattern}")
        return "ok"

    async def responses(self) -> str:
        first = await self.post("/v1/responses", {"input": self.text(), "max_output_tokens": 12})
        body = {"input": "go on", "previous_response_id": first["id"], "max_output_tokens": 12}
        events = await self.events("/v1/responses", body)
        require(events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]["type"])
        return "ok"

    async def messages(self) -> str:
        body = {"messages": [{"role": "user", "content": self.text()}], "max_tokens": 20}
        events = await self.events("/v1/messages", body)
        require(events[-1]["type"] == "message_stop", events[-1]["type"])
        return "ok"

    async def generate(self) -> str:
        sampling = {"max_new_tokens": self.rng.randrange(0, 20), "temperature": 0}
        body = {"text": [self.text(), self.text()], "sampling_params": sampling, "return_logprob": True}
        answers = await self.post("/generate", body)
        require(all(a["meta_info"]["completion_tokens"] <= sampling["max_new_tokens"] for a in answers), "tokens")
        return "ok"

    async def embeddings(self) -> str:
        body = {"input": [self.text(), "short"], "pooling": self.rng.choice(("mean", "last"))}
        vectors = [item["embedding"] for item in (await self.post("/v1/embeddings", body))["data"]]
        require(all(abs(sum(x * x for x in vector) - 1.0) < 1e-3 for vector in vectors), "length of a vector")
        return "ok"

    async def small_routes(self) -> str:
        for path in ("/health", "/v1/models", "/metrics", "/server_info", "/openapi.json"):
            response = await self.client.get(path)
            require(response.status_code == 200, f"{path} {response.status_code}")
        ids = (await self.post("/tokenize", {"prompt": "a 😀"}))["tokens"]
        require((await self.post("/detokenize", {"tokens": ids}))["text"] == "a 😀", "detokenize")
        if self.rng.random() < 0.05:
            await self.post("/flush_cache", {})
        return "ok"

    async def nonsense(self) -> str:
        path, content = self.rng.choice(NONSENSE)
        response = await self.client.post(path, content=content)
        require(400 <= response.status_code < 500, f"{path} {content[:60]!r} {response.status_code}")
        return str(response.status_code)

    async def leave_stream(self) -> str:
        """Go away after some events."""
        body = {**self.chat_body(max_tokens=500, ignore_eos=True, n=self.rng.choice((1, 2))), "stream": True}
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            require(response.status_code == 200, f"stream {response.status_code}")
            left = self.rng.randrange(0, 20)
            async for _ in response.aiter_lines():
                left -= 1
                if left <= 0:
                    break
        return "left"

    async def leave_body(self) -> str:
        """Go away in the middle of a request."""
        url = self.client.base_url
        body = json.dumps(self.chat_body()).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write((head + body)[: self.rng.randrange(len(head) + len(body))])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.transport.abort() if self.rng.random() < 0.5 else writer.close()
        return "left"

    async def leave_waiting(self) -> str:
        """Go away while the whole answer is awaited."""
        body = self.chat_body(max_tokens=500, ignore_eos=True)
        with contextlib.suppress(httpx.TimeoutException):
            await self.client.post("/v1/chat/completions", json=body, timeout=self.rng.random() * 2)
        return "left"

    async def aborted(self) -> str:
        """An operator ends a request: its stream ends with an error that says so."""
        rid = f"soak-{self.rng.randrange(1 << 60)}"
        sampling = {"max_new_tokens": 400, "ignore_eos": True}
        body = {"text": self.text(), "rid": rid, "stream": True, "sampling_params": sampling}
        last: dict[str, Any] = {}
        async with self.client.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if not last:
                        await self.post("/abort", {"rid": rid})
                    last = json.loads(line.removeprefix("data: "))
        require(last.get("error", {}).get("code") == "engine_unavailable", f"an aborted stream ended with {last}")
        return "aborted"


@dataclass
class Server:
    """The process under test."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str

    @classmethod
    def start(cls, folder: Path, flags: Sequence[str]) -> Server:
        log = folder / "server.log"
        command = [sys.executable, "-m", "phloem.cli", "serve", *SERVER_FLAGS, *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        ends_s = time.monotonic() + START_S
        while time.monotonic() < ends_s and process.poll() is None:
            found = re.search(r"ready on (http://\S+)", log.read_text("utf-8", "replace"))
            if found:
                return cls(process, log, found[1])
            time.sleep(0.05)
        process.kill()
        raise RuntimeError(f"the server did not start:\n{log.read_text('utf-8', 'replace')}")

    def memory_bytes(self) -> int:
        """Anonymous memory, in RAM or swapped out."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(int(kib) * 1024 for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE))

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def memory_growth(samples: Sequence[int]) -> float:
    """Growth from the middle third to the last, of medians. The first third warms up: the pool is touched."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return statistics.median(last) / statistics.median(middle) - 1.0 if middle else 0.0


async def idle_faults(client: httpx.AsyncClient) -> list[str]:
    """What is wrong with the cache once nothing runs."""
    ends_s = time.monotonic() + 60.0
    while True:
        stats = (await client.get("/server_info")).json()["stats"]
        if stats["num_running"] == stats["num_waiting"] == 0:
            break
        if time.monotonic() > ends_s:
            return [f"still busy 60 s after the last client went: {stats}"]
        await asyncio.sleep(0.1)
    faults = [
        f"{name} {stats[name]} while idle" for name in ("kv_num_pages_protected", "kv_num_cursors") if stats[name]
    ]
    free, evictable, total = (stats[f"kv_num_pages_{kind}"] for kind in ("free", "evictable", "total"))
    if free + evictable != total:
        faults.append(f"{free} free + {evictable} evictable pages are not {total}")
    for name in ("num_retractions", "kv_num_evicted_pages", "num_cached_prompt_tokens", "num_output_tokens"):
        print(f"{name:28} {stats.get(name, 0):.0f}")
    return faults


async def run(server: Server, *, seconds: float, at_once: int, seed: int) -> list[str]:
    """Load a server; what went wrong."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S, trust_env=False, limits=limits) as client:
        soak = Soak(client, random.Random(seed))
        files_before = server.num_files()
        workers = asyncio.gather(*(soak.work() for _ in range(at_once)))
        samples: list[int] = []
        seconds_run = 0.0
        while not workers.done():
            began_s = time.monotonic()
            await asyncio.wait([workers], timeout=TICK_S)
            # When the machine sleeps, or pauses both sides, the clock jumps: that is no load.
            elapsed_s = time.monotonic() - began_s
            soak.num_pauses += elapsed_s > PAUSE_S
            seconds_run += min(elapsed_s, PAUSE_S)
            soak.is_over = seconds_run >= seconds
            samples.append(server.memory_bytes())
        await workers
        for (kind, status), count in sorted(soak.outcomes.items()):
            print(f"{kind:16} {status:8} {count}")
        print(f"{soak.num_sent} requests, {at_once} at a time, in {seconds:.0f} s")
        faults = soak.lost + await idle_faults(client)
    await asyncio.sleep(1.0)
    growth = memory_growth(samples)
    print("memory in MiB:", *(f"{samples[i * (len(samples) - 1) // 10] >> 20}" for i in range(11)), f"({growth:+.1%})")
    if growth > MAX_GROWTH:
        faults.append(f"memory grew by {growth:.1%} from the middle third to the last")
    if server.num_files() > files_before + 8:
        faults.append(f"{server.num_files()} open files, {files_before} before")
    return faults


def soak_server(*, seconds: float, at_once: int = 24, seed: int = 0, flags: Sequence[str] = ()) -> list[str]:
    """Start a server, load it, stop it; what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server.start(Path(folder), flags)
        try:
            faults = asyncio.run(run(server, seconds=seconds, at_once=at_once, seed=seed))
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(ANSWER_S)
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        output = server.log.read_text("utf-8", "replace")
        if code != 0:
            faults.append(f"exit code {code} after SIGTERM")
        if "Traceback" in output:
            faults.append("a traceback in the server's output:\n" + output[output.index("Traceback") :][:3000])
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all well; 1: not so."""
    parser = argparse.ArgumentParser(prog="soak", description="Load a server of its own with everything at once.")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N", help="length of the run (default: 600)")
    parser.add_argument("--at-once", type=int, default=24, metavar="N", help="clients (default: 24)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the clients' choices (default: 0)")
    arguments, flags = parser.parse_known_args(argv)
    faults = soak_server(seconds=arguments.seconds, at_once=arguments.at_once, seed=arguments.seed, flags=flags)
    for fault in faults[:50]:
        print(f"soak: {fault}", file=sys.stderr)
    print("all well" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
