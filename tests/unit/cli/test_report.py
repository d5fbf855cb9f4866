"""What is printed at the start: capacity, the ready line, a curl that a shell can run."""

from __future__ import annotations

import io
import json
import shlex

import pytest

from phloem import __version__
from phloem.cli.report import ProgressLine, capacity, engine_facts, ready, size

FACTS = {
    "model": "demo",
    "device": "cpu",
    "isa": "avx2",
    "threads": 2,
    "weight_bytes": 100 << 20,
    "kv_tokens": 20000,
    "kv_bytes_per_token": 1 << 20,
    "kv_cache_dtype": "f16",
    "max_model_len": 8192,
}


def test_the_facts_name_version_device_weights_and_capacity() -> None:
    first, second, third = engine_facts(FACTS)
    assert first == f"version {__version__} on cpu (isa avx2, threads 2)"
    assert second == "model demo: weights 100.0 MiB"
    assert third == "KV cache: 20000 tokens, f16, 19.53 GiB, fits 2 requests of 8192 tokens"


@pytest.mark.parametrize(
    ("kv_tokens", "length", "expected"),
    [
        (100, 10, "fits 10 requests of 10 tokens"),
        (19, 10, "fits 1 request of 10 tokens"),
        (9, 10, "fits no request of 10 tokens, one of 9 at most"),
    ],
)
def test_capacity(kv_tokens: int, length: int, expected: str) -> None:
    assert capacity(kv_tokens, length) == expected


def test_sizes() -> None:
    assert size(1 << 20) == "1.0 MiB"
    assert size(3 << 29) == "1.50 GiB"


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_curl_to_paste_is_valid_shell_and_json(needs_key: bool) -> None:
    line, example = ready("http://127.0.0.1:30000", "bob's", needs_key)
    assert line == "ready on http://127.0.0.1:30000"
    words = shlex.split(example.partition("\n")[2])
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:30000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "bob's"
    assert ("Authorization: Bearer YOUR_KEY" in words) is needs_key


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_redrawn_on_a_terminal_and_one_line_a_stage_elsewhere() -> None:
    for stream in (io.StringIO(), Terminal()):
        line = ProgressLine(stream)
        for fraction in (0.0, 0.5, 1.0):
            line("reading weights", fraction)
        line("building the tree", 0.0)
        line("done", 1.0)
        line.close()
        if stream.isatty():
            assert "\n" not in stream.getvalue()
            assert stream.getvalue().endswith("\r\x1b[K")
        else:
            assert stream.getvalue() == "phloem: reading weights ...\nphloem: building the tree ...\n"
