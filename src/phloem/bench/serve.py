"""`phloem bench serve`: a load client for any OpenAI-compatible server.

Owns the command line of the load client and what it prints. Must not know how figures are defined.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phloem.bench import http, metrics
from phloem.bench.client import OpenAIClient, ServerError
from phloem.bench.ideal import ModelEncoder, ServerEncoder, fill_ideal
from phloem.bench.jobs import Exchange, Job, Record, Workload
from phloem.bench.load import Run, drive, poisson
from phloem.bench.process import MemoryWatch, ServerProcess, phloem_server
from phloem.bench.real_data import ReplayOptions, replay, task_agents
from phloem.bench.text import TextModel
from phloem.bench.workloads import WORKLOADS, Sizes, make_workload
from phloem.errors import UsageError

EPILOG = """\
examples:
  phloem bench serve                                        agents against a local phloem with the demo model
  phloem bench serve --workload chat --agents 32 -- --max-total-tokens 20000
                                                            the same with flags for `phloem serve`
  phloem bench serve --url http://127.0.0.1:8080 --tokenizer model.gguf
                                                            another server; the tokeniser gives the ideal hit rate
"""


def main(argv: Sequence[str]) -> int:
    """Run the load client. Exit code 0 when every request succeeded, else 1."""
    own, server_arguments = _split(argv)
    arguments = _parser().parse_args(own)
    if arguments.url and server_arguments:
        raise UsageError("arguments after -- are for a server started here; they do not go with --url")
    value = http.run(_measure(arguments, server_arguments))
    if arguments.json:
        metrics.write_json(Path(arguments.json), value)
    if arguments.csv:
        metrics.write_csv(Path(arguments.csv), value)
    show(value)
    return 1 if value["summary"]["num_errors"] else 0


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a workload and its sizes."""
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=[*WORKLOADS, "replay"], default="agents")
    for field in fields(Sizes):
        kind = int if isinstance(field.default, int) else float
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            default=field.default,
            metavar="N",
            help=f"{field.metadata['help']} (default: {field.default})",
        )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same workload (default: 0)")
    group.add_argument("--data", metavar="DIR", help="folder with bfcl/: real tools and tasks for `agents`")
    group.add_argument("--replay", metavar="FILE", help="JSONL of OpenAI requests, or of the Mooncake trace schema")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="replay at X times the recorded pace")
    group.add_argument("--scale", type=float, default=1.0, metavar="X", help="scale the lengths of a Mooncake trace")
    group.add_argument("--limit", type=int, default=0, metavar="N", help="replay at most N requests")


def chosen_workload(arguments: argparse.Namespace) -> Workload:
    """The workload that the flags of `add_workload_flags` ask for. Raises UsageError."""
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    for name in ("agents", "turns", "branches", "groups", "output_tokens"):
        if getattr(sizes, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(sizes, name)}")
    if arguments.replay or arguments.workload == "replay":
        if not arguments.replay:
            raise UsageError("the workload `replay` needs a file: --replay FILE")
        return replay(Path(arguments.replay), ReplayOptions(arguments.speed, arguments.scale, arguments.limit))
    if arguments.data:
        if arguments.workload != "agents":
            raise UsageError(f"--data goes with the workload `agents`, not with `{arguments.workload}`")
        return task_agents(Path(arguments.data), sizes, arguments.seed)
    return make_workload(arguments.workload, sizes, arguments.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phloem bench serve",
        description="Load an OpenAI-compatible server and measure it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    target = parser.add_argument_group("server")
    target.add_argument("--url", metavar="URL", help="server to measure; absent: a local phloem is started and stopped")
    target.add_argument("--model", default="", metavar="NAME", help="model to ask for; absent: the first one served")
    target.add_argument("--api-key", default="", metavar="KEY")
    target.add_argument(
        "--tokenizer", metavar="PATH", help="the served model: .gguf or folder; gives the ideal hit rate"
    )
    target.add_argument("--pid", type=int, metavar="N", help="process of the server at --url, to sample its memory")
    target.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait for an answer")
    add_workload_flags(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, default=0, metavar="N", help="programs at once (default: all)")
    load.add_argument("--inflight", type=int, default=0, metavar="N", help="requests at once (default: no limit)")
    load.add_argument("--rate", type=float, default=0.0, metavar="X", help="open loop: X programs a second, Poisson")
    load.add_argument("--fixed-output", action="store_true", help="ask for exactly --output-tokens tokens each")
    load.add_argument("--warm", action="store_true", help="keep what the server has cached; else it is flushed first")
    out = parser.add_argument_group("output")
    out.add_argument("--label", default="", metavar="TEXT", help="name of this run in comparisons")
    out.add_argument("--json", metavar="FILE", help="write figures and every request")
    out.add_argument("--csv", metavar="FILE", help="write one line per request")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


async def _measure(arguments: argparse.Namespace, server_arguments: list[str]) -> dict[str, Any]:
    workload = chosen_workload(arguments)
    if arguments.rate:
        workload = poisson(workload, arguments.rate, arguments.seed)
    server: ServerProcess | None = None
    if not arguments.url:
        server = phloem_server(server_arguments, log=Path(mkdtemp(prefix="phloem-bench-")) / "server.log")
    client = OpenAIClient(
        server.url if server else arguments.url,
        model=arguments.model,
        api_key=arguments.api_key,
        fixed_output=arguments.fixed_output,
        timeout_s=arguments.timeout,
    )
    try:
        if server:
            await server.wait_ready()
        await client.connect()
        pid = server.pid if server else arguments.pid
        run, memory, counters = await measure(client, workload, arguments, pid=pid)
        await find_ideal(run, client, arguments.tokenizer)
    finally:
        client.close()
        if server:
            server.stop()
    return metrics.result(
        workload,
        run,
        label=arguments.label or ("phloem" if server else client.model),
        target={
            "url": client.url,
            "model": client.model,
            "started_here": server is not None,
            "arguments": server_arguments,
            "counters": counters,
        },
        load={name: getattr(arguments, name) for name in ("concurrency", "inflight", "rate", "fixed_output", "warm")},
        memory=memory,
    )


async def measure(
    client: OpenAIClient, workload: Workload, arguments: argparse.Namespace, *, pid: int | None
) -> tuple[Run, list[tuple[float, int]], dict[str, float]]:
    """Warm up, flush unless told not to, drive the workload.

    Returns the run, memory samples of `pid`, and how far the server's own counters rose where it shows them.
    """
    for index in range(2):
        prompt = TextModel("warm-up", index).prose(60)
        await client.send(Exchange(Job(({"role": "user", "content": prompt},), max_tokens=8), Record("warm-up", index)))
    if not arguments.warm:
        await client.call("POST", "/flush_cache")
    before = await _counters(client)
    with progress_bar(workload.name, workload.num_jobs) as advance:
        async with MemoryWatch(pid) as watch:
            run = await drive(
                workload,
                client.send,
                concurrency=arguments.concurrency,
                inflight=arguments.inflight,
                on_done=lambda _record: advance(),
            )
    return run, watch.samples, metrics.risen(before, await _counters(client))


async def _counters(client: OpenAIClient) -> dict[str, float]:
    info = await client.call("GET", "/server_info")
    return dict(info["stats"]) if isinstance(info, dict) and "stats" in info else {}


async def find_ideal(run: Run, client: OpenAIClient, tokenizer: str | None) -> None:
    """Fill in the ideal hits, by the tokeniser of that model or by the server's own; say so where that is not had."""
    try:
        encoder = ModelEncoder.load(Path(tokenizer)) if tokenizer else ServerEncoder(client)
        counted = await fill_ideal(run.exchanges, encoder)
    except ServerError as error:
        print(f"phloem: ideal hit rate unknown: {error.message}", file=sys.stderr)
        return
    served = sum(record.prompt_tokens for record in run.records if not record.error)
    if counted != served:
        print(
            f"phloem: warning: the tokeniser counts {counted} prompt tokens where the server reports {served}; "
            "the ideal hit rate is off by as much",
            file=sys.stderr,
        )


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, none where that is no terminal. Yields what to call at each end of a request."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def show(value: dict[str, Any]) -> None:
    """Print the figures of one run on standard output."""
    figures = value["summary"]
    workload = value["workload"]
    console = Console()
    title = f"{value['label']}: {workload['name']}, {figures['num_requests']} requests in {figures['duration_s']:.1f} s"
    times = Table(title=title, title_justify="left")
    for name in ("milliseconds", "mean", "p50", "p90", "p95", "p99", "max"):
        times.add_column(name, justify="left" if name == "milliseconds" else "right")
    for key, name in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("tpot_s", "TPOT"), ("latency_s", "latency")):
        spread = figures[key]
        cells = [f"{1000 * spread[p]:,.1f}" if spread else "-" for p in ("mean", "p50", "p90", "p95", "p99", "max")]
        times.add_row(name, *cells)
    console.print(times)
    console.print(
        f"output {figures['output_tok_per_s']:,.1f} tok/s, prompt and output {figures['total_tok_per_s']:,.1f} tok/s, "
        f"{figures['requests_per_s']:.2f} requests/s; {figures['prompt_tokens']:,} prompt tokens, "
        f"{figures['output_tokens']:,} output tokens"
    )
    console.print(f"hit rate {percent(figures['hit_rate'])}; {ideal_words(figures)}")
    console.print(server_words(value), end="")
    if figures["num_errors"]:
        console.print(f"[bold red]{figures['num_errors']} requests failed[/]: {figures['errors']}")


def server_words(value: dict[str, Any]) -> str:
    """Evictions, retractions and memory, as far as they are known; else nothing."""
    counters, memory = value["target"].get("counters"), value["memory"]
    words = ""
    if counters:
        words += (
            f"server: {counters['kv_num_evicted_pages']:,.0f} pages evicted, {counters['num_retractions']:,.0f} "
            f"retractions, {counters['num_failed']:,.0f} failed\n"
        )
    if memory:
        sizes = [size / 2**20 for _, size in memory]
        middle = sizes[len(sizes) // 2]
        words += f"memory: {sizes[0]:,.0f} MiB at the start, {middle:,.0f} half-way, {sizes[-1]:,.0f} at the end\n"
    return words


def ideal_words(figures: dict[str, Any]) -> str:
    """The ideal hit rate and how much of it was reached, or how to get it."""
    if figures["ideal_hit_rate"] is None:
        return "ideal unknown (give --tokenizer)"
    reached = f", reached {percent(figures['ideal_fraction'])} of it" if figures["ideal_fraction"] is not None else ""
    return f"ideal {percent(figures['ideal_hit_rate'])}{reached}"


def percent(value: float | None) -> str:
    """A share as people read it; `not reported` for None."""
    return "not reported" if value is None else f"{100 * value:.1f} %"
