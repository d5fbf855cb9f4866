"""Client, load loops and figures against a fake server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phloem.bench import http, metrics, serve
from phloem.bench.client import OpenAIClient, ServerError, read_events
from phloem.bench.jobs import Exchange, Job, Program, Record, Session, Workload
from phloem.bench.load import drive, poisson
from phloem.bench.process import MemoryWatch, ServerProcess, free_port
from phloem.bench.workloads import WORKLOADS, Sizes, make_workload
from phloem.errors import UsageError
from tests.unit.bench.fake_server import FakeServer, running

SMALL = Sizes(agents=3, turns=2, system_tokens=50, user_tokens=10, output_tokens=4, branches=2, groups=2)


async def run_against(server: FakeServer, workload: Workload, **how: int) -> dict[str, object]:
    async with running(server) as url:
        client = OpenAIClient(url)
        await client.connect()
        run = await drive(workload, client.send, **how)
        client.close()
    return metrics.result(workload, run, label="fake", target={}, load=how)


@pytest.mark.parametrize("name", WORKLOADS)
async def test_each_workload_sends_the_jobs_it_announced(name: str) -> None:
    server = FakeServer()
    workload = make_workload(name, SMALL, 1)
    value = await run_against(server, workload)
    figures = value["summary"]
    assert isinstance(figures, dict)
    assert figures["num_errors"] == 0
    assert figures["num_requests"] == workload.num_jobs == len(server.bodies)
    assert figures["output_tokens"] == 4 * workload.num_jobs
    prompts = sum(len(str(m["content"]).split()) for body in server.bodies for m in body["messages"])
    assert figures["prompt_tokens"] == prompts
    assert figures["hit_rate"] == pytest.approx(0.5, abs=0.02)


async def test_a_turn_carries_the_answer_to_the_turn_before() -> None:
    server = FakeServer()
    await run_against(server, make_workload("chat", SMALL, 0), concurrency=1)
    first, second = server.bodies[:2]
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert second["messages"][len(first["messages"])] == {"role": "assistant", "content": " w0 w1 w2 w3"}


async def test_the_same_seed_sends_the_same_requests() -> None:
    bodies = []
    for seed in (7, 7, 8):
        server = FakeServer()
        await run_against(server, make_workload("agents", SMALL, seed), concurrency=1)
        bodies.append(server.bodies)
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]


@pytest.mark.parametrize(("how", "peak"), [({"concurrency": 2}, 2), ({"inflight": 1}, 1), ({}, 3)])
async def test_limits_hold(how: dict[str, int], peak: int) -> None:
    server = FakeServer(gap_s=0.002)
    await run_against(server, make_workload("agents", SMALL, 0), **how)
    assert server.peak_open == peak


async def test_an_error_ends_its_program_and_is_counted() -> None:
    server = FakeServer(fail_every=3)
    value = await run_against(server, make_workload("chat", SMALL, 0), concurrency=1)
    figures = value["summary"]
    assert isinstance(figures, dict)
    # Requests 1 and 2 are chat 0; 3 fails and ends chat 1; 4 and 5 are chat 2.
    assert figures["num_requests"] == 5
    assert figures["errors"] == {"HTTP 429: queue full": 1}


async def test_an_open_loop_keeps_its_times() -> None:
    workload = poisson(make_workload("extract", SMALL, 0), 50.0, seed=3)
    starts = [program.at_s for program in workload.programs]
    assert starts == [program.at_s for program in poisson(workload, 50.0, seed=3).programs]
    server = FakeServer(gap_s=0.02)
    value = await run_against(server, workload)
    requests = value["requests"]
    assert isinstance(requests, list)
    sent = sorted(request["sent_s"] for request in requests)
    assert all(0.0 <= at - due < 0.1 for at, due in zip(sent, starts, strict=True))


def test_poisson_has_the_rate_that_was_asked() -> None:
    programs = tuple(Program(str(i), lambda: iter(()), 1) for i in range(2000))  # type: ignore[arg-type,return-value]
    last = poisson(Workload("w", {}, programs), 4.0, seed=0).programs[-1].at_s
    assert last == pytest.approx(500, rel=0.1)


async def test_until_close_framing_works_too() -> None:
    value = await run_against(FakeServer(framing="close"), make_workload("extract", SMALL, 0))
    assert isinstance(value["summary"], dict)
    assert value["summary"]["num_errors"] == 0


def events(*values: object) -> list[bytes]:
    return [json.dumps(v).encode() for v in values] + [b"[DONE]"]


def text(content: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


def read(stream: list[bytes], times: Sequence[float] = (1.0, 2.0, 3.0, 4.0, 5.0)) -> Exchange:
    exchange = Exchange(Job(prompt="x"), Record("p", 0))
    read_events(exchange, stream, list(times))
    return exchange


def test_ttft_is_the_first_text_not_the_role_chunk() -> None:
    exchange = read(events(text(""), text("a"), text("b"), {"choices": [], "usage": {"prompt_tokens": 9}}))
    assert exchange.record.chunk_s == [2.0, 3.0]
    assert (exchange.text, exchange.record.prompt_tokens, exchange.record.output_tokens) == ("ab", 9, 2)
    assert exchange.record.cached_tokens is None


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}, 0),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}, None),
        ({"usage": {"prompt_tokens": 9}, "timings": {"cache_n": 5}}, 5),
    ],
)
def test_cached_tokens_are_read_where_servers_put_them(usage: dict[str, object], cached: int | None) -> None:
    assert read(events(text("a"), {"choices": [], **usage})).record.cached_tokens == cached


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ([b"{broken"], "not JSON"),
        (events({"error": {"message": "out of memory"}}), "out of memory"),
        (events(text("a"))[:-1], "without [DONE]"),
        (events(text("")), "no text"),
    ],
)
def test_bad_streams_are_errors(stream: list[bytes], error: str) -> None:
    assert error in read(stream).record.error


async def test_no_server_is_one_clear_error() -> None:
    client = OpenAIClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServerError, match="no server at"):
        await client.connect()
    exchange = Exchange(Job(prompt="x"), Record("p", 0))
    await client.send(exchange)
    assert "Connect" in exchange.record.error


def test_figures_of_known_records() -> None:
    records = [
        Record("a", 0, 0.0, 0.0, 1.0, [0.2, 0.4, 0.8], 10, 3, 0, 0),
        Record("a", 1, 1.0, 1.0, 2.0, [0.4, 0.5, 0.6], 30, 3, 12, 16),
        Record("b", 0, 0.0, 0.0, 2.0, error="HTTP 500: no"),
    ]
    figures = metrics.summarise(records, 2.0)
    assert (figures["num_requests"], figures["num_errors"], figures["errors"]) == (3, 1, {"HTTP 500: no": 1})
    assert figures["ttft_s"]["p50"] == pytest.approx(0.3)
    assert figures["itl_s"]["max"] == pytest.approx(0.4)
    assert figures["tpot_s"]["mean"] == pytest.approx((0.3 + 0.1) / 2)
    assert figures["latency_s"]["max"] == 1.0
    assert (figures["output_tok_per_s"], figures["total_tok_per_s"]) == (3.0, 23.0)
    assert (figures["hit_rate"], figures["ideal_hit_rate"], figures["ideal_fraction"]) == (0.3, 0.4, 0.75)
    assert [turn["hit_rate"] for turn in figures["turns"]] == [0.0, 0.4]


def test_figures_of_nothing_are_no_error() -> None:
    figures = metrics.summarise([Record("b", 0, error="x")], 1.0)
    assert figures["ttft_s"] == {}
    assert figures["hit_rate"] is None


def test_the_command_writes_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Path(__file__).with_name("fake_server.py")
    server = subprocess.Popen([sys.executable, str(program), "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
        code = serve.main(["--url", url, "--agents", "2", "--turns", "2", "--pid", str(server.pid), *files])
    finally:
        server.kill()
        server.communicate()
    assert code == 0
    (value,) = metrics.read_results(tmp_path / "r.json")
    assert value["summary"]["num_requests"] == 4
    assert value["memory"][0][1] > 1 << 20
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 5
    shown = capsys.readouterr()
    assert "TTFT" in shown.out
    assert "ideal" in shown.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workload", "replay"], "needs a file"),
        (["--replay", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--data", "missing"], "cannot read missing/bfcl"),
        (["--data", "x", "--workload", "chat"], "--data goes with"),
        (["--turns", "0"], "--turns must be at least 1"),
        (["--url", "http://127.0.0.1:1", "--", "--max-total-tokens", "9"], "do not go with --url"),
    ],
)
def test_wrong_usage_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        serve.main(argv)


def test_a_server_that_dies_at_start_is_reported_with_its_log(tmp_path: Path) -> None:
    async def start() -> None:
        with ServerProcess(["sh", "-c", "echo no room; exit 3"], free_port(), log=tmp_path / "log") as server:
            await server.wait_ready(10)

    with pytest.raises(ServerError, match="exit code 3: no room"):
        http.run(start())


async def test_memory_is_sampled() -> None:
    async with MemoryWatch(os.getpid()) as watch:
        await asyncio.sleep(0)
    (begin_s, begin), (end_s, end) = watch.samples
    assert begin_s <= end_s, "a sample at either end, however short the run"
    assert min(begin, end) > 1 << 20


def test_a_session_may_send_several_jobs_at_once() -> None:
    seen: list[list[str]] = []

    def session() -> Session:
        seen.append((yield [Job(prompt="a"), Job(prompt="b")]))

    async def send(exchange: Exchange) -> None:
        exchange.text = exchange.job.prompt.upper()
        exchange.record.chunk_s.append(0.0)

    http.run(drive(Workload("w", {}, (Program("p", session, 2),)), send))
    assert seen == [["A", "B"]]
