"""Fixed page ids."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.errors import CacheError, CapacityError
from phloem.kv.page_pool import PagePool
from tests.unit.kv.helpers import int32


def test_allocates_all_or_nothing_and_each_page_once() -> None:
    pool = PagePool(8)
    first = pool.allocate(5)
    assert first is not None
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    second = pool.allocate(3)
    assert second is not None
    assert sorted([*first, *second]) == list(range(8))
    pool.free(first)
    again = pool.allocate(5)
    assert again is not None
    assert again.tolist() == first.tolist(), "a freed run comes back in its order"


def test_bad_calls_change_nothing() -> None:
    pool = PagePool(8)
    pages = pool.allocate(4)
    assert pages is not None
    for bad in (int32(8), int32(-1), int32(int(pages[0]), 7), int32(int(pages[0]), int(pages[0]))):
        with pytest.raises(CacheError, match="not in use"):
            pool.free(bad)
        assert pool.num_free == 4
    with pytest.raises(CapacityError, match="has 8"):
        pool.allocate(9)
    with pytest.raises(CacheError):
        pool.allocate(-1)
    with pytest.raises(CacheError, match="int32"):
        pool.free(np.zeros(1))
    pool.free(pages)
    assert pool.num_free == 8
    with pytest.raises(CacheError):
        PagePool(0)
