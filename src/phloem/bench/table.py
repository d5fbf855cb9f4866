"""`phloem bench table`: no cache, block-hash cache and radix tree on the same engine, one after the other.

Owns the comparison: sizes, order, columns. Must not know how a cache works. All but the cache manager is the same code
in each column: model, kernels, scheduler, requests; the engine runs in this process, without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from phloem.bench import metrics
from phloem.bench.block_hash import BlockHashManager
from phloem.bench.compare import differences, num_agents, pick
from phloem.bench.ideal import ModelEncoder, fill_ideal
from phloem.bench.jobs import Exchange, Job, Record
from phloem.bench.load import Run, drive
from phloem.bench.no_cache import NoCacheManager
from phloem.bench.report import write_report
from phloem.bench.serve import percent, progress_bar
from phloem.bench.text import TextModel
from phloem.bench.workloads import WORKLOADS, Sizes, make_workload
from phloem.config import EngineConfig
from phloem.engine.async_engine import AsyncEngine
from phloem.engine.loading import EngineParts, load_parts
from phloem.errors import PhloemError
from phloem.kv.manager import KVCacheManager
from phloem.models.find_model import find_model
from phloem.types import Request, SamplingParams, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Column:
    """One cache to compare."""

    label: str
    make_manager: Callable[..., KVCacheManager]
    page_size: int = 1


COLUMNS = (
    Column("no cache", NoCacheManager),
    Column("block hash", cast("Callable[..., KVCacheManager]", BlockHashManager), page_size=16),
    Column("radix tree", KVCacheManager),
)

FORMS: Mapping[str, Sizes] = {
    "quick": Sizes(turns=5, system_tokens=300, user_tokens=32, output_tokens=16),
    "long": Sizes(turns=5, system_tokens=1500, user_tokens=100, output_tokens=32),
}


class WatchedRunner:
    """A runner that notes, at each step, the K/V bytes that running requests hold: exact, however short the run."""

    def __init__(self, parts: EngineParts) -> None:
        self._runner = parts.runner
        self._manager = parts.scheduler.manager
        self._page_bytes = int(str(parts.description["kv_bytes_per_token"])) * self._manager.page_size
        self._began = time.monotonic()
        self.samples: list[tuple[float, int]] = []

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def step(self, plan: StepPlan) -> StepResult:
        held = self._manager.stats().num_pages_protected * self._page_bytes
        self.samples.append((time.monotonic() - self._began, held))
        return self._runner.step(plan)

    def close(self) -> None:
        self._runner.close()

    def restart(self) -> None:
        """Forget the samples; times count from now. Call it between requests."""
        self._began = time.monotonic()
        self.samples = []


class EngineTarget:
    """Sends jobs to an engine in this process, always with exactly `max_tokens` tokens of output."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._ids = count()

    async def send(self, exchange: Exchange) -> None:
        """Send one job; fill in its text and record."""
        record, job = exchange.record, exchange.job
        began = time.perf_counter()
        try:
            stream = await self._engine.submit(self._request(job, record))
            texts = []
            async with aclosing(stream):
                async for news in stream:
                    if news.text:
                        record.chunk_s.append(time.perf_counter() - began)
                        texts.append(news.text)
                    record.cached_tokens = news.cached_tokens
                    record.output_tokens = news.num_output_tokens
                    record.finish_reason = str(news.finish_reason or "")
                    if news.error is not None:
                        raise news.error
        except PhloemError as error:
            record.error = f"{type(error).__name__}: {error.message}"
            return
        exchange.text = "".join(texts)
        if not texts:
            record.error = "the answer has no text"

    def _request(self, job: Job, record: Record) -> Request:
        tokenizer = self._engine.tokenizer
        prompt = tokenizer.apply_chat_template(job.messages)
        record.prompt_tokens = len(prompt)
        params = SamplingParams(
            max_tokens=job.max_tokens, min_tokens=job.max_tokens, temperature=job.temperature, seed=job.seed
        )
        name = f"{record.program}/{next(self._ids)}"
        return Request(name, prompt, params, client=record.program, eos_token_ids=frozenset(tokenizer.eos_ids))


def main(argv: Sequence[str]) -> int:
    """Run the comparison. Exit code 1 when a request failed, else 0."""
    arguments = _parser().parse_args(argv)
    began = time.monotonic()
    runs = [
        asyncio.run(_measure(column, agents, arguments))
        for agents in arguments.agents
        for _ in range(arguments.repeat)
        for column in COLUMNS
    ]
    metrics.write_json(Path(arguments.json), {"format": metrics.FORMAT, "runs": runs})
    console = Console(width=None if Console().is_terminal else 140)
    console.print(as_table(runs))
    console.print(answers_words(runs))
    for note in dict.fromkeys(note for agents in arguments.agents for note in differences(_at(runs, agents))):
        console.print(f"note: {note}")
    written = arguments.json
    if arguments.report:
        written += f" and {write_report(runs, Path(arguments.report), title='What the radix tree saves')}"
    console.print(f"{(time.monotonic() - began) / 60:.1f} minutes in all; written: {written}", highlight=False)
    return 1 if any(run["summary"]["num_errors"] for run in runs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phloem bench table",
        description="Compare no cache, a block-hash cache and the radix tree on the same engine and model.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="", metavar="PATH", help="a .gguf file or a folder (default: demo model)")
    parser.add_argument("--long", action="store_true", help="long prompts: hours instead of minutes on two cores")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="agents")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 10, 100], metavar="N", help="(default: 1 10 100)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of each, in turn; medians are shown")
    parser.add_argument("--max-total-tokens", type=int, default=0, metavar="N", help="KV pool (default: all that fits)")
    parser.add_argument("--max-running-requests", type=int, default=64, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", default="bench-table.json", metavar="FILE", help="(default: bench-table.json)")
    parser.add_argument("--report", metavar="DIR", help="write the page and pictures there, too")
    return parser


async def _measure(column: Column, agents: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell of the comparison, on a fresh engine."""
    form = FORMS["long" if arguments.long else "quick"]
    sizes = Sizes(agents, form.turns, form.system_tokens, form.user_tokens, form.output_tokens)
    workload = make_workload(arguments.workload, sizes, arguments.seed)
    config = EngineConfig(
        model=str(find_model(arguments.model)),
        page_size=column.page_size,
        max_total_tokens=arguments.max_total_tokens or _ample_pool(sizes),
        max_running_requests=arguments.max_running_requests,
    )
    parts = load_parts(config, make_manager=column.make_manager)
    watched = WatchedRunner(parts)
    engine = AsyncEngine(replace(parts, runner=watched))
    try:
        target = EngineTarget(engine)
        warm_up = Job(({"role": "user", "content": TextModel("warm-up").prose(100)},), max_tokens=4)
        await target.send(Exchange(warm_up, Record("warm-up", 0)))
        await engine.flush_cache()
        before = engine.stats()
        watched.restart()
        with progress_bar(f"{column.label}, {agents} at once", workload.num_jobs) as advance:
            run = await drive(workload, target.send, on_done=lambda _record: advance())
        after = engine.stats()
        await fill_ideal(run.exchanges, ModelEncoder(engine.tokenizer))
    finally:
        engine.close()
    value = metrics.result(
        workload,
        run,
        label=column.label,
        target={"engine": engine.describe(), "counters": metrics.risen(before, after)},
        load={"concurrency": agents, "fixed_output": True},
        memory=watched.samples,
    )
    return value | {
        "memory_of": "K/V memory that running requests hold",
        "peak_kv_bytes": max(size for _, size in watched.samples),
        "answers": _digest(run),
    }


def _ample_pool(sizes: Sizes) -> int:
    """Tokens that hold all that the workload ever computes, nothing shared, at least one long context."""
    per_turn = sizes.user_tokens + sizes.output_tokens + 16
    return max(16384, int(1.3 * sizes.agents * (sizes.system_tokens + sizes.turns * per_turn)))


def _digest(run: Run) -> str:
    """A hash of all answers, the same for the same answers whatever the order in which they came."""
    answers = sorted((e.record.program, e.record.turn, e.text) for e in run.exchanges)
    return hashlib.sha256(repr(answers).encode()).hexdigest()


def _at(runs: Sequence[dict[str, Any]], agents: int) -> list[dict[str, Any]]:
    return [run for run in runs if num_agents(run) == agents]


def as_table(runs: Sequence[dict[str, Any]]) -> Table:
    """The comparison as people read it: medians over repeats, ratios to no cache at the same number of agents."""
    first = runs[0]
    facts = ", ".join(
        f"{key} {first['workload'][key]}" for key in ("turns", "system_tokens", "user_tokens", "output_tokens")
    )
    title = f"{first['workload']['name']}: {facts}; {first['target']['engine']['model']}, {first['machine']['cpu']}"
    table = Table(title=title, title_justify="left")
    for name in (
        "agents",
        "cache",
        "TTFT p50",
        "TTFT p95",
        "prompt + output",
        "hit rate",
        "of ideal",
        "peak KV",
        "time",
    ):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for agents in dict.fromkeys(num_agents(run) for run in runs):
        base: dict[str, float] = {}
        for label in dict.fromkeys(run["label"] for run in runs):
            group = [run for run in _at(runs, agents) if run["label"] == label]
            cells = _cells(group, base)
            table.add_row(str(agents) if label == first["label"] else "", label, *cells)
        table.add_section()
    return table


def _cells(group: Sequence[dict[str, Any]], base: dict[str, float]) -> list[str]:
    """Cells of one row; fills `base` with the first row's figures and compares later rows with it."""
    middle = sorted(group, key=lambda run: run["summary"]["duration_s"])[len(group) // 2]

    def figure(name: str, path: tuple[str, ...], words: Callable[[float], str]) -> str:
        value = pick(middle, path)
        if value is None:
            return "-"
        reference = base.setdefault(name, value)
        return words(value) if value == reference else f"{words(value)} ({value / reference:.2f}x)"

    return [
        figure("ttft50", ("ttft_s", "p50"), lambda s: f"{1000 * s:,.0f} ms"),
        figure("ttft95", ("ttft_s", "p95"), lambda s: f"{1000 * s:,.0f} ms"),
        figure("total", ("total_tok_per_s",), lambda rate: f"{rate:,.0f} tok/s"),
        percent(pick(middle, ("hit_rate",))),
        percent(pick(middle, ("ideal_fraction",))),
        f"{middle['peak_kv_bytes'] / 2**20:,.0f} MiB",
        f"{middle['summary']['duration_s']:.1f} s",
    ]


def answers_words(runs: Sequence[dict[str, Any]]) -> str:
    """Whether all caches gave the same answers: they must, since a cache may change no token."""
    wrong = [
        str(agents)
        for agents in dict.fromkeys(num_agents(run) for run in runs)
        if len({run["answers"] for run in _at(runs, agents)}) > 1
    ]
    if wrong:
        return f"WARNING: answers differ between caches at {', '.join(wrong)} agents"
    total = sum(run["summary"]["num_requests"] for run in runs)
    return f"the {total} answers are the same, word for word, with each cache"
