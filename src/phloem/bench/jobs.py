"""Nouns of the benchmarks: what is sent (Job, Program, Workload) and what was seen (Record).

Owns plain records. Must not know how requests travel or how figures are drawn from them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: chat `messages`, or a bare `prompt` where there are none.

    `turn` counts from 0 within a program; `delay_s` is waited before sending (a tool that runs, a person who
    thinks); `extra` holds further fields of the body. `seed` matters where `temperature` is above 0.
    """

    messages: tuple[Message, ...] = ()
    prompt: str = ""
    max_tokens: int = 32
    turn: int = 0
    delay_s: float = 0.0
    temperature: float = 0.0
    seed: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)


Session = Generator[Sequence[Job], list[str], None]
"""Yields jobs to send at once and is sent their answers, in the same order."""


@dataclass(frozen=True, slots=True)
class Program:
    """A chain of dependent requests: one agent, one chat, one search. `at_s`: when it starts; None: as load allows."""

    name: str
    start: Callable[[], Session]
    num_jobs: int
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Programs and what made them."""

    name: str
    params: Mapping[str, object]
    programs: tuple[Program, ...]

    @property
    def num_jobs(self) -> int:
        return sum(program.num_jobs for program in self.programs)


@dataclass(slots=True)
class Record:
    """What was seen of one request. Times in seconds; `due_s` and `sent_s` count from the start of the run.

    `due_s` is when an open loop meant to send it; a late `sent_s` shows that the client was the limit. `chunk_s` are
    the arrivals of pieces of text, from `sent_s` on; the first is the TTFT. Token counts are those of the server's
    usage; `cached_tokens` None: not reported. `ideal_tokens` is what an infinite cache would have reused.
    """

    program: str
    turn: int
    due_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    ideal_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def latency_s(self) -> float:
        return self.end_s - self.sent_s


@dataclass(slots=True)
class Exchange:
    """One request with its texts, for what is worked out after the run."""

    job: Job
    record: Record
    text: str = ""
    """The answer as it was shown."""
