"""Workloads from files: recorded requests, a trace of production traffic, tools and tasks of a public benchmark.

Owns their formats. Must not know servers or figures. The files are not part of the project: absent ones are an error
that says what was looked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phloem.bench.jobs import Job, Program, Session, Workload
from phloem.bench.text import TextModel, json_tokens
from phloem.bench.workloads import Sizes, conversation, system, tool_prompt
from phloem.errors import UsageError

BLOCK_TOKENS = 512
"""Tokens that one id of a Mooncake trace stands for."""

TOOL_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""Classes of the multi-turn tasks of the Berkeley Function-Calling Leaderboard, and the files with their tools."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a recorded trace is played: at `speed` times its pace, lengths times `scale`, at most `limit` requests."""

    speed: float = 1.0
    scale: float = 1.0
    limit: int = 0


def task_agents(folder: Path, sizes: Sizes, seed: int) -> Workload:
    """The `agents` workload with real tasks and tool schemas from `folder`/bfcl; tool results stay synthetic.

    All agents share the tools of as many classes as fit in `system_tokens` (at least one), in the order of how many
    tasks they serve, and the tasks are those that need no other class; more agents than tasks take them again.
    """
    bfcl = folder / "bfcl"
    tasks = list(_lines(bfcl / "multi_turn_base.jsonl"))
    tools: list[dict[str, object]] = []
    chosen: set[str] = set()
    for name in TOOL_FILES:
        more = [{"function": _schema(tool)} for tool in _lines(bfcl / f"{TOOL_FILES[name]}.jsonl")]
        if not chosen or sum(map(json_tokens, tools + more)) <= sizes.system_tokens:
            tools += more
            chosen.add(name)
    fitting = [task for task in tasks if chosen.issuperset(task["involved_classes"])]
    prompt = tool_prompt("Answer with one tool call at a time, or in words once the task is done.", tools)

    def start(index: int) -> Session:
        text = TextModel("tasks", seed, index)
        asked = [str(turn[0]["content"]) for turn in fitting[index % len(fitting)]["question"] if turn]
        results = (f"Tool result: {text.tool_result(sizes.user_tokens - 10)}" for _ in range(sizes.turns))
        questions = (q for pair in zip(_padded(asked, "Go on.", sizes.turns), results, strict=True) for q in pair)
        return conversation([system(prompt)], _take(questions, sizes.turns), sizes, text)

    programs = tuple(
        Program(f"agent-{i}", lambda i=i: start(i), sizes.turns)  # type: ignore[misc]
        for i in range(sizes.agents)
    )
    params = {**asdict(sizes), "seed": seed, "tools": len(tools), "tasks": len(fitting)}
    return Workload("agents, real tools and tasks", params, programs)


def replay(path: Path, options: ReplayOptions) -> Workload:
    """Requests of a JSONL file at their times.

    A line is a body of an OpenAI request, or holds one as `body`; `timestamp` (milliseconds) says when. Lines of the
    Mooncake trace schema (`timestamp`, `input_length`, `output_length`, `hash_ids`) become prompts of text that share
    as their ids do. Without times the file is a closed loop.
    """
    programs = []
    for index, line in enumerate(_lines(path)):
        if options.limit and index >= options.limit:
            break
        job = _mooncake_job(line, options.scale) if "hash_ids" in line else _recorded_job(line, path, index)
        at_s = line["timestamp"] / 1000 / options.speed if "timestamp" in line else None
        programs.append(Program(f"request-{index}", lambda job=job: _once(job), 1, at_s))  # type: ignore[misc]
    if not programs:
        raise UsageError(f"{path} holds no requests")
    return Workload(f"replay {path.name}", asdict(options), tuple(programs))


def _recorded_job(line: dict[str, Any], path: Path, index: int) -> Job:
    body = dict(line.get("body", line))
    for name in ("timestamp", "stream", "stream_options", "model"):
        body.pop(name, None)
    messages, prompt = body.pop("messages", ()), body.pop("prompt", "")
    if not messages and not isinstance(prompt, str):
        raise UsageError(f"{path}:{index + 1}: `prompt` must be text, got {type(prompt).__name__}")
    if not messages and not prompt:
        raise UsageError(f"{path}:{index + 1}: a request needs `messages` or `prompt`")
    longest = body.pop("max_completion_tokens", None) or body.pop("max_tokens", None) or 256
    return Job(
        tuple(messages),
        prompt,
        max_tokens=longest,
        temperature=body.pop("temperature", 1.0),
        seed=body.pop("seed", index),
        extra=body,
    )


def _mooncake_job(line: dict[str, Any], scale: float) -> Job:
    left = int(line["input_length"] * scale)
    block = max(1, int(BLOCK_TOKENS * scale))
    parts = []
    for hash_id in line["hash_ids"]:
        parts.append(TextModel("block", hash_id).prose(min(block, left)))
        left -= block
    return Job(
        prompt="\n\n".join(part for part in parts if part), max_tokens=max(1, int(line["output_length"] * scale))
    )


def _once(job: Job) -> Session:
    yield [job]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise UsageError(f"{path}:{number}: expected an object, got {type(value).__name__}")
            yield value


def _schema(value: Any) -> Any:
    """The tool in JSON Schema's words: the leaderboard writes dict, float and tuple for types."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key != "response"}
        return {k: names.get(v, v) if k == "type" and isinstance(v, str) else _schema(v) for k, v in kept.items()}
    return [_schema(item) for item in value] if isinstance(value, list) else value


def _padded(items: list[str], filler: str, length: int) -> list[str]:
    return (items + [filler] * length)[:length]


def _take(items: Iterable[str], count: int) -> Iterator[str]:
    return (item for item, _ in zip(items, range(count), strict=False))
