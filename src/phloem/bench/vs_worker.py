"""One engine of `phloem bench vs-llama`, in a process of its own: runs the cases that it is asked for, times them.

Owns the cases, the clock and llama.cpp's side of the work. Must not import phloem: llama.cpp's interpreter runs this
file as a script, phloem's imports it, so that both sides do and time the same. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

CHUNK = 512
"""Most tokens of one prefill call; llama.cpp's default size of a physical batch, and phloem's of a step."""
NUM_DECODED = 32
"""Tokens drawn one after the other in a decode case."""
NUM_STREAMS = 16
STREAM_PROMPT = 32
PREFILLS = (512, 2048)
CONTEXTS = (32, 512, 2048)
CASES = (
    *(f"prefill-{length}" for length in PREFILLS),
    *(f"decode-{length}" for length in CONTEXTS),
    f"streams-{NUM_STREAMS}",
)
"""prefill-N: a prompt of N tokens. decode-N: one stream behind N tokens. streams-N: N streams at once, in total."""
MAX_LEN = max(PREFILLS + CONTEXTS) + NUM_DECODED


class Engine(Protocol):
    """What is timed. A call returns the greedy choice after the last token of each sequence."""

    def forward(self, tokens: Sequence[Sequence[int]], position: int) -> list[int]:
        """Append tokens to sequences 0, 1, ..., as many to each, from `position` on; what stood there is dropped."""


def run_cases(engine: Engine, cases: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Tokens per second of each case. One prompt serves both cases of its length."""
    speeds = {}
    for length in sorted({int(case.partition("-")[2]) for case in cases if not case.startswith("streams")}):
        prompt, drawing = f"prefill-{length}", f"decode-{length}"
        speeds[prompt], speeds[drawing] = _run(engine, 1, length, NUM_DECODED * (drawing in cases), clock)
    if f"streams-{NUM_STREAMS}" in cases:
        _, speeds[f"streams-{NUM_STREAMS}"] = _run(engine, NUM_STREAMS, STREAM_PROMPT, NUM_DECODED, clock)
    return {case: speeds[case] for case in cases}


def _run(engine: Engine, count: int, length: int, num_drawn: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Tokens per second of prompts of this length, and of drawing behind them, over all sequences."""
    rng = random.Random(length)
    prompts = [[rng.randrange(100, 20000) for _ in range(length)] for _ in range(count)]
    drawn: list[int] = []
    step = CHUNK // count
    begin_s = clock()
    for start in range(0, length, step):
        drawn = engine.forward([prompt[start : start + step] for prompt in prompts], start)
    middle_s = clock()
    for position in range(length, length + num_drawn):
        drawn = engine.forward([[token] for token in drawn], position)
    drawing = count * num_drawn / (clock() - middle_s) if num_drawn else 0.0
    return count * length / (middle_s - begin_s), drawing


def answer(engine: Engine, requests: TextIO, replies: TextIO) -> None:
    """Say {} once warm, then reply to each line {"cases": [...]} with the speeds, until the requests end."""
    engine.forward([engine.forward([[1, 2, 3, 4]], 0)], 4)
    print("{}", file=replies, flush=True)
    for line in requests:
        speeds = run_cases(engine, json.loads(line)["cases"])
        speeds["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        print(json.dumps(speeds), file=replies, flush=True)


class LlamaCpp:
    """llama.cpp through the low-level API of llama-cpp-python: llama_decode, and its greedy sampler.

    A context for one sequence, and one for NUM_STREAMS with K/V cells of their own (kv_unified off, as by default).
    """

    def __init__(self, model: str, num_threads: int, flash_attention: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        self._num_threads, self._flash_attention = num_threads, flash_attention
        self._contexts: dict[int, Any] = {}
        self._batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def _context(self, num_sequences: int) -> Any:
        if num_sequences not in self._contexts:
            params = self._api.llama_context_default_params()
            cells = MAX_LEN if num_sequences == 1 else STREAM_PROMPT + NUM_DECODED
            params.n_ctx = num_sequences * -(-cells // 256) * 256
            params.n_seq_max = num_sequences
            params.n_threads = params.n_threads_batch = self._num_threads
            params.flash_attn_type = self._flash_attention
            self._contexts[num_sequences] = self._api.llama_init_from_model(self._model, params)
        return self._contexts[num_sequences]

    def forward(self, tokens: Sequence[Sequence[int]], position: int) -> list[int]:
        """See Engine."""
        api, batch, context = self._api, self._batch, self._context(len(tokens))
        memory = api.llama_get_memory(context)
        num_rows = 0
        last_rows = []
        for sequence, run in enumerate(tokens):
            api.llama_memory_seq_rm(memory, sequence, position, -1)
            for offset, token in enumerate(run):
                batch.token[num_rows], batch.pos[num_rows] = token, position + offset
                batch.n_seq_id[num_rows], batch.seq_id[num_rows][0] = 1, sequence
                batch.logits[num_rows] = offset == len(run) - 1
                num_rows += 1
            last_rows.append(num_rows - 1)
        batch.n_tokens = num_rows
        if api.llama_decode(context, batch):
            raise SystemExit(f"llama_decode failed at position {position}")
        return [api.llama_sampler_sample(self._sampler, context, row) for row in last_rows]


def quantize(source: str, target: str, file_type: str) -> None:
    """Write `source` again in another type, with llama.cpp's own defaults for which tensor gets which."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"llama.cpp cannot write {source} as {file_type}")


def run(argv: Sequence[str]) -> None:
    """`quantize SOURCE TARGET TYPE`, or `serve MODEL THREADS FLASH_ATTENTION`, numbers as in its API."""
    if argv[0] == "quantize":
        quantize(*argv[1:])
    else:
        model, *numbers = argv[1:]
        answer(LlamaCpp(model, *map(int, numbers)), sys.stdin, sys.stdout)


if __name__ == "__main__":
    run(sys.argv[1:])
