"""API keys from flags, files and the environment: all add up, and a bad source stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.cli.serve_args import parse_serve
from phloem.config import ServerConfig
from phloem.errors import UsageError


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def server(model: str, *words: object) -> ServerConfig:
    return parse_serve([model, *map(str, words)]).server


def test_all_sources_add_up(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("# team A\nfile-1\n\n  file-2  \r\n")
    two.write_text("file-3")
    monkeypatch.setenv("PHLOEM_API_KEY", "env-1 env-2\nfile-1")
    config = server(model, "--api-key", "flag", "--api-key-file", one, "--api-key-file", two)
    assert config.api_keys == ("flag", "file-1", "file-2", "file-3", "env-1", "env-2")
    assert config.admin_api_key == ""


def test_keys_of_a_file_count_as_keys(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k")
    assert parse_serve([model, "--host", "0.0.0.0", "--api-key-file", str(keys)]).warnings == []


@pytest.mark.parametrize("source", ["flag", "file", "variable"])
def test_admin_key(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    path = tmp_path / "admin"
    path.write_text("root\n")
    words: dict[str, list[object]] = {"flag": ["--admin-api-key", "root"], "file": ["--admin-api-key-file", path]}
    if source == "variable":
        monkeypatch.setenv("PHLOEM_ADMIN_API_KEY", "root")
    assert server(model, *words.get(source, ())).admin_api_key == "root"


def test_the_same_admin_key_twice(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHLOEM_ADMIN_API_KEY", "root")
    assert server(model, "--admin-api-key", "root").admin_api_key == "root"
    with pytest.raises(UsageError, match="2 different admin keys"):
        server(model, "--admin-api-key", "other")


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"\xff\xfe", None])
@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-api-key-file"])
def test_bad_file(model: str, tmp_path: Path, flag: str, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=flag):
        server(model, flag, path)


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
@pytest.mark.parametrize("key", ["", "two words", "clé", "tab\tbed", "nul\x00"])
def test_key_that_no_header_carries(model: str, flag: str, key: str) -> None:
    with pytest.raises(UsageError) as caught:
        server(model, flag, key)
    assert "key" in caught.value.message
    assert not key or key not in caught.value.message
