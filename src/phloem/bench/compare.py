"""`phloem bench compare`: results side by side, as ratios to the first.

Owns the grouping of repeated runs (medians) and the table. Must not know how figures were measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from phloem.bench.metrics import read_results
from phloem.errors import UsageError

FIGURES: tuple[tuple[str, tuple[str, ...], float, str], ...] = (
    ("TTFT p50", ("ttft_s", "p50"), 1000.0, "ms"),
    ("TTFT p95", ("ttft_s", "p95"), 1000.0, "ms"),
    ("ITL p50", ("itl_s", "p50"), 1000.0, "ms"),
    ("ITL p99", ("itl_s", "p99"), 1000.0, "ms"),
    ("TPOT p50", ("tpot_s", "p50"), 1000.0, "ms"),
    ("latency p50", ("latency_s", "p50"), 1000.0, "ms"),
    ("latency p99", ("latency_s", "p99"), 1000.0, "ms"),
    ("requests", ("requests_per_s",), 1.0, "/s"),
    ("output", ("output_tok_per_s",), 1.0, "tok/s"),
    ("prompt + output", ("total_tok_per_s",), 1.0, "tok/s"),
    ("hit rate", ("hit_rate",), 100.0, "%"),
    ("ideal hit rate", ("ideal_hit_rate",), 100.0, "%"),
    ("reached of ideal", ("ideal_fraction",), 100.0, "%"),
    ("errors", ("num_errors",), 1.0, ""),
)
"""Name, path in the summary, factor and unit of each figure shown."""

SAME_LOAD = ("concurrency", "inflight", "rate", "fixed_output", "warm")


def main(argv: Sequence[str]) -> int:
    """Print the comparison; exit code 0."""
    parser = argparse.ArgumentParser(
        prog="phloem bench compare",
        description="Compare results of `phloem bench serve --json`, as ratios to the first. Results with the same "
        "label are repeats: their medians are shown.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="A.json", help="result files; the first is the base of the ratios")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    arguments = parser.parse_args(argv)
    runs = [run for name in arguments.files for run in read_results(Path(name))]
    for heading, group in by_load(runs):
        for note in differences(group):
            print(f"phloem: note: {note}", file=sys.stderr)
        groups = group_runs(group)
        rows = comparison(groups)
        if arguments.markdown:
            print(f"{heading}\n\n{markdown(list(groups), rows)}\n")
        else:
            _print(heading, list(groups), rows)
    return 0


def by_load(runs: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Runs that may be compared, with a heading: those with equally many programs at once, fewest first."""
    counts = sorted({num_agents(run) for run in runs})
    return [
        (f"{count} at once" if count else "All", [run for run in runs if num_agents(run) == count]) for count in counts
    ]


def group_runs(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs by label, in the order of first mention."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["label"], []).append(run)
    return groups


def comparison(groups: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Rows of cells: the figure's name with unit, then value and ratio to the first group for each group."""
    rows = []
    for name, path, factor, unit in FIGURES:
        values = [_median(runs, path) for runs in groups.values()]
        if any(value is not None for value in values):
            cells = [_cell(value, values[0], factor, is_base=i == 0) for i, value in enumerate(values)]
            rows.append([f"{name}, {unit}" if unit else name, *cells])
    return rows


def differences(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What makes the results hard to compare: other workloads, loads or machines than the first."""
    first = runs[0]
    notes = []
    for run in runs[1:]:
        changed = [key for key in first["workload"] if run["workload"].get(key) != first["workload"][key]]
        changed += [key for key in SAME_LOAD if run["load"].get(key) != first["load"].get(key)]
        changed += [key for key in ("cpu", "cores") if run["machine"][key] != first["machine"][key]]
        if changed:
            notes.append(f"{run['label']} differs from {first['label']} in {', '.join(changed)}")
    return list(dict.fromkeys(notes))


def markdown(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of the comparison."""
    lines = ["| | " + " | ".join(labels) + " |", "|---|" + "---:|" * len(labels)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def pick(run: dict[str, Any], path: tuple[str, ...]) -> float | None:
    """A figure of a run's summary, None where it has none."""
    value: Any = run["summary"]
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else float(value)


def _median(runs: Sequence[dict[str, Any]], path: tuple[str, ...]) -> float | None:
    values = [value for run in runs if (value := pick(run, path)) is not None]
    return median(values) if values else None


def _cell(value: float | None, base: float | None, factor: float, *, is_base: bool) -> str:
    if value is None:
        return "-"
    shown = value * factor
    text = f"{shown:,.0f}" if abs(shown) >= 1000 or shown == int(shown) else f"{shown:,.{2 if abs(shown) < 10 else 1}f}"
    return text if is_base or not base else f"{text} ({value / base:.2f}x)"


def _print(heading: str, labels: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=heading, title_justify="left")
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def same_agents(runs: Sequence[dict[str, Any]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Label -> number of programs at once -> runs. Raises UsageError when there is no run."""
    if not runs:
        raise UsageError("no results to show")
    grouped: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in runs:
        grouped.setdefault(run["label"], {}).setdefault(num_agents(run), []).append(run)
    return grouped


def num_agents(run: dict[str, Any]) -> int:
    """How many programs ran at once: the concurrency, or all."""
    return int(run["load"].get("concurrency") or run["workload"].get("agents", 0))
