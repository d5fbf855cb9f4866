"""The workloads: what agents, chats, searches and batch jobs send, as programs of dependent requests.

Owns the shapes of the workloads and their sizes. Must not know servers or figures. Sizes in tokens are estimates; the
run reports what the server counted. The same seed gives the same first requests; later ones hold the model's answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from phloem.bench.jobs import Job, Message, Program, Session, Workload
from phloem.bench.text import TextModel


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a workload; each workload reads those that it has a use for."""

    agents: int = field(default=16, metadata={"help": "programs: agents, chats, searches, documents, requests"})
    turns: int = field(default=5, metadata={"help": "turns of an agent or chat; depth of a search"})
    system_tokens: int = field(default=1500, metadata={"help": "length of the shared system prompt, tools included"})
    user_tokens: int = field(default=100, metadata={"help": "length of what each turn adds: question or tool result"})
    output_tokens: int = field(default=32, metadata={"help": "most tokens of an answer"})
    branches: int = field(default=4, metadata={"help": "branches of a search step; samples of a self-consistency vote"})
    groups: int = field(default=8, metadata={"help": "different prefixes of shared-prefix"})
    zipf: float = field(default=1.0, metadata={"help": "skew of the groups' popularity: group k weighs 1/k^ZIPF"})
    think_s: float = field(default=0.0, metadata={"help": "mean pause between the turns of a program, in seconds"})


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An answer of the model, sent back as history."""
    return {"role": "assistant", "content": text}


def tool_prompt(instructions: str, tools: list[dict[str, object]]) -> str:
    """A system prompt that lists tools as text: every chat template takes it, with or without support for tools."""
    listed = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    return (
        f"You are a careful assistant that works with tools. {instructions}\n\n# Tools\n\nTo use a tool, answer with "
        f'{{"name": ..., "arguments": ...}}. The tools are:\n\n{listed}'
    )


def pause(text: TextModel, mean_s: float) -> float:
    """A pause around `mean_s`, from half to one and a half of it."""
    return mean_s * text.integer(50, 150) / 100 if mean_s else 0.0


def conversation(messages: list[Message], questions: Iterator[str], sizes: Sizes, text: TextModel) -> Session:
    """A chat in which each question follows the model's answer to the one before."""
    for turn, question in enumerate(questions):
        messages.append(user(question))
        delay_s = pause(text, sizes.think_s) if turn else 0.0
        answers = yield [Job(tuple(messages), max_tokens=sizes.output_tokens, turn=turn, delay_s=delay_s)]
        messages.append(assistant(answers[0]))


def agents(sizes: Sizes, seed: int) -> Iterator[Program]:
    """A agents with one system prompt and one set of tools; each turn appends a tool result or a question."""
    shared = TextModel("agents", seed)
    instructions = shared.prose(sizes.system_tokens // 3)
    prompt = tool_prompt(instructions, shared.tools(sizes.system_tokens - sizes.system_tokens // 3 - 40))

    def start(name: str) -> Session:
        text = TextModel("agents", seed, name)
        task = text.question(sizes.user_tokens)
        results = (f"Tool result: {text.tool_result(sizes.user_tokens - 10)}" for _ in range(sizes.turns - 1))
        questions = (q for source in ([task], results) for q in source)
        return conversation([system(prompt)], questions, sizes, text)

    return _programs("agent", sizes.agents, sizes.turns, start)


def chat(sizes: Sizes, seed: int) -> Iterator[Program]:
    """Chats that share a short system prompt only; each grows by its own questions and answers."""
    prompt = "You are a helpful assistant. Answer briefly and say so when you do not know."

    def start(name: str) -> Session:
        text = TextModel("chat", seed, name)
        questions = (text.question(sizes.user_tokens) for _ in range(sizes.turns))
        return conversation([system(prompt)], questions, sizes, text)

    return _programs("chat", sizes.agents, sizes.turns, start)


def tree_of_thoughts(sizes: Sizes, seed: int) -> Iterator[Program]:
    """Searches: at each depth several continuations are tried at once and one is kept."""

    def start(name: str) -> Session:
        text = TextModel("tree", seed, name)
        problem = f"{text.prose(sizes.system_tokens)}\n\n{text.question()}"
        messages = [system("Solve the problem step by step."), user(problem)]
        for depth in range(sizes.turns):
            thoughts = [user(f"Try this next: {text.question(sizes.user_tokens)}") for _ in range(sizes.branches)]
            jobs = [Job((*messages, thought), max_tokens=sizes.output_tokens, turn=depth) for thought in thoughts]
            answers = yield jobs
            kept = text.integer(0, len(answers) - 1)
            messages += [thoughts[kept], assistant(answers[kept])]

    return _programs("search", sizes.agents, sizes.turns * sizes.branches, start)


def self_consistency(sizes: Sizes, seed: int) -> Iterator[Program]:
    """One long question, sampled several times at once at temperature 0.8, for a vote over the answers."""

    def start(name: str) -> Session:
        text = TextModel("vote", seed, name)
        messages = (system("Think step by step."), user(text.question(sizes.system_tokens)))
        yield [
            Job(messages, max_tokens=sizes.output_tokens, temperature=0.8, seed=1000 * seed + i)
            for i in range(sizes.branches)
        ]

    return _programs("vote", sizes.agents, sizes.branches, start)


def extract(sizes: Sizes, seed: int) -> Iterator[Program]:
    """One long schema with instructions, many HTML pages: one request a page."""
    shared = TextModel("extract", seed)
    schema = json.dumps({tool["name"]: tool for tool in map(_function, shared.tools(sizes.system_tokens - 60))})
    prompt = f"Extract the records from the page as JSON that follows this schema, and nothing else:\n{schema}"

    def start(name: str) -> Session:
        page = TextModel("extract", seed, name).page(sizes.user_tokens)
        yield [Job((system(prompt), user(page)), max_tokens=sizes.output_tokens)]

    return _programs("page", sizes.agents, 1, start)


def shared_prefix(sizes: Sizes, seed: int) -> Iterator[Program]:
    """Independent questions behind one of several long prefixes, some far more popular than others."""
    prefixes = [TextModel("prefix", seed, k).prose(sizes.system_tokens) for k in range(sizes.groups)]
    weights = [1.0 / (k + 1) ** sizes.zipf for k in range(sizes.groups)]
    total = sum(weights)

    def start(name: str) -> Session:
        text = TextModel("prefix", seed, name)
        roll = text.integer(0, 1_000_000) / 1_000_000 * total
        group = 0
        while group + 1 < sizes.groups and roll > weights[group]:
            roll -= weights[group]
            group += 1
        messages = (system(prefixes[group]), user(text.question(sizes.user_tokens)))
        yield [Job(messages, max_tokens=sizes.output_tokens)]

    return _programs("question", sizes.agents, 1, start)


def independent(sizes: Sizes, seed: int) -> Iterator[Program]:
    """Nothing shared from the first word on: what a prefix cache costs where it can save nothing."""

    def start(name: str) -> Session:
        text = TextModel("independent", seed, name)
        opening = f"{name.replace('-', ' ')}: {text.prose(sizes.system_tokens)}"
        messages = (system(opening), user(text.question(sizes.user_tokens)))
        yield [Job(messages, max_tokens=sizes.output_tokens)]

    return _programs("request", sizes.agents, 1, start)


WORKLOADS: Mapping[str, Callable[[Sizes, int], Iterator[Program]]] = {
    "agents": agents,
    "chat": chat,
    "tree-of-thoughts": tree_of_thoughts,
    "self-consistency": self_consistency,
    "extract": extract,
    "shared-prefix": shared_prefix,
    "independent": independent,
}


def make_workload(name: str, sizes: Sizes, seed: int) -> Workload:
    """A workload by its name. Raises KeyError for a name that is not in WORKLOADS."""
    params = {f.name: getattr(sizes, f.name) for f in fields(Sizes)} | {"seed": seed}
    return Workload(name, params, tuple(WORKLOADS[name](sizes, seed)))


def _programs(kind: str, count: int, num_jobs: int, start: Callable[[str], Session]) -> Iterator[Program]:
    for i in range(count):
        name = f"{kind}-{i}"
        yield Program(name, lambda name=name: start(name), num_jobs)  # type: ignore[misc]


def _function(tool: dict[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    return function
