"""Pictures: what can be checked without looking at them."""

from __future__ import annotations

from phloem.bench.plots import apart


def test_labels_of_close_values_are_moved_apart() -> None:
    assert apart([10.0, 1.0, 9.5], 2.0) == [11.5, 1.0, 9.5]
    assert apart([3.0, 3.0, 3.0], 1.0) == [3.0, 4.0, 5.0]
    assert apart([5.0, 1.0], 2.0) == [5.0, 1.0]
