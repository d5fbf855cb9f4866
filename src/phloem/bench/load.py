"""Drives a workload: closed loop (so many programs at once) or open loop (programs start at given times).

Owns the order and the pace of requests. Must not know HTTP: `send` may be a server or an engine in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from phloem.bench.jobs import Exchange, Job, Program, Record, Session, Workload

Send = Callable[[Exchange], Awaitable[None]]
"""Sends `exchange.job`, fills in its text and record: chunk times relative to `time.perf_counter()` at its start, token
counts, finish reason, or `error`. Does not raise for what a server does wrong."""


@dataclass(slots=True)
class Run:
    """All exchanges of a run, in the order in which they were sent. `began` is on `time.perf_counter()`."""

    began: float = 0.0
    duration_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        return [exchange.record for exchange in self.exchanges]


class _Driver:
    """State of one run."""

    def __init__(self, send: Send, inflight: int, on_done: Callable[[Record], None]) -> None:
        self._send = send
        self._gate: AbstractAsyncContextManager[object] = asyncio.Semaphore(inflight) if inflight else nullcontext()
        self._on_done = on_done
        self.run = Run(began=time.perf_counter())

    def now_s(self) -> float:
        return time.perf_counter() - self.run.began

    async def program(self, program: Program) -> None:
        """Run a program to its end; an error ends it, and what it would have sent is not sent."""
        session = program.start()
        due_s = self.now_s() if program.at_s is None else program.at_s
        jobs = next(session, None)
        while jobs is not None:
            batch = [self._exchange(program.name, job, due_s) for job in jobs]
            exchanges = await asyncio.gather(*batch)
            if any(exchange.record.error for exchange in exchanges):
                session.close()
                return
            due_s = self.now_s()
            jobs = _advance(session, [exchange.text for exchange in exchanges])

    async def _exchange(self, name: str, job: Job, due_s: float) -> Exchange:
        if job.delay_s:
            await asyncio.sleep(job.delay_s)
            due_s += job.delay_s
        exchange = Exchange(job, Record(program=name, turn=job.turn, due_s=due_s))
        async with self._gate:
            exchange.record.sent_s = self.now_s()
            self.run.exchanges.append(exchange)
            await self._send(exchange)
            exchange.record.end_s = self.now_s()
        self._on_done(exchange.record)
        return exchange


def _advance(session: Session, answers: list[str]) -> Sequence[Job] | None:
    try:
        return session.send(answers)
    except StopIteration:
        return None


async def drive(
    workload: Workload,
    send: Send,
    *,
    concurrency: int = 0,
    inflight: int = 0,
    on_done: Callable[[Record], None] = lambda _record: None,
) -> Run:
    """Run a workload. Programs with a start time start then; the others run `concurrency` at a time (0: all at once).

    `inflight` caps the requests under way at once (0: no cap); what waits for it is not yet sent, so not in its TTFT.
    """
    driver = _Driver(send, inflight, on_done)
    timed = [program for program in workload.programs if program.at_s is not None]
    queue = iter([program for program in workload.programs if program.at_s is None])

    async def at_its_time(program: Program) -> None:
        await asyncio.sleep(max(0.0, (program.at_s or 0.0) - driver.now_s()))
        await driver.program(program)

    async def worker() -> None:
        for program in queue:
            await driver.program(program)

    num_workers = min(concurrency or len(workload.programs), len(workload.programs) - len(timed))
    await asyncio.gather(*[worker() for _ in range(num_workers)], *[at_its_time(program) for program in timed])
    driver.run.duration_s = driver.now_s()
    return driver.run


def poisson(workload: Workload, rate: float, seed: int) -> Workload:
    """The workload as an open loop: programs start `rate` a second on average, at exponential distances."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(workload.programs))
    programs = [replace(p, at_s=float(at)) for p, at in zip(workload.programs, np.cumsum(gaps), strict=True)]
    return replace(workload, programs=tuple(programs))
