"""Images in a token sequence: never half matched, never taken for one another."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from phloem.errors import InvalidRequestError
from phloem.kv.spans import MIN_SPAN, span_ids
from tests.unit.kv.helpers import assert_idle, int32, new_cache, run, store


def image(name: str, length: int = 12) -> np.ndarray:
    return span_ids(hashlib.sha256(name.encode()).digest(), length)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_match_ends_before_an_image_or_behind_it(page_size: int) -> None:
    cache, ns = new_cache(page_size=page_size)
    red = image("red")
    prompt = np.concatenate([run(1, 4), red, run(5, 8)])
    store(cache, ns, prompt)
    assert cache.peek(ns, prompt).length == 20
    assert cache.peek(ns, np.concatenate([run(1, 4), red])).length == 16
    # The end of the image is gone: its beginning is of no use.
    cache.evict(20 // page_size - 8 // page_size)
    assert cache.stats().num_tokens == 8
    assert cache.peek(ns, prompt).length == 4
    cursor, length = cache.open(ns, prompt)
    assert length == 4
    assert cache.advance(cursor, prompt[4:]) == 0
    assert cache.append(cursor, prompt[4:], 1).num_shared == 4, "what is there is shared, though it can't be matched"
    cache.complete(1)
    cache.close(cursor)
    assert cache.peek(ns, prompt).length == 20
    assert_idle(cache)


def test_an_image_that_shares_ids_by_forgery_is_not_half_reused() -> None:
    cache, ns = new_cache()
    true, forged = image("a"), image("a").copy()
    forged[7:] = image("b")[7:]
    store(cache, ns, np.concatenate([run(1, 4), true]))
    assert cache.peek(ns, np.concatenate([run(1, 4), forged])).length == 4


def test_the_same_question_about_three_images() -> None:
    cache, ns = new_cache(num_pages=256)
    prompts = [np.concatenate([run(1, 4), image(name), run(5, 9)]) for name in ("red", "green", "blue", "red")]
    assert [store(cache, ns, prompt) for prompt in prompts] == [0, 4, 4, 21]


def test_the_same_content_at_another_length_shares_nothing() -> None:
    assert not np.intersect1d(image("a", 12), image("a", 13)).size


def test_two_hundred_thousand_images_never_meet() -> None:
    keys = {span_ids(i.to_bytes(16, "little"), MIN_SPAN).tobytes() for i in range(200_000)}
    assert len(keys) == 200_000


def test_ids_are_below_zero_and_only_the_first_is_marked() -> None:
    ids = image("a", 100).view(np.uint32)
    assert (ids >> 31 == 1).all()
    assert ((ids >> 30 & 1) == np.array([1] + [0] * 99)).all()


def test_short_digests_and_spans_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        span_ids(b"short", 12)
    with pytest.raises(InvalidRequestError, match="5 positions"):
        span_ids(bytes(16), 4)
    assert int32(-1).dtype == span_ids(bytes(16), 5).dtype
