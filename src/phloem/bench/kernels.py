"""`phloem bench kernels`: what the native kernels reach of what this machine can do.

Owns the measurements. Must not know the cache, the scheduler or HTTP. Products are timed on random data; steps on a
model (the demo model unless another is named). Figures that are compared are taken in turns in one run, as medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from phloem.config import Isa
from phloem.kernels import native
from phloem.models.find_model import find_model
from phloem.models.load import LoadedModel, load_model, random_weights
from phloem.models.spec import ModelSpec, RopeSpec
from phloem.runner.native_runner import NativeRunner
from phloem.types import Int32Array, LogitRow, SamplingParams, StepPlan

SHAPES = ((1536, 576), (576, 1536), (8192, 2048))
ROWS = (1, 4, 16, 128, 512)
FORMATS = ("q4m", "q8", "bf16")
CHUNK = 512
SHARED = 4096
"""Tokens of the prefix that the sequences of the grouping test share."""
LARGE = ModelSpec(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeSpec(),
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
"""A model of 1.2 billion parameters, far larger than any cache: one row of it must run at memory speed."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark with command line `argv`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="phloem bench kernels", description=__doc__)
    parser.add_argument("--model", default="", help="a .gguf file or a folder; the demo model if not given")
    parser.add_argument("--isa", default="auto", choices=["auto", *native.supported_isas()])
    parser.add_argument("--threads", type=int, default=2, help="worker threads")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of which the median is printed")
    parser.add_argument("--products-only", action="store_true", help="leave out the steps of a model")
    parser.add_argument("--large", action="store_true", help="only decode of a random model of 1.2 billion parameters")
    arguments = parser.parse_args(argv)
    isa: Isa = native.supported_isas()[-1] if arguments.isa == "auto" else arguments.isa  # type: ignore[assignment]
    peak = native.measure_peak(isa, arguments.threads)
    bandwidth = native.measure_bandwidth(arguments.threads)
    print(f"{isa}, {arguments.threads} threads: {peak / 1e9:.0f} GOP/s in registers, {bandwidth / 1e9:.1f} GB/s read")
    if arguments.large:
        print_large(LARGE, isa, arguments.threads, arguments.repeats)
        return 0
    print_products(isa, arguments.threads, arguments.repeats)
    if not arguments.products_only:
        model = load_model(find_model(arguments.model))
        print_steps(model, isa, arguments.threads, arguments.repeats)
        print_grouping(model, isa, arguments.threads, arguments.repeats)
    return 0


def print_products(isa: str, threads: int, repeats: int) -> None:
    """GOP/s of each packed format, with its share of the integer ceiling, and GB/s of weights for one row."""
    print("\nproducts      n      k   rows    GOP/s  of ceiling   GB/s of weights")
    for form in FORMATS:
        for n, k in SHAPES:
            matrix = native.PackedMatrix(form, n, k)
            matrix.fill(0, "f32", np.random.default_rng(0).standard_normal((n, k), np.float32).view(np.uint8))
            for rows in ROWS:
                # The ceiling is taken beside each figure: on a shared machine it moves.
                peak = native.measure_peak(isa, threads)
                seconds = native.time_matmul(matrix, rows, repeats * 3, isa, threads)
                speed = 2 * n * k * rows / seconds
                print(
                    f"{form:8} {n:6} {k:6} {rows:6} {speed / 1e9:8.1f} {speed / peak:10.0%} "
                    f"{matrix.nbytes / seconds / 1e9:15.1f}"
                )


def print_steps(model: LoadedModel, isa: Isa, threads: int, repeats: int) -> None:
    """Tokens per second of prefill and of decode at several lengths, alone and as a batch."""
    runner = make_runner(model, isa, threads, grouped=True)
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, 2048, np.int32)
    print("\nsteps                         tokens/s     range")
    for length in (512, 2048):
        report(f"prefill of {length}", length, repeats, partial(prefill, runner, tokens[:length]))
    for length in (32, 512, 2047):
        one = decode_plan([np.arange(length + 1, dtype=np.int32)])
        report(f"decode at {length}", 1, repeats * 4, partial(runner.step, one))
    for count in (4, 16):
        tables = [np.arange(64 * i, 64 * i + 64, dtype=np.int32) for i in range(count)]
        batch = decode_plan(tables)
        report(f"decode of {count} at 63", count, repeats * 4, partial(runner.step, batch))
    runner.close()


def print_grouping(model: LoadedModel, isa: Isa, threads: int, repeats: int) -> None:
    """Decode of 32 sequences: one shared prefix, and nothing shared; with and without grouping, in turns."""
    runners = [make_runner(model, isa, threads, grouped=grouped) for grouped in (False, True)]
    rng = np.random.default_rng(0)
    for runner in runners:
        for begin in range(0, SHARED + 1024, CHUNK):
            tokens = rng.integers(0, model.spec.vocab_size, CHUNK, np.int32)
            runner.step(prefill_plan(tokens, begin))
    trunk = np.arange(SHARED, dtype=np.int32)
    cases = {
        f"32 rows sharing {SHARED}": [np.append(trunk, np.int32(SHARED + i)) for i in range(32)],
        "32 rows sharing nothing": [np.arange(160 * i, 160 * i + 128, dtype=np.int32) for i in range(32)],
        "32 rows of one token": [np.array([160 * i], np.int32) for i in range(32)],
    }
    print("\ngrouping                    alone ms  grouped ms   ratio of pairs: median, quartiles")
    medians = []
    for name, tables in cases.items():
        plan = decode_plan(tables)
        turns = repeats if len(tables[0]) > SHARED else repeats * 8
        samples: list[list[float]] = [[], []]
        for turn in range(turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                samples[which].append(seconds_of(partial(runners[which].step, plan)))
        alone, grouped = (statistics.median(times) * 1e3 for times in samples)
        medians.append((alone, grouped))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(*samples, strict=True)] * 2, n=4)
        print(f"{name:26} {alone:9.1f} {grouped:11.1f}   x {middle:.2f} ({low:.2f} to {high:.2f})")
    alone, grouped = (shared - short for shared, short in zip(medians[0], medians[2], strict=True))
    print(f"{'attention (first - third)':26} {alone:9.1f} {grouped:11.1f}   x {alone / grouped:.2f}")
    for runner in runners:
        runner.close()


def print_large(spec: ModelSpec, isa: Isa, threads: int, repeats: int) -> None:
    """Decode of one row on random weights: bytes of weights read a second, beside the memory's bandwidth."""
    weights = random_weights(spec)
    print("\nrandom model              tokens/s   GB/s of weights  of bandwidth")
    for quantization in ("q4", "q8"):
        runner = NativeRunner(
            spec, weights, num_slots=64, isa=isa, num_threads=threads, quantization=quantization, max_len=64
        )
        size = int(str(runner.describe()["weight_bytes"]))
        plan = decode_plan([np.arange(33, dtype=np.int32)])
        runner.step(plan)
        seconds, shares = [], []
        for _ in range(repeats * 3):
            bandwidth = native.measure_bandwidth(threads)
            seconds.append(seconds_of(partial(runner.step, plan)))
            shares.append(size / seconds[-1] / bandwidth)
        middle = statistics.median(seconds)
        print(
            f"decode at 32, {quantization:12} {1 / middle:8.1f} {size / middle / 1e9:17.1f} "
            f"{statistics.median(shares):12.0%} (from {min(shares):.0%} to {max(shares):.0%})"
        )
        runner.close()


def make_runner(model: LoadedModel, isa: Isa, threads: int, *, grouped: bool) -> NativeRunner:
    """A runner with room for the largest case."""
    return NativeRunner(
        model.spec,
        model.weights,
        num_slots=SHARED + 32 * 160,
        isa=isa,
        num_threads=threads,
        group_shared_prefixes=grouped,
    )


def prefill(runner: NativeRunner, tokens: Int32Array) -> None:
    """Compute a prompt in chunks, as the scheduler does."""
    for begin in range(0, len(tokens), CHUNK):
        runner.step(prefill_plan(tokens[begin : begin + CHUNK], begin))


def prefill_plan(tokens: Int32Array, begin: int) -> StepPlan:
    """One chunk of a sequence whose position p is in slot p; the logits of its last row."""
    positions = np.arange(begin, begin + len(tokens), dtype=np.int32)
    return StepPlan(
        step_id=0,
        token_ids=tokens,
        positions=positions,
        write_slots=positions,
        seq_row_start=np.array([0, len(tokens)], np.int32),
        seq_table_row=np.zeros(1, np.int32),
        slot_table=np.arange(begin + len(tokens), dtype=np.int32)[None],
        logit_rows=[logit_row(len(tokens) - 1, begin + len(tokens))],
    )


def decode_plan(tables: list[Int32Array]) -> StepPlan:
    """One row per sequence, at the last position of its slots."""
    count, width = len(tables), max(len(table) for table in tables)
    slot_table = np.zeros((count, width), np.int32)
    for row, table in enumerate(tables):
        slot_table[row, : len(table)] = table
    return StepPlan(
        step_id=0,
        token_ids=np.full(count, 5, np.int32),
        positions=np.array([len(table) - 1 for table in tables], np.int32),
        write_slots=np.array([table[-1] for table in tables], np.int32),
        seq_row_start=np.arange(count + 1, dtype=np.int32),
        seq_table_row=np.arange(count, dtype=np.int32),
        slot_table=slot_table,
        logit_rows=[logit_row(row, len(table)) for row, table in enumerate(tables)],
    )


def logit_row(row: int, position: int) -> LogitRow:
    """A greedy draw without history."""
    return LogitRow(row, position, 0, SamplingParams(temperature=0), np.zeros(0, np.int32), 0)


def report(name: str, tokens: int, repeats: int, call: Callable[[], object]) -> None:
    """Print tokens per second of `call`, median and range of `repeats`, after one run to warm up."""
    call()
    times = [seconds_of(call) for _ in range(repeats)]
    speeds = [tokens / seconds for seconds in times]
    print(f"{name:26} {statistics.median(speeds):11.1f} {min(speeds):9.1f} to {max(speeds):.1f}")


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
