"""Pictures of results: TTFT per turn, hit rate over time, throughput against agents, memory over time.

Owns what the pictures show and how they look. Must not know files or pages. matplotlib is imported when a picture is
drawn: it comes with the optional extra `bench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from phloem.bench.compare import group_runs, num_agents, pick, same_agents
from phloem.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]

OWN = "#0b7a53"
COLOURS = ("#d9822b", "#3f6fb5", "#a4508b", "#8a6d3b", "#5c9ead", OWN)
MUTED = "#8c939c"
INK = "#23292f"
GRID = "#e4e7ea"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#b5bbc2",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "phloem",
}


def draw(runs: Sequence[Run]) -> dict[str, Figure]:
    """The pictures that the results have data for, by name. Raises UsageError when matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("pictures need matplotlib: pip install 'phloem[bench]'") from None
    matplotlib.use("agg")
    colours = label_colours(runs)
    kinds: dict[str, Callable[[Sequence[Run], Mapping[str, str]], Figure | None]] = {
        "ttft": ttft_per_turn,
        "hit-rate": hit_rate_over_time,
        "throughput": throughput_against_agents,
        "memory": memory_over_time,
    }
    with matplotlib.rc_context(STYLE):
        drawn = {name: kind(runs, colours) for name, kind in kinds.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save(figure: Figure, target: Path | TextIO, kind: str) -> None:
    """Write a picture as `png` or `svg`; the same data gives the same bytes."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None)


def label_colours(runs: Sequence[Run]) -> dict[str, str]:
    """One colour per label, the same in every picture: our own green, no cache grey, others in turn."""
    others = iter(COLOURS * (1 + len(runs)))
    own = {label: OWN for label in group_runs(runs) if label.startswith(("radix", "phloem"))}
    own = own if len(own) == 1 else {}
    return {
        label: own.get(label) or (MUTED if label.startswith("no cache") else next(others)) for label in group_runs(runs)
    }


def busiest(runs: Sequence[Run]) -> list[Run]:
    """The runs at the largest number of agents that every label has; all of them where there is none."""
    grouped = same_agents(runs)
    common = set.intersection(*[set(by_agents) for by_agents in grouped.values()])
    if not common:
        return list(runs)
    return [run for by_agents in grouped.values() for run in by_agents[max(common)]]


def ttft_per_turn(runs: Sequence[Run], colours: Mapping[str, str]) -> Figure | None:
    """Each request as a point, quartiles as a box, median as a line, per turn and label."""
    shown = busiest(runs)
    groups = group_runs(shown)
    points = {
        label: _by_turn([r for run in group for r in run["requests"] if r["ttft_s"] is not None])
        for label, group in groups.items()
    }
    turns = sorted({turn for by_turn in points.values() for turn in by_turn})
    if not turns:
        return None
    figure, axes = _figure(f"Time to first token per turn{_agents_note(shown)}")
    width = 0.8 / len(groups)
    rng = np.random.default_rng(0)
    for place, (label, by_turn) in enumerate(points.items()):
        for turn, values in by_turn.items():
            centre = turn + 1 + (place - (len(groups) - 1) / 2) * width
            data = np.maximum(np.array(values), 1e-4)
            _box(axes, centre, width, data, colours[label])
            spots = centre + rng.uniform(-0.28, 0.28, len(data)) * width
            axes.scatter(spots, data, s=5, color=colours[label], alpha=0.35, linewidths=0, zorder=2, rasterized=True)
        axes.plot([], [], color=colours[label], linewidth=6, solid_capstyle="butt", label=label)
    axes.set_yscale("log")
    _seconds_axis(axes)
    axes.set_xticks([turn + 1 for turn in turns])
    axes.set_xlabel("turn of the conversation")
    _legend(axes)
    return figure


def hit_rate_over_time(runs: Sequence[Run], colours: Mapping[str, str]) -> Figure | None:
    """Cached share of the prompt tokens in a sliding window, and what an infinite cache would have had.

    Time is counted in requests: runs of the same work last differently long.
    """
    shown = [run for run in busiest(runs) if any(r["cached_tokens"] is not None for r in run["requests"])]
    if not shown:
        return None
    figure, axes = _figure(f"Prompt tokens served from the cache{_agents_note(shown)}")
    for group in group_runs(shown).values():
        requests = _sent(group[0])
        share = _windowed(requests, "cached_tokens")
        axes.plot(np.arange(1, len(share) + 1), 100 * share, color=colours[group[0]["label"]], label=group[0]["label"])
    requests = _sent(shown[-1])
    if requests and all(r["ideal_tokens"] is not None for r in requests):
        share = _windowed(requests, "ideal_tokens")
        axes.plot(np.arange(1, len(share) + 1), 100 * share, ":", color=INK, label="infinite cache", zorder=1)
    axes.set_ylim(-2, 103)
    axes.set_ylabel("% of prompt tokens")
    axes.set_xlabel("requests sent")
    _legend(axes)
    return figure


def throughput_against_agents(runs: Sequence[Run], colours: Mapping[str, str]) -> Figure | None:
    """Prompt and output tokens per second against the number of programs at once; bars where that never varies."""
    grouped = same_agents(runs)
    counts = sorted({agents for by_agents in grouped.values() for agents in by_agents})
    figure, axes = _figure("Throughput" if len(counts) == 1 else "Throughput against agents")
    medians = {
        label: {n: float(np.median([pick(r, ("total_tok_per_s",)) or 0.0 for r in group])) for n, group in by.items()}
        for label, by in grouped.items()
    }
    if len(counts) == 1:
        for place, (label, by_agents) in enumerate(medians.items()):
            for value in by_agents.values():
                axes.bar(place, value, color=colours[label], width=0.6)
                axes.annotate(f"{value:,.0f}", (place, value), (0, 4), textcoords="offset points", ha="center")
        axes.set_xticks(range(len(medians)), list(medians))
    else:
        for label, by_agents in medians.items():
            xs, ys = zip(*sorted(by_agents.items()), strict=True)
            axes.plot(xs, ys, "o-", color=colours[label], linewidth=2, markersize=5, label=label)
        last = {label: by_agents[max(by_agents)] for label, by_agents in medians.items()}
        heights = dict(zip(last, apart(list(last.values()), max(last.values()) / 22), strict=True))
        for label, value in last.items():
            at = (max(medians[label]), heights[label])
            axes.annotate(f"{value:,.0f}", at, (7, -3), textcoords="offset points", color=colours[label])
        axes.set_xscale("log")
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
        axes.set_xlabel("agents at once")
        _legend(axes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("prompt + output tokens per second")
    return figure


def apart(values: Sequence[float], gap: float) -> list[float]:
    """The values, in their order, moved up where two are closer than `gap`, so that labels there can be read."""
    heights = [0.0] * len(values)
    least = -math.inf
    for i in sorted(range(len(values)), key=values.__getitem__):
        heights[i] = max(values[i], least)
        least = heights[i] + gap
    return heights


def memory_over_time(runs: Sequence[Run], colours: Mapping[str, str]) -> Figure | None:
    """Resident memory of the server, or K/V memory in use where the engine ran in this process."""
    shown = [run for run in busiest(runs) if len(run["memory"]) > 1]
    if not shown:
        return None
    what = shown[0].get("memory_of", "resident memory of the server")
    figure, axes = _figure(f"{what[0].upper()}{what[1:]}{_agents_note(shown)}")
    seen: set[str] = set()
    for run in shown:
        label = run["label"]
        at, size = np.array(run["memory"], float).T
        axes.plot(at, size / 2**20, color=colours[label], label=None if label in seen else label)
        seen.add(label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB")
    axes.set_xlabel("seconds since start")
    _legend(axes)
    return figure


def _figure(title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.9), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _legend(axes: Axes) -> None:
    """Below the picture, in one row, so that it never hides data."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, handlelength=1.6, columnspacing=1.6)


def _box(axes: Axes, centre: float, width: float, data: Any, colour: str) -> None:
    low, median, high = np.percentile(data, (25, 50, 75))
    axes.bar(centre, high - low, width * 0.72, bottom=low, color=colour, alpha=0.22, linewidth=0, zorder=1)
    axes.hlines(median, centre - width * 0.36, centre + width * 0.36, color=colour, linewidth=2.2, zorder=3)


def _seconds_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    def words(value: float, _position: int | None) -> str:
        return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"

    axes.yaxis.set_major_formatter(FuncFormatter(words))


def _by_turn(requests: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    by_turn: dict[int, list[float]] = {}
    for request in requests:
        by_turn.setdefault(request["turn"], []).append(request["ttft_s"])
    return by_turn


def _sent(run: Run) -> list[Mapping[str, Any]]:
    """The requests of a run that succeeded, in the order of sending."""
    return sorted((r for r in run["requests"] if not r["error"]), key=lambda r: r["sent_s"])


def _windowed(requests: Sequence[Mapping[str, Any]], key: str) -> Any:
    """Share of `key` in the prompt tokens, over the last twelfth of the requests at each one."""
    window = max(1, len(requests) // 12)
    part, whole = (
        np.concatenate([np.zeros(1), np.cumsum([r[name] or 0 for r in requests])]) for name in (key, "prompt_tokens")
    )
    last = np.arange(1, len(requests) + 1)
    first = np.maximum(last - window, 0)
    return (part[last] - part[first]) / np.maximum(whole[last] - whole[first], 1.0)


def _agents_note(runs: Sequence[Run]) -> str:
    counts = {num_agents(run) for run in runs}
    return f", {counts.pop()} at once" if len(counts) == 1 else ""
