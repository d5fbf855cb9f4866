"""The engine thread: the one owner of scheduler, cache and runner.

Others send commands, which run between steps, and receive TokenDeltas through `deliver`, called on this thread.
Must not know asyncio, text or HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from typing import Literal, TypeVar

from phloem.errors import EngineUnavailableError, PhloemError, StepFailedError
from phloem.kv.manager import CacheStats
from phloem.sched.scheduler import Scheduler, SchedulerStats
from phloem.types import ModelRunner, Request, StepPlan, TokenDelta

T = TypeVar("T")
EngineState = Literal["ready", "draining", "stopped", "failed"]
logger = logging.getLogger(__name__)

MIXED_STEP_S = 0.25
"""A step in which sequences decode should not take longer than this because of prefill rows in it."""

JOIN_S = 0.04
"""A step in which a prompt finishes should not take this much longer because of prompts that can go into the next."""

_IDLE_RETRY_S = 0.01


class EngineCore:
    """Runs steps while there is work and sleeps while there is none.

    `submit`, `abort`, `call`, `drain` and `stop` may be called from any thread. `deliver` and `on_failure` are called
    on the engine thread. After a bug in the scheduler or cache the state is `failed`: `on_failure` gets the error with
    which every live request must be answered, and new ones are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        deliver: Callable[[list[TokenDelta]], None],
        on_failure: Callable[[PhloemError], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._on_failure = on_failure
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._released = False
        self._stopping = False
        self._seconds_per_row = 0.0
        self.state: EngineState = "ready"
        self.snapshot: dict[str, float] = {}
        self._publish()
        self._thread = threading.Thread(target=self._run, name="phloem-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call once."""
        self._thread.start()

    def submit(self, request: Request) -> Future[None]:
        """Queue a request. The future raises QueueFullError or EngineUnavailableError when it is refused."""

        def add() -> None:
            if self.state != "ready":
                raise EngineUnavailableError(f"the engine is {self.state}; it takes no new requests")
            self._scheduler.add(request, now_s=self._clock())

        return self.call(add)

    def abort(self, request_id: str, index: int | None = None) -> Future[bool]:
        """End a request, or one of its sequences; the future says whether anything was live."""
        return self.call(lambda: self._scheduler.abort(request_id, index))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread, between steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._gate:
            if self._closed:
                future.set_exception(EngineUnavailableError(f"the engine is {self.state}"))
            else:
                self._commands.put(command)
        return future

    def flush(self, *, namespace_id: int | None = None) -> Future[int]:
        """Drop all cached K/V that no request uses; the future gives the number of pages freed."""
        return self.call(lambda: self._scheduler.manager.flush(namespace_id))

    def drain(self) -> None:
        """Take no new requests; those that are queued or running go on."""
        if self.state == "ready":
            self.state = "draining"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End what is live with an error and stop the thread. Idempotent."""
        self.drain()
        self._stopping = True
        self._commands.put(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("the engine thread did not stop within %.0f s", timeout_s)
                return
        else:
            self._close()
        if not self._released:
            self._released = True
            self._runner.close()

    # --- the engine thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                if self._scheduler.has_work and not self._stopping:
                    self._step()
        except Exception as error:
            logger.exception("the engine failed")
            self.state = "failed"
            self._on_failure(EngineUnavailableError(f"the engine failed ({type(error).__name__}); restart the server"))
        else:
            self.state = "stopped"
            self._scheduler.abort_all(EngineUnavailableError("the engine was stopped before the request was finished"))
            self._send(self._scheduler.take_ended())
        self._close()

    def _run_commands(self) -> None:
        """Run what was sent; wait for the next command when there is nothing else to do."""
        wait = not self._scheduler.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            if self._commands.empty():
                self._publish()
            wait = False

    def _step(self) -> None:
        began = self._clock()
        plan = self._scheduler.schedule(now_s=began)
        if plan is None:
            self._publish()
            self._send(self._scheduler.take_ended())
            if self._scheduler.has_work:
                time.sleep(_IDLE_RETRY_S)
            return
        try:
            result = self._runner.step(plan)
        except Exception as error:
            logger.exception("step %d with %d rows failed", plan.step_id, plan.num_rows)
            message = f"the forward pass failed ({type(error).__name__}); the request may be sent again"
            deltas = self._scheduler.fail(plan.step_id, StepFailedError(message))
        else:
            deltas = self._scheduler.update(result)
            self._learn_speed(plan, self._clock() - began)
        self._publish()
        self._send(deltas)

    def _learn_speed(self, plan: StepPlan, seconds: float) -> None:
        """Size prefill in mixed steps by the measured time of a row. No result depends on it: rows are canonical."""
        if plan.num_rows < 32 or seconds <= 0.0:
            return
        per_row = seconds / plan.num_rows
        old = self._seconds_per_row or per_row
        self._seconds_per_row = old + 0.2 * (per_row - old)
        scheduler = self._scheduler
        scheduler.tokens_per_s = 1.0 / self._seconds_per_row
        scheduler.mixed_prefill_rows = self._rows_in(MIXED_STEP_S)
        scheduler.join_rows = self._rows_in(JOIN_S)

    def _rows_in(self, seconds: float) -> int:
        """Prefill rows that take about so long: at least 16, at most a chunk."""
        return max(16, min(self._scheduler.chunk_size, int(seconds / self._seconds_per_row)))

    def _publish(self) -> None:
        scheduler = self._scheduler
        self.snapshot = {
            **_counters(scheduler.stats),
            **_counters(scheduler.manager.stats(), "kv_"),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.backlog),
        }

    def _send(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._deliver(deltas)

    def _close(self) -> None:
        """From here on commands are refused; those that came before run against the final state."""
        with self._gate:
            self._closed = True
        while True:
            try:
                self._commands.get(block=False)()
            except queue.Empty:
                return


def _counters(record: SchedulerStats | CacheStats, prefix: str = "") -> dict[str, float]:
    return {prefix + field.name: getattr(record, field.name) for field in fields(record)}
