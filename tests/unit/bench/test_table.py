"""The comparison of caches on a small random model, and what is made of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem.bench import compare, metrics, report, table
from phloem.bench.no_cache import NoCacheManager
from phloem.errors import UsageError
from phloem.types import DEFAULT_NAMESPACE
from tests.helpers.models import hf_model, save_folder


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a small run of the table writes."""
    folder = tmp_path_factory.mktemp("table")
    model = save_folder(hf_model("llama", max_position_embeddings=8192), folder / "model")
    path = folder / "t.json"
    assert table.main(["--model", str(model), "--agents", "1", "3", "--repeat", "1", "--json", str(path)]) == 0
    return path


def test_the_tree_reaches_the_ideal_and_no_cache_reaches_nothing(result: Path) -> None:
    runs = metrics.read_results(result)
    assert {run["label"] for run in runs} == {column.label for column in table.COLUMNS}
    for run in runs:
        figures = run["summary"]
        assert (figures["num_requests"], figures["num_errors"]) == (5 * run["workload"]["agents"], 0)
        assert figures["output_tokens"] == 16 * figures["num_requests"]
        assert run["peak_kv_bytes"] > 0
        counters = run["target"]["counters"]
        assert counters["num_finished"] == figures["num_requests"]
        if run["label"] == "no cache":
            assert figures["cached_tokens"] == 0
        else:
            assert figures["cached_tokens"] > 0.5 * figures["prompt_tokens"]
        if run["label"] == "radix tree":
            assert figures["cached_tokens"] + counters["num_deduplicated_tokens"] >= figures["ideal_tokens"] * 0.95


def test_answers_are_the_same_with_each_cache(result: Path) -> None:
    runs = metrics.read_results(result)
    assert "are the same" in table.answers_words(runs)
    runs[0]["answers"] = "other"
    assert "WARNING: answers differ between caches at 1 agents" in table.answers_words(runs)


def test_the_table_shows_each_cache_at_each_load(result: Path) -> None:
    runs = metrics.read_results(result)
    shown = table.as_table(runs)
    assert shown.row_count == 2 * len(table.COLUMNS)
    assert list(shown.columns[1].cells) == [column.label for column in table.COLUMNS] * 2
    assert "x)" in list(shown.columns[2].cells)[1]


def test_the_page_needs_nothing_else_and_holds_every_picture(result: Path, tmp_path: Path) -> None:
    runs = metrics.read_results(result)
    page = report.write_report(runs, tmp_path, title="A <title>").read_text()
    assert page.count("<svg") == page.count("<figure>") == len(list(tmp_path.glob("*.png"))) == 4
    assert "A &lt;title&gt;" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page
    for png in tmp_path.glob("*.png"):
        assert png.stat().st_size > 10_000


def test_pictures_repeat_byte_for_byte(result: Path, tmp_path: Path) -> None:
    runs = metrics.read_results(result)
    pages = [report.write_report(runs, tmp_path / name, title="t").read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]


def run_of(label: str, rate: float, **workload: object) -> dict[str, Any]:
    summary = {"total_tok_per_s": rate, "ttft_s": {"p50": 1 / rate}, "num_errors": 0, "num_requests": 1}
    return {
        "format": 1,
        "label": label,
        "summary": summary,
        "workload": {"name": "agents", "agents": 2, **workload},
        "load": {},
        "machine": {"cpu": "x", "cores": 2},
    }


def test_ratios_are_to_the_first_and_repeats_count_as_their_median(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_of("a", 100), *[run_of("b", rate) for rate in (150, 200, 900)], run_of("c", 50, seed=1)]
    files = []
    for index, run in enumerate(runs):
        files.append(tmp_path / f"{index}.json")
        files[-1].write_text(json.dumps(run))
    assert compare.main([*map(str, files), "--markdown"]) == 0
    shown = capsys.readouterr()
    assert "| prompt + output, tok/s | 100 | 200 (2.00x) | 50 (0.50x) |" in shown.out
    assert "| TTFT p50, ms | 10 | 5 (0.50x) | 20 (2.00x) |" in shown.out


def test_other_workloads_are_pointed_out() -> None:
    notes = compare.differences([run_of("a", 1, seed=0), run_of("b", 1, seed=1), run_of("c", 1, seed=0)])
    assert notes == ["b differs from a in seed"]


def test_runs_of_different_load_are_never_mixed() -> None:
    groups = compare.by_load([run_of("a", 1, agents=10), run_of("a", 2, agents=1), run_of("b", 3, agents=10)])
    assert [(heading, len(runs)) for heading, runs in groups] == [("1 at once", 1), ("10 at once", 2)]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 0}', "no json"])
def test_other_files_are_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"x\.json"):
        metrics.read_results(path)


def test_without_matplotlib_the_remedy_is_named(result: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from phloem.cli.main import main\n"
        f"sys.exit(main(['bench', 'report', {str(result)!r}, '--out', {str(tmp_path / 'r')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'phloem[bench]'" in done.stderr


def test_no_cache_shares_nothing_and_frees_at_close() -> None:
    manager = NoCacheManager(num_pages=64)
    space = manager.namespace_id(DEFAULT_NAMESPACE)
    tokens = np.arange(20, dtype=np.int32)
    cursors = []
    for step in (1, 2):
        assert manager.peek(space, tokens).length == 0
        cursor, length = manager.open(space, tokens)
        assert length == 0
        assert manager.append(cursor, tokens, step)
        manager.complete(step)
        cursors.append(cursor)
    assert manager.stats().num_pages_protected == 40
    for cursor in cursors:
        manager.close(cursor)
    stats = manager.stats()
    assert (stats.num_pages_free, stats.num_pages_evictable, stats.num_pages_protected) == (64, 0, 0)
    manager.check_invariants()
