"""No request makes a 500: any JSON in any field of any route, any address, any bytes. scripts/fuzz-http has more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phloem.engine.async_engine import AsyncEngine
from phloem.runner.null_runner import NullRunner
from phloem.server.anthropic import MessagesBody
from phloem.server.app import create_app
from phloem.server.embeddings import EmbeddingsBody
from phloem.server.native import AbortBody, GenerateBody, NativeSampling
from phloem.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from phloem.server.responses import ResponsesBody
from tests.helpers.fake_model import fake_parts
from tests.server.conftest import Running, serving
from tests.server.fake_engine import VOCAB, FakeEngine, FakeTokenizer

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system", "x"]), "content": JSON}),
    max_size=3,
)
BODIES = (ChatBody, CompletionBody, GenerateBody, MessagesBody, ResponsesBody, TokenizeBody, DetokenizeBody, AbortBody)
BODIES += (EmbeddingsBody, NativeSampling)
FIELDS = sorted({name for body in BODIES for name in body.model_fields})
PATHS = create_app(FakeEngine()).openapi()["paths"]
ROUTES = sorted(path for path, methods in PATHS.items() if "post" in methods)


@pytest.fixture(scope="module", params=["fake engine", "real engine without a model"])
def shared(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server in front of the fake engine, or of the real one with the real scheduler and cache."""
    if request.param == "fake engine":
        with serving(FakeEngine.saying("ok", max_model_len=256)) as server:
            yield server
        return
    engine = AsyncEngine(
        replace(
            fake_parts(max_model_len=256, runner=NullRunner(num_slots=4096, vocab_size=VOCAB)),
            tokenizer=cast("Any", FakeTokenizer()),
        )
    )
    with serving(cast("Any", engine)) as server:
        yield server
        assert engine.state() == "ready"
    engine.close()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(ROUTES),
    extra=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    messages=MESSAGES,
    sound=st.booleans(),
)
def test_no_body_makes_a_500(shared: Running, route: str, extra: dict[str, Any], messages: Any, sound: bool) -> None:
    """Any JSON in any known field of any route: an answer or a 4xx in JSON, never a fault of ours."""
    base: dict[str, Any] = {
        "max_tokens": 4,
        "messages": messages,
        "prompt": "a",
        "input": "a",
        "text": "a",
        "tokens": [1],
    }
    if sound:
        base["messages"] = [{"role": "user", "content": "a"}]
    response = shared.post(route, {**base, **extra})
    assert response.status_code in (200, 400, 404), (response.status_code, response.text)
    if response.status_code != 200:
        assert json.loads(response.text)["error"]["message"]
    else:
        assert "internal_error" not in response.text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD"]),
    path=st.sampled_from(sorted(PATHS)),
    name=st.text(max_size=20),
    query=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    content=st.binary(max_size=40),
)
def test_no_address_makes_a_500(
    shared: Running, method: str, path: str, name: str, query: dict[str, str], content: bytes
) -> None:
    """Any method, path parameter, query and bytes as body."""
    quoted = quote(name.encode("utf-8", "surrogatepass"), safe="")
    address = re.sub(r"\{\w+\}", lambda _: quoted, path)
    response = shared.http.request(method, address, params=query, content=content)
    assert response.status_code < 500, (response.status_code, response.text)


def test_numbers_at_their_limits(shared: Running) -> None:
    """Each numeric field at the ends of every width of integer and float: refused, or served."""
    ends = [sign * (2**bits + off) for bits in (31, 32, 63, 64, 70) for off in (-1, 0) for sign in (1, -1)]
    values: list[float] = [0, *ends, 10**4000, 5e-324, 1e-300, 1e300, -1e300, 0.5, -0.5]
    fields = [
        name
        for name, field in CompletionBody.model_fields.items()
        if field.annotation in (int | None, float | None) and name != "n"
    ]
    assert {"priority", "seed", "top_k", "temperature"} <= set(fields)
    for name in fields:
        for value in values:
            response = shared.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: value})
            assert response.status_code in (200, 400), (name, value, response.status_code, response.text[:200])
    assert shared.http.get("/health").status_code == 200
