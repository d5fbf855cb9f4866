"""The benchmark of the tree, at a size that tests afford."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from phloem.bench import tree
from phloem.bench.plain_tree import PlainTree


def test_tail_trim_hits_no_less_than_a_plain_tree_at_every_pool_size() -> None:
    calls = tree.agent_trace(60)
    pages = tree.footprint(calls)
    hits = []
    for share in (0.1, 0.3, 1.1):
        num_pages = max(int(pages * share), 5000)
        native = tree.NativePlayer(num_pages)
        result = tree.play(native, calls)
        native.cache.check_invariants()
        assert result.hit_rate >= tree.play(tree.PlainPlayer(num_pages), calls).hit_rate
        hits.append(result.hit_rate)
    assert hits == sorted(hits)


def test_a_trace_repeats_from_its_seed() -> None:
    first, second, other = (tree.agent_trace(20, seed) for seed in (1, 1, 2))
    assert [call.tokens.tolist() for call in first] == [call.tokens.tolist() for call in second]
    assert len(first) != len(other) or first[0].tokens.tolist() != other[0].tokens.tolist()
    assert all(0 < call.num_prompt < len(call.tokens) for call in first)


def test_it_prints_every_figure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAVES", (50, 100))
    assert tree.main(["--conversations", "10", "--repeats", "1", "--million", "500"]) == 0
    printed = capsys.readouterr().out
    for figure in ("lookup of 4,096", "evict, per node", "decode of 64", "10,000 waiting", "metadata", "requests/s"):
        assert figure in printed


def test_without_sglang_it_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    tree._print_trace(5, [1.0])
    printed = capsys.readouterr().out
    try:
        importlib.import_module("sglang")
    except ImportError:
        assert "sglang is not installed" in printed
    else:
        assert "SGLang RadixCache" in printed


def test_an_installed_sglang_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with the interface that the player calls, backed by the plain tree."""
    fakes = {"torch": FakeTorch, "sglang.srt.mem_cache.base_prefix_cache": FakeBase}
    fakes["sglang.srt.mem_cache.radix_cache"] = FakeRadix
    monkeypatch.setattr(tree, "find_spec", lambda name: name == "sglang")
    monkeypatch.setattr(importlib, "import_module", lambda name: fakes[name])
    monkeypatch.delitem(sys.modules, "phloem.bench.sglang_tree", raising=False)
    player = tree._sglang_player()
    monkeypatch.delitem(sys.modules, "phloem.bench.sglang_tree")  # it holds the stand-ins: no later test may see it
    assert player is not None
    calls = tree.agent_trace(20)
    num_pages = max(tree.footprint(calls) // 5, 8192)
    assert tree.play(player(num_pages), calls).hit_rate == tree.play(tree.PlainPlayer(num_pages), calls).hit_rate


class FakeTorch:
    cat = staticmethod(np.concatenate)
    from_numpy = staticmethod(lambda array: array)


class FakeBase:
    MatchPrefixParams = EvictParams = InsertParams = staticmethod(lambda **fields: SimpleNamespace(**fields))


class FakeCache:
    def __init__(self, pool) -> None:
        self.tree, self.pool = PlainTree(0), pool

    def match_prefix(self, params):
        node, length = self.tree.match(params.key)
        return SimpleNamespace(last_device_node=node, device_indices=np.zeros(length, np.int64))

    def evict(self, params) -> None:
        self.tree.evict(params.num_tokens)
        self.pool.free(np.array(self.tree.free))
        self.tree.free = []

    def insert(self, params) -> None:
        new = len(params.value) - self.tree.match(params.key)[1]
        self.tree.insert(params.key, params.value[len(params.value) - new :])

    def inc_lock_ref(self, node) -> None:
        self.tree.lock(node, 1)

    def dec_lock_ref(self, node) -> None:
        self.tree.lock(node, -1)


class FakeRadix:
    RadixKey = staticmethod(lambda tokens, extra: np.array(tokens, dtype=np.int32))
    RadixCache = SimpleNamespace(create_simulated=lambda mock_allocator: FakeCache(mock_allocator))
