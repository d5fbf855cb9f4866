"""`phloem bench report`: results as one self-contained HTML page and PNG pictures.

Owns the page. Must not know how figures were measured nor how pictures are drawn.
"""

from __future__ import annotations

import argparse
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.bench.compare import by_load, comparison, differences, group_runs, pick, same_agents
from phloem.bench.metrics import read_results
from phloem.bench.plots import draw, label_colours, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "ttft": "Every dot is a request. The box spans the middle half, the line is the median; the axis is logarithmic.",
    "hit-rate": "Share of prompt tokens that needed no computing, over a sliding window of a twelfth of the run. "
    "Dotted: a token-level cache of unlimited size.",
    "throughput": "Tokens of prompts and answers over the length of the run. Tokens served from the cache count too: "
    "this is the work that clients got done.",
    "memory": "Sampled during the run.",
}

STYLE = """
:root { --ink: #23292f; --soft: #66707a; --line: #e1e5e8; --paper: #f6f7f5; --green: #0b7a53; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 28px 60px; }
h1 { font-size: 27px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; }
.sub, figcaption, .note { color: var(--soft); font-size: 13.5px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 26px 0 8px; }
.card, figure, .wide { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 16px 18px; border-top: 4px solid var(--green); }
.card b { display: block; font-size: 29px; letter-spacing: -0.02em; line-height: 1.15; }
.card span { color: var(--soft); font-size: 13.5px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px; margin-top: 20px; }
figure { margin: 0; padding: 14px 16px 12px; }
figure svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; padding: 4px 16px 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
code { background: #eceff1; padding: 1px 5px; border-radius: 4px; font-size: 13px; overflow-wrap: anywhere; }
@media (max-width: 560px) { .plots { grid-template-columns: 1fr; } }
"""


def main(argv: Sequence[str]) -> int:
    """Write the page and the pictures; exit code 0."""
    parser = argparse.ArgumentParser(
        prog="phloem bench report", description="Make a page and pictures from result files.", allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", default="bench-report", metavar="DIR", help="folder to write (default: bench-report)")
    parser.add_argument("--title", default="What the cache saves", metavar="TEXT")
    arguments = parser.parse_args(argv)
    runs = [run for name in arguments.files for run in read_results(Path(name))]
    out = Path(arguments.out)
    page = write_report(runs, out, title=arguments.title)
    print(f"{page} and {len(list(out.glob('*.png')))} pictures")
    return 0


def write_report(runs: Sequence[dict[str, Any]], out: Path, *, title: str) -> Path:
    """Write `out`/index.html and one PNG per picture; return the page's path."""
    figures = draw(runs)
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save(figure, out / f"{name}.png", "png")
    page = out / "index.html"
    page.write_text(render(runs, figures, title), encoding="utf-8")
    return page


def render(runs: Sequence[dict[str, Any]], figures: dict[str, Figure], title: str) -> str:
    """The page as text; it needs nothing from elsewhere."""
    machine = runs[0]["machine"]
    sub = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB. {_workload_words(runs)}"
    plots = "".join(
        f"<figure>{_svg(figure, name)}<figcaption>{CAPTIONS[name]}</figcaption></figure>"
        for name, figure in figures.items()
    )
    tables = "".join(f"<h2>{heading}</h2>{_table(group)}" for heading, group in by_load(runs))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{html.escape(title)}</h1><div class=sub>{html.escape(sub)}</div>"
        f"{_cards(runs)}<div class=plots>{plots}</div>{tables}{_sources(runs)}</main></body></html>\n"
    )


def _workload_words(runs: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(run["workload"]["name"] for run in runs))
    return f"Workload: {', '.join(names)}."


def _cards(runs: Sequence[dict[str, Any]]) -> str:
    """The last label against the first, at the largest load that both have: what a reader takes away."""
    grouped = same_agents(runs)
    labels = list(grouped)
    base, best = labels[0], labels[-1]
    common = grouped[base].keys() & grouped[best].keys()
    if base == best or not common:
        return ""
    agents = max(common)
    groups = {label: grouped[label][agents] for label in (base, best)}
    cards = []
    for name, path, lower in (
        ("time to first token, median", ("ttft_s", "p50"), True),
        ("prompt + output tokens per second", ("total_tok_per_s",), False),
        ("time to first token, 95th percentile", ("ttft_s", "p95"), True),
    ):
        before, after = (pick(group[len(group) // 2], path) for group in groups.values())
        if before and after:
            ratio = f"{100 * (after / before - 1):+.0f} %" if lower else f"{after / before:.1f}x"
            cards.append(f"<div class=card><b>{ratio.replace('-', '−')}</b><span>{name}</span></div>")
    reached = pick(groups[best][0], ("ideal_fraction",))
    if reached is not None:
        cards.append(
            f"<div class=card><b>{100 * reached:.1f} %</b><span>of an infinite cache's hits reached</span></div>"
        )
    words = f"{html.escape(best)} against {html.escape(base)}, {agents} at once"
    return f"<div class=cards>{''.join(cards)}</div><div class=note>{words}</div>" if cards else ""


def _table(runs: Sequence[dict[str, Any]]) -> str:
    groups = group_runs(runs)
    colours = label_colours(runs)
    heads = "".join(
        f'<th><span class=dot style="background:{colours[label]}"></span>{html.escape(label)}</th>' for label in groups
    )
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in comparison(groups)
    )
    notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in differences(runs))
    return f"<div class=wide><table><tr><th></th>{heads}</tr>{body}</table></div>{notes}"


def _sources(runs: Sequence[dict[str, Any]]) -> str:
    lines = []
    for run in runs:
        facts = ", ".join(f"{key} {value}" for key, value in run["workload"].items() if key != "name")
        load = ", ".join(f"{key} {value}" for key, value in run["load"].items() if value)
        lines.append(
            f"<li>{html.escape(run['label'])}: {html.escape(run['workload']['name'])} "
            f"<code>{html.escape(facts)}</code>{' <code>' + html.escape(load) + '</code>' if load else ''}, "
            f"{run['summary']['num_requests']} requests, {run['summary']['num_errors']} failed, {run['finished']}</li>"
        )
    return f"<h2>Runs</h2><ul class=note>{''.join(lines)}</ul>"


def _svg(figure: Figure, name: str) -> str:
    """The picture as an <svg> element for use inside a page: ids made unique, no XML prologue."""
    buffer = io.StringIO()
    save(figure, buffer, "svg")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", text)
