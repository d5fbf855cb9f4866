"""From records to figures: percentiles, rates, hit rates, and the result file.

Owns the definitions. Must not know how requests travelled.
"""

from __future__ import annotations

import csv
import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from phloem import __version__
from phloem.bench.jobs import Record, Workload
from phloem.bench.load import Run
from phloem.errors import UsageError

FORMAT = 1
"""Version of the result file."""

PERCENTILES = (50, 90, 95, 99)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum; empty for no values."""
    if not values:
        return {}
    data = np.asarray(values)
    figures = {"mean": float(data.mean())}
    figures |= {f"p{p}": float(np.percentile(data, p)) for p in PERCENTILES}
    return {name: round(value, 5) for name, value in (figures | {"max": float(data.max())}).items()}


def summarise(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """The figures of a run.

    TTFT: from sending to the first text. ITL: between pieces of text. TPOT: time after the first token over the tokens
    after it. Latency: to the end of the answer. Hit rate: cached over prompt tokens, None where the server reports no
    cached tokens. Rates are over the whole run; failed requests count in `num_errors` and nowhere else.
    """
    good = [record for record in records if not record.error]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    figures: dict[str, Any] = {
        "num_requests": len(records),
        "num_errors": len(records) - len(good),
        "errors": dict(Counter(r.error for r in records if r.error).most_common(5)),
        "duration_s": round(duration_s, 3),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(good) / duration_s,
        "output_tok_per_s": output / duration_s,
        "total_tok_per_s": (prompt + output) / duration_s,
        "ttft_s": spread([r.ttft_s for r in good]),
        "itl_s": spread(list(_gaps(good))),
        "tpot_s": spread([t for r in good if (t := _tpot(r)) is not None]),
        "latency_s": spread([r.latency_s for r in good]),
        "late_s": spread([r.sent_s - r.due_s for r in good]),
        **hits(good),
    }
    by_turn: dict[int, list[Record]] = defaultdict(list)
    for record in good:
        by_turn[record.turn].append(record)
    figures["turns"] = [
        {"turn": turn, "num_requests": len(group), "ttft_s": spread([r.ttft_s for r in group]), **hits(group)}
        for turn, group in sorted(by_turn.items())
    ]
    return figures


def hits(records: Sequence[Record]) -> dict[str, float | None]:
    """Cached and ideal tokens as shares of the prompt tokens, and the fraction of the ideal that was reached."""
    prompt = sum(r.prompt_tokens for r in records)
    cached = _sum(r.cached_tokens for r in records)
    ideal = _sum(r.ideal_tokens for r in records)
    return {
        "cached_tokens": cached,
        "ideal_tokens": ideal,
        "hit_rate": cached / prompt if cached is not None and prompt else None,
        "ideal_hit_rate": ideal / prompt if ideal is not None and prompt else None,
        "ideal_fraction": cached / ideal if cached is not None and ideal else None,
    }


def risen(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """How far an engine's counters rose; figures that are of now are left out."""
    counters = (
        name for name in after if name.startswith(("num_", "kv_num_evicted", "kv_num_inserted", "kv_num_flushed"))
    )
    return {name: after[name] - before.get(name, 0) for name in counters if name not in ("num_running", "num_waiting")}


def result(
    workload: Workload,
    run: Run,
    *,
    label: str,
    target: Mapping[str, Any],
    load: Mapping[str, Any],
    memory: Sequence[tuple[float, int]] = (),
) -> dict[str, Any]:
    """Everything about a run, ready for JSON: what was asked, on which machine, the figures and every request."""
    return {
        "format": FORMAT,
        "phloem": __version__,
        "label": label,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "target": dict(target),
        "workload": {"name": workload.name, **workload.params},
        "load": dict(load),
        "summary": summarise(run.records, run.duration_s),
        "memory": [[round(at, 2), size] for at, size in memory],
        "requests": [_plain(record) for record in run.records],
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result, or several in one object, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def write_csv(path: Path, value: Mapping[str, Any]) -> None:
    """Write one line per request."""
    columns = [name for name in value["requests"][0] if name != "chunk_s"] if value["requests"] else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(value["requests"])


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs of a result file, one or several. Raises UsageError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} as a benchmark result: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(f"{path} is no benchmark result of format {FORMAT}")
    return value.get("runs", [value])  # type: ignore[no-any-return]


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu, "cores": cores, "memory_gib": round(memory / 2**30, 1), "system": platform.platform()}


def _plain(record: Record) -> dict[str, Any]:
    ttft_s = record.chunk_s[0] if record.chunk_s else None
    return {
        "program": record.program,
        "turn": record.turn,
        "sent_s": round(record.sent_s, 5),
        "end_s": round(record.end_s, 5),
        "ttft_s": None if ttft_s is None else round(ttft_s, 5),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "ideal_tokens": record.ideal_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "chunk_s": [round(at, 4) for at in record.chunk_s],
    }


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _gaps(records: Iterable[Record]) -> Iterable[float]:
    for record in records:
        yield from np.diff(record.chunk_s).tolist()


def _tpot(record: Record) -> float | None:
    if record.output_tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (record.output_tokens - 1)
