"""The scheduler: decides the rows of each step, and turns a step's result into news for each sequence.

Owns every sequence from arrival to its terminal answer, and the slot table. Pure policy over the
cache manager: no torch, no runner, no clock (times are arguments). One thread calls it.

    WAITING --admit: match, lock--> RUNNING --end of text, limit, abort, error: unlock--> FINISHED
       ^                               |
       +------ retract: unlock --------+
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from phloem.config import SchedulePolicy
from phloem.errors import PhloemError, QueueFullError, RequestTimeoutError
from phloem.kv.manager import KVCacheManager
from phloem.sched.backlog import Backlog
from phloem.sched.budget import PrefillBudget
from phloem.sched.plan import PlanBuilder
from phloem.sched.policy import OVERDUE_PASSES, OutputEstimate
from phloem.sched.sequence import Sequence, Status, make_sequence
from phloem.types import (
    FinishReason,
    Int32Array,
    Request,
    StepPlan,
    StepResult,
    TokenDelta,
    TokenLogprob,
    TopLogprobs,
)

MIN_PREFILL_ROWS = 16
"""Prefill gets this many rows of each step, however many sequences decode."""

PATH_STRIDE = 64
"""Sequences are told apart by their slots at every so many positions: neighbours in a step share at least as much."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; they only rise."""

    num_steps: int = 0
    num_prefill_rows: int = 0
    num_decode_rows: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_retractions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_deduplicated_tokens: int = 0
    num_output_tokens: int = 0


class Scheduler:
    """Continuous batching around the radix tree.

    `schedule` and `update` alternate; between them `add`, `abort` and `fail` are not called.
    `mixed_prefill_rows` caps prefill in a step that also decodes, `join_rows` what may be added to a step in which a
    prompt finishes, and `tokens_per_s` scales aging: the engine sets them from measured step times.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_model_len: int,
        max_running: int = 64,
        max_waiting: int = 4096,
        chunk_size: int = 512,
        policy: SchedulePolicy = "cache-aware",
    ) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.chunk_size = chunk_size
        self.mixed_prefill_rows = chunk_size
        self.join_rows = chunk_size
        self.tokens_per_s = 500.0
        self.stats = SchedulerStats()
        self.estimate = OutputEstimate()
        self.backlog = Backlog(manager, policy)
        self.running: list[Sequence] = []
        self._slot_table = np.zeros((max_running, max_model_len), dtype=np.int32)
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._sequences: dict[str, dict[int, Sequence]] = {}
        self._num_arrivals = 0
        self._num_admissions = 0
        self._step_id = 0
        self._plan: PlanBuilder | None = None
        # A step that had to retract admits nobody: the pages are for those that run.
        self._memory_is_short = False
        self._ended: list[TokenDelta] = []
        self._deadlines: list[tuple[float, str]] = []

    # --- what callers ask for ---

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus output that can be served: the context, or the pool where that is smaller.

        The last token of a sequence needs no slot: its K/V is never computed.
        """
        return min(self.max_model_len, self.manager.num_slots + 1)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.backlog) or self._ended)

    def add(self, request: Request, *, now_s: float) -> None:
        """Queue all n sequences of a request. Raises QueueFullError, then nothing of it is queued.

        The caller has checked the prompt against `max_sequence_tokens`.
        """
        num_prompt = len(request.prompt)
        assert 0 < num_prompt <= self.max_sequence_tokens
        if len(self.backlog) + request.n > self.max_waiting:
            raise QueueFullError(
                f"{len(self.backlog)} sequences wait already and the limit is {self.max_waiting}; try again later"
            )
        limit = self.max_sequence_tokens - num_prompt
        wanted = request.params.max_tokens
        namespace_id = self.manager.namespace_id(request.namespace)
        for index in range(request.n):
            sequence = make_sequence(
                request,
                index,
                arrival=self._num_arrivals,
                namespace_id=namespace_id,
                client_id=self.backlog.shares.enter(request.client),
                max_total=num_prompt + (limit if wanted is None else min(limit, wanted)),
            )
            self._num_arrivals += 1
            self._sequences.setdefault(request.request_id, {})[index] = sequence
            self.backlog.add(sequence, now_s=now_s)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))

    def abort(self, request_id: str, index: int | None = None, *, error: PhloemError | None = None) -> bool:
        """End all sequences of a request, or one; False when none is live. The K/V stays in the tree."""
        of_request = self._sequences.get(request_id, {})
        live = [sequence for i, sequence in of_request.items() if index is None or i == index]
        for sequence in live:
            reason = FinishReason.ABORT if error is None else FinishReason.ERROR
            self._ended.append(self._end(sequence, reason, error=error))
        return bool(live)

    def abort_all(self, error: PhloemError) -> None:
        """End every live sequence with an error."""
        for request_id in list(self._sequences):
            self.abort(request_id, error=error)

    # --- one step ---

    def schedule(self, *, now_s: float) -> StepPlan | None:
        """Choose the rows of the next step; None when there is nothing to compute.

        Running sequences come first, then admissions. The tokens of all rows are in the tree, as pending, when this
        returns. Cost: O(rows), plus O(waiting log waiting) in array operations while sequences can be admitted.
        """
        self._expire(now_s)
        self._preempt(now_s)
        self._memory_is_short = False
        while True:
            self._step_id += 1
            plan = PlanBuilder(self._step_id, self._slot_table)
            self._schedule_decodes(plan, now_s)
            self._schedule_prefills(plan, now_s)
            if plan.num_rows or not self.running:
                break
            # Every running sequence lacks pages for its next token: the newest one gives way.
            self._memory_is_short = len(self.running) > 1
            self._retract(self.running[-1], now_s)
        self._plan = plan if plan.num_rows else None
        if self._plan is None:
            return None
        self.stats.num_steps += 1
        return plan.build()

    def update(self, result: StepResult) -> list[TokenDelta]:
        """Take in the result of the plan last scheduled; return the news, in the order of the plan."""
        plan = self._take_plan(result.step_id)
        self.manager.complete(result.step_id)
        deltas = self.take_ended()
        results = zip(result.token_ids.tolist(), result.logprobs.tolist(), result.top, strict=True)
        for sequence, row, (token_id, logprob, top) in zip(plan.drawing, plan.logit_rows, results, strict=True):
            if row.target < 0:
                deltas.append(self._take_token(sequence, token_id, logprob, top))
                continue
            sequence.num_scored += 1
            if sequence.num_scored >= sequence.request.score_from:
                sequence.prompt_logprobs.append(_token_logprob(token_id, logprob, top))
        num_pooled = 0
        for sequence, count in plan.pooling:
            sequence.pool(result.hidden[num_pooled : num_pooled + count])
            num_pooled += count
        for sequence in plan.silent:
            if sequence.status is Status.RUNNING and not sequence.needs_rows:
                deltas.append(self._end(sequence, FinishReason.LENGTH))
        return deltas

    def fail(self, step_id: int, error: PhloemError) -> list[TokenDelta]:
        """The step failed: end its sequences with `error`, drop their pending nodes; the others go on."""
        plan = self._take_plan(step_id)
        deltas = self.take_ended()
        deltas += [self._end(sequence, FinishReason.ERROR, error=error) for sequence in plan.sequences]
        self.manager.discard(step_id)
        return deltas

    def take_ended(self) -> list[TokenDelta]:
        """Terminal answers of sequences that ended outside a step (aborted, timed out)."""
        ended, self._ended = self._ended, []
        return ended

    # --- rows of running sequences ---

    def _schedule_decodes(self, plan: PlanBuilder, now_s: float) -> None:
        """One row for each sequence that only lacks its last token's K/V; retract from the newest where pages lack."""
        batch = [s for s in self.running if s.is_decoding]
        if not batch:
            return
        write_slots = np.empty(len(batch), dtype=np.int32)
        num_done = 0
        while num_done < len(batch):
            num_done += self._extend(plan.step_id, batch[num_done:], write_slots[num_done:])
            if num_done < len(batch):
                # The newest is last in the batch or not in it, so nothing of this step is pending for it.
                victim = self.running[-1]
                if batch[-1] is victim:
                    batch.pop()
                self._memory_is_short = True
                self._retract(victim, now_s)
        if not batch:
            return
        plan.add_decode_rows(batch, write_slots[:num_done])
        self.stats.num_decode_rows += num_done
        self.backlog.shares.charge_decodes([s.client_id for s in batch])

    def _extend(self, step_id: int, batch: list[Sequence], write_slots: Int32Array) -> int:
        """Give each sequence a place for its last token, in order; return how many got one."""
        cursors = np.array([s.cursor for s in batch], dtype=np.int64)
        tokens = np.array([s.tokens.item(s.num_computed) for s in batch], dtype=np.int32)
        slots = np.empty(len(batch), dtype=np.int32)
        writes = np.empty(len(batch), dtype=np.uint8)
        moved_from = np.empty(len(batch), dtype=np.int32)
        num_done = self.manager.extend(cursors, tokens, step_id, slots, writes, moved_from)
        done = batch[:num_done]
        self._slot_table[[s.table_row for s in done], [s.num_computed for s in done]] = slots[:num_done]
        write_slots[:num_done] = np.where(writes[:num_done], slots[:num_done], -1)
        for sequence in done:
            sequence.num_computed += 1
            if sequence.num_tokens == sequence.num_prompt:
                sequence.note_prompt_rows(1)
        for i in np.flatnonzero(moved_from[:num_done] >= 0).tolist():
            # The page that filled was there already: the sequence goes on with that one.
            self._fill_slots(done[i], int(moved_from[i]))
        return num_done

    def _schedule_prefills(self, plan: PlanBuilder, now_s: float) -> None:
        """Spend the step's rows on prompts: first those that run, then admissions, then what is left over."""
        # Mostly all decode and nobody waits or wants more: then there is no need to ask each.
        prefilling = [s for s in self.running if s.needs_rows] if plan.num_rows < len(self.running) else []
        contested = len(prefilling) + len(self.backlog) > 1
        num_rows = max(self.chunk_size - plan.num_rows, min(self.chunk_size, MIN_PREFILL_ROWS))
        if plan.num_rows:
            num_rows = min(num_rows, max(self.mixed_prefill_rows, 1))
        budget = PrefillBudget(num_rows, max(1, num_rows // 2) if contested else num_rows, self.join_rows)
        for sequence in prefilling:
            self._prefill(plan, sequence, budget)
        admitted = self._admit(plan, budget, now_s) if len(self.backlog) else []
        budget.share = budget.num_left
        for sequence in [*prefilling, *admitted]:
            if sequence.needs_rows:
                self._prefill(plan, sequence, budget)

    def _prefill(self, plan: PlanBuilder, sequence: Sequence, budget: PrefillBudget) -> None:
        """Add the rows of a prompt that the budget offers, or as many as there are pages for."""
        manager = self.manager
        max_rows = budget.offer(self._rows_wanted(sequence))
        # Filling a page may change it for an equal one; rows of this step may be about to write the old one.
        is_inside_page = sequence.num_computed % manager.page_size > 0
        if max_rows <= 0 or ((sequence.is_scoring or is_inside_page) and plan.has(sequence)):
            return
        tokens = sequence.tokens[: sequence.num_tokens]
        if sequence.num_computed < sequence.num_tokens:
            shared = manager.advance(sequence.cursor, tokens[sequence.num_computed :])
            if shared:
                self.stats.num_deduplicated_tokens += shared
                self._fill_slots(sequence, sequence.num_computed)
        start = sequence.next_row
        end = min(sequence.num_tokens, start + max_rows)
        if end < sequence.num_tokens and end - end % manager.page_size > start:
            end -= end % manager.page_size
        end, first_write = self._append(plan.step_id, sequence, end)
        if end <= start:
            return
        plan.add_rows(sequence, start, end, first_write)
        budget.take(end - start, finishes=end == sequence.num_tokens)
        if sequence.num_output == 0:
            sequence.note_prompt_rows(end - start)
        self.stats.num_prefill_rows += end - start
        self.backlog.shares.charge_prefill(sequence.client_id, end - start)

    def _rows_wanted(self, sequence: Sequence) -> int:
        """Rows before the next token can be drawn, after what the tree has by now, this step's pending tokens too."""
        num_cached = sequence.num_computed
        if num_cached % self.manager.page_size == 0:  # inside a page the cursor cannot advance
            tokens = sequence.tokens[: sequence.num_tokens]
            num_cached = max(num_cached, self.manager.peek(sequence.namespace_id, tokens, sequence.probe).length)
        return sequence.num_tokens - sequence.first_row_after(num_cached)

    def _append(self, step_id: int, sequence: Sequence, end: int) -> tuple[int, int]:
        """Put the tokens up to `end` into the tree, or as many as there are pages for.

        Returns the end reached and the first position whose K/V must be written.
        """
        manager = self.manager
        begin = sequence.num_computed
        if end <= begin:
            return end, begin
        appended = manager.append(sequence.cursor, sequence.tokens[begin:end], step_id)
        if not appended:
            end = min(end, begin + manager.num_available * manager.page_size)
            if end <= begin:
                return begin, begin
            appended = manager.append(sequence.cursor, sequence.tokens[begin:end], step_id)
            if not appended:
                return begin, begin
        self._fill_slots(sequence, begin if appended.moved_from < 0 else appended.moved_from)
        return end, begin + appended.num_shared

    def _fill_slots(self, sequence: Sequence, start: int) -> None:
        """Copy the slots from position `start` to the cursor into the slot table."""
        table = self._slot_table[sequence.table_row]
        sequence.num_computed = self.manager.length(sequence.cursor)
        self.manager.fill_slots(sequence.cursor, start, table)
        # A slot belongs to one path: where two sequences have one in common, they have all before it in common.
        sequence.path = table[PATH_STRIDE - 1 : sequence.num_computed : PATH_STRIDE].tobytes()

    # --- admission and retraction ---

    def _admit(self, plan: PlanBuilder, budget: PrefillBudget, now_s: float) -> list[Sequence]:
        """Admit waiting sequences in policy order while rows, places and memory last; return them."""
        admitted: list[Sequence] = []
        if len(self.running) >= self.max_running or self._memory_is_short or budget.num_left <= 0:
            return admitted
        num_skipped = 0
        for slot in self.backlog.candidates(now_s=now_s, tokens_per_s=self.tokens_per_s):
            if num_skipped > OVERDUE_PASSES or len(self.running) >= self.max_running:
                break
            sequence = self.backlog.queue.at(slot)
            if not budget.offer(self._rows_wanted(sequence)):
                break
            if not self._try_admit(sequence, self.backlog.matched(slot)):
                # An overdue one is not overtaken again: memory is left to gather for it.
                if self.backlog.is_overdue(slot):
                    break
                num_skipped += 1
                continue
            admitted.append(sequence)
            self._prefill(plan, sequence, budget)
        return admitted

    def _try_admit(self, sequence: Sequence, matched: int) -> bool:
        """Lock the cached prefix and take a place, if prompt and expected output fit beside what runs."""
        manager = self.manager
        needed = sequence.num_tokens + self._reserved(sequence)
        if self.running and needed - matched > manager.num_available * manager.page_size:
            return False
        cursor, length = manager.open(
            sequence.namespace_id, sequence.tokens[: sequence.num_tokens], sequence.request.priority
        )
        # Locking has taken the prefix out of what can be evicted, so the question is asked again.
        if self.running and needed - length > manager.num_available * manager.page_size:
            manager.close(cursor)
            return False
        self.backlog.remove(sequence)
        self.backlog.note_admission(sequence)
        self.stats.num_deduplicated_tokens += max(0, length - matched)
        sequence.status = Status.RUNNING
        sequence.cursor = cursor
        sequence.table_row = self._free_rows.pop()
        sequence.admission = self._num_admissions
        self._num_admissions += 1
        self.running.append(sequence)
        self.running.sort(key=lambda s: (-s.request.priority, s.admission))
        self._fill_slots(sequence, 0)
        return True

    def _preempt(self, now_s: float) -> None:
        """Retract running sequences of lower priority while the most urgent waiting one lacks a place or memory."""
        if not self.running:
            return
        urgent = self.backlog.most_urgent(above=self.running[-1].request.priority)
        while urgent and self.running and self.running[-1].request.priority < urgent.request.priority:
            available = self.manager.num_available * self.manager.page_size
            if len(self.running) < self.max_running and urgent.num_tokens + self._reserved(urgent) <= available:
                return
            self._retract(self.running[-1], now_s)

    def _reserved(self, candidate: Sequence) -> int:
        """Tokens that running sequences will still need, with what the candidate is expected to generate."""
        expected = self.estimate.expected_remaining
        return expected(candidate.num_output, candidate.max_output) + sum(
            s.num_tokens - s.num_computed + expected(s.num_output, s.max_output) for s in self.running
        )

    def _retract(self, sequence: Sequence, now_s: float) -> None:
        """Take a running sequence's place away. Its K/V stays in the tree; it resumes from the head of the queue."""
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.num_retractions += 1
        self.stats.num_retractions += 1
        self.estimate.note_retraction()
        self.backlog.add(sequence, now_s=now_s, resumed=True)

    def _release(self, sequence: Sequence) -> None:
        self.manager.close(sequence.cursor)
        self._free_rows.append(sequence.table_row)
        self.running.remove(sequence)
        sequence.cursor = sequence.table_row = -1
        sequence.num_computed = 0

    # --- ends ---

    def _take_plan(self, step_id: int) -> PlanBuilder:
        plan, self._plan = self._plan, None
        assert plan is not None, f"step {step_id} was not scheduled"
        assert plan.step_id == step_id, f"step {plan.step_id} was scheduled last, not {step_id}"
        return plan

    def _take_token(self, sequence: Sequence, token_id: int, logprob: float, top: TopLogprobs | None) -> TokenDelta:
        """Append a drawn token and end the sequence where it must end."""
        request = sequence.request
        sequence.append_token(token_id)
        self.stats.num_output_tokens += 1
        if request.masker:
            request.masker[sequence.index].accept(token_id)
        logprobs = None if request.params.logprobs is None else [_token_logprob(token_id, logprob, top)]
        if token_id in sequence.ending_ids and sequence.num_output > request.params.min_tokens:
            delta = self._end(sequence, FinishReason.STOP)
            delta.stop_reason = token_id if token_id in request.stop_token_ids else None
        elif sequence.num_tokens >= sequence.max_total:
            delta = self._end(sequence, FinishReason.LENGTH)
        else:
            delta = sequence.take_news()
        delta.token_ids.append(token_id)
        delta.logprobs = logprobs
        return delta

    def _end(self, sequence: Sequence, reason: FinishReason, *, error: PhloemError | None = None) -> TokenDelta:
        """Release what the sequence holds and make its terminal answer. The K/V stays, newest in the eviction order."""
        if sequence.status is Status.RUNNING:
            self._release(sequence)
        else:
            self.backlog.remove(sequence)
        sequence.status = Status.FINISHED
        request = sequence.request
        of_request = self._sequences[request.request_id]
        del of_request[sequence.index]
        if not of_request:
            del self._sequences[request.request_id]
        self.backlog.shares.leave(sequence.client_id)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.stats.num_finished += 1
            self.stats.num_prompt_tokens += sequence.num_prompt
            self.stats.num_cached_prompt_tokens += sequence.cached_tokens
            self.estimate.note_finished(sequence.num_output, sequence.max_output)
        elif reason is FinishReason.ABORT:
            self.stats.num_aborted += 1
        else:
            self.stats.num_failed += 1
        delta = sequence.take_news()
        delta.finish_reason = reason
        delta.embedding = sequence.embedding
        delta.error = error
        return delta

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            self.abort(request_id, error=RequestTimeoutError("the request passed its deadline before it was finished"))


def _token_logprob(token_id: int, logprob: float, top: TopLogprobs | None) -> TokenLogprob:
    if top is None:
        return TokenLogprob(token_id, logprob)
    return TokenLogprob(token_id, logprob, tuple(zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)))
