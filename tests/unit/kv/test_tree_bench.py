"""The benchmark of the tree, at a size that tests afford."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from phloem.bench import sglang_tree, tree
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
        assert result.hit_tokens >= tree.play(tree.PlainPlayer(num_pages), calls).hit_tokens
        hits.append(result.hit_tokens)
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


def test_without_sglang_it_is_left_out_and_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_tree, "find_spec", lambda name: None)
    tree._print_trace(5, [1.0])
    assert "SGLang's trees are left out: sglang is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("unified", [False, True])
def test_an_installed_sglang_is_played(monkeypatch: pytest.MonkeyPatch, unified: bool) -> None:
    """Against a stand-in with the interface that the player calls, backed by the plain tree."""
    fakes = {
        "torch": SimpleNamespace(int64=np.int64, cat=np.concatenate),
        "base_prefix_cache": FakeBase,
        "radix_cache": FakeTrees,
        "unified_radix_cache": FakeTrees,
        "unified_cache.component_type": SimpleNamespace(ComponentType=SimpleNamespace(FULL=0)),
        "allocator.token": SimpleNamespace(TokenToKVPoolAllocator=FakeSlots),
        "cache_init_params": SimpleNamespace(CacheInitParams=SimpleNamespace),
    }
    monkeypatch.setattr(sglang_tree, "find_spec", lambda name: name == "sglang")
    monkeypatch.setattr(sglang_tree, "import_module", lambda name: fakes[name.removeprefix("sglang.srt.mem_cache.")])
    assert len(tree._players()) == 4
    calls = tree.agent_trace(20)
    num_pages = max(tree.footprint(calls) // 5, 8192)
    player = sglang_tree.SGLangPlayer(num_pages, unified=unified)
    assert tree.play(player, calls).hit_tokens == tree.play(tree.PlainPlayer(num_pages), calls).hit_tokens


class FakeBase:
    MatchPrefixParams = EvictParams = InsertParams = SimpleNamespace


class FakeSlots:
    def __init__(self, size: int, *_args: object) -> None:
        self.free = list(range(size))

    def available_size(self) -> int:
        return len(self.free)

    def alloc(self, n: int):
        slots, self.free = self.free[:n], self.free[n:]
        return np.array(slots)


class RustUnifiedTreeCore:
    """Named as the core that the player insists on."""


class FakeCache:
    def __init__(self, parameters) -> None:
        self.tree, self.slots = PlainTree(0), parameters.token_to_kv_pool_allocator
        self.tree_core = RustUnifiedTreeCore()

    def match_prefix(self, params):
        node, length = self.tree.match(params.key)
        return SimpleNamespace(last_device_node=(node, length), device_prefix_len=length)

    def path_device_indices(self, place):
        return np.zeros(place[1], np.int64)

    def evict(self, params) -> None:
        self.tree.evict(params.num_tokens)
        self.slots.free += self.tree.free
        self.tree.free = []

    def insert(self, params) -> None:
        self.tree.insert(params.key, params.value[params.prev_prefix_len :])

    def lock(self, place):
        self.tree.lock(place[0], 1)
        return place

    def unlock(self, place) -> None:
        self.tree.lock(place[0], -1)


class FakeTrees:
    RadixKey = staticmethod(lambda tokens, limit=None: np.array(tokens[:limit], dtype=np.int32))
    RadixCache = UnifiedRadixCache = FakeCache
