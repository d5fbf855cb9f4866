"""POST /v1/embeddings: forms of input and output, usage, refusals."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phloem.errors import StepFailedError
from phloem.server.embeddings import unit
from tests.server.conftest import Running

Serve = Callable[..., Running]


def expected(*ids: int) -> np.ndarray:
    vector = np.array([np.mean(ids), 1.0, 0.0], np.float32)
    return vector / np.linalg.norm(vector)


def test_official_client(serve: Serve) -> None:
    """It asks for base64 and shows floats."""
    answer = serve().openai.embeddings.create(model="", input=["ab", "c"])
    assert [item.index for item in answer.data] == [0, 1]
    np.testing.assert_allclose(answer.data[0].embedding, expected(97, 98), rtol=1e-6)
    np.testing.assert_allclose(answer.data[1].embedding, expected(99), rtol=1e-6)
    assert (answer.object, answer.model) == ("list", "fake-model")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)


@pytest.mark.parametrize("value", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_forms_of_input(serve: Serve, value: Any) -> None:
    answer = serve().post("/v1/embeddings", {"input": value}).json()
    (item,) = answer["data"]
    np.testing.assert_allclose(item["embedding"], expected(97, 98), rtol=1e-6)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_encodings_are_the_same_vector(serve: Serve) -> None:
    server = serve()
    floats, packed = (
        server.post("/v1/embeddings", {"input": "xyz", "encoding_format": form}).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(floats, np.float32))


def test_last_token(serve: Serve) -> None:
    answer = serve().post("/v1/embeddings", {"input": "ab", "pooling": "last"}).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected(98), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", 5]}, 400, "input[1]"),
        ({"input": [1, -1]}, 400, "input"),
        ({"input": [1, 10**6]}, 400, "input"),
        ({"input": "a" * 5000}, 400, "input"),
        ({"input": "a", "dimensions": 8}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "pooling": "max"}, 400, "pooling"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": ["a"] * 1025}, 400, "input"),
    ],
)
def test_refused(serve: Serve, fields: dict[str, Any], status: int, param: str) -> None:
    response = serve().post("/v1/embeddings", fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_a_vector_that_is_not_finite_is_no_answer() -> None:
    with pytest.raises(StepFailedError):
        unit(np.array([1.0, np.nan], np.float32))
    assert unit(np.zeros(2, np.float32)).tolist() == [0.0, 0.0]
