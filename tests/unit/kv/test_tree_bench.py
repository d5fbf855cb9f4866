"""The benchmark of the tree, at a size that tests afford."""

from __future__ import annotations

import pytest

from phloem.bench import tree


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
