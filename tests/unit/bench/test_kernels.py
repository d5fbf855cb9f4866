"""The kernel benchmark at tiny sizes: every table has its rows, and their figures are possible ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phloem.bench import kernels
from phloem.models.load import LoadedModel, random_weights
from phloem.models.spec import ModelSpec
from tests.kernels.reference import random_spec


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", ((40, 64),))
    monkeypatch.setattr(kernels, "ROWS", (1, 3))
    monkeypatch.setattr(kernels, "SHARED", 192)
    monkeypatch.setattr(kernels, "CHUNK", 64)
    # Both take seconds, and the figures here are not looked at.
    monkeypatch.setattr(kernels.native, "measure_peak", lambda *_: 1e9)
    monkeypatch.setattr(kernels.native, "measure_bandwidth", lambda *_: 1e9)


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", line)]


def test_products_print_one_line_per_format_shape_and_row_count(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.print_products("portable", threads=1, repeats=1)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["q4m", "q4m", "q8", "q8", "bf16", "bf16"]
    for line in lines:
        n, k, rows, speed, share, _ = numbers(line.split(maxsplit=1)[1])
        assert (n, k, rows in (1, 3)) == (40, 64, True)
        assert speed > 0
        assert share >= 0


def tiny_model() -> tuple[ModelSpec, LoadedModel]:
    spec = random_spec(max_position_embeddings=4096)
    return spec, LoadedModel(spec, random_weights(spec), None, "tiny", Path("tiny"))  # type: ignore[arg-type]


def test_grouping_compares_the_same_plans(capsys: pytest.CaptureFixture[str]) -> None:
    _, model = tiny_model()
    kernels.print_grouping(model, "portable", threads=1, repeats=1)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line[:26].strip() for line in lines] == [
        "32 rows sharing 192",
        "32 rows sharing nothing",
        "32 rows of one token",
        "attention (first - third)",
    ]
    for line in lines[:3]:
        alone, grouped, middle, low, high = numbers(line[26:])
        assert alone > 0
        assert grouped > 0
        assert low <= middle <= high


def test_large_reads_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    spec, _ = tiny_model()
    kernels.print_large(spec, "portable", threads=1, repeats=1)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[3] for line in lines] == ["q4", "q8"]
    for line in lines:
        speed, _, share, low, high = numbers(line[26:])
        assert speed > 0
        assert low <= share <= high
