"""/generate, /abort, health, metrics and the other routes beside the OpenAI ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phloem.errors import EngineUnavailableError
from phloem.server import native
from tests.server.conftest import Running
from tests.server.fake_engine import END, FakeEngine

Serve = Callable[..., Running]


def test_generate_one_prompt(serve: Serve) -> None:
    server = serve(FakeEngine.saying("žluťoučký kůň"))
    for body in ({"text": "ab"}, {"input_ids": [97, 98]}):
        answer = server.post("/generate", body).json()
        assert answer["text"] == "žluťoučký kůň"
        meta = answer["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, len(answer["output_ids"]))
        assert meta["finish_reason"] == {"type": "stop", "matched": END}
    assert meta["cached_tokens"] == 1
    cut = server.post("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}}).json()
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_generate_batches_and_n(serve: Serve) -> None:
    server = serve(FakeEngine(script=lambda request, index: f"{request.prompt.tolist()}{index}"))
    answers = server.post("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}).json()
    assert [answer["text"] for answer in answers] == ["[97]0", "[97]1", "[98]0", "[98]1"]
    different = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    answers = server.post("/generate", {"input_ids": [[97], [98]], "sampling_params": different}).json()
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2]


def test_generate_stream_is_cumulative(serve: Serve) -> None:
    server = serve()
    lines = server.post("/generate", {"text": "a", "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2]]
    assert [chunk["text"] for chunk in chunks][:2] == ["H", "He"]
    assert chunks[-1]["text"] == "Hello world"
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks][:-1] == [None] * (len(chunks) - 1)


def test_generate_logprobs(serve: Serve) -> None:
    body = {"input_ids": [97, 98, 99], "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    meta = serve(FakeEngine.saying("~")).post("/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, None], [-0.5, 98, None], [-0.5, 99, None]]
    assert meta["output_token_logprobs"][0] == [-9999.0, ord("~"), None]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]


def test_generate_with_schema_and_regex(serve: Serve) -> None:
    server = serve(FakeEngine.saying("no"))
    for sampling, text in (
        ({"json_schema": '{"enum": ["x"]}'}, '"x"'),
        ({"regex": "ab"}, "ab"),
        ({"ebnf": 'root ::= "q"'}, "q"),
    ):
        assert server.post("/generate", {"text": "a", "sampling_params": sampling}).json()["text"] == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [[]]}, "input_ids[0]"),
        ({"input_ids": [999999]}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"text": [97, 98]}, "text"),
        ({"text": ["a", [97]]}, "text"),
        ({"text": "abc", "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "7"}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "rid": ["x"]}, "rid"),
    ],
)
def test_generate_names_what_is_wrong(serve: Serve, body: dict[str, Any], param: str) -> None:
    response = serve().post("/generate", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_abort_by_rid_ends_the_request(serve: Serve) -> None:
    server = serve(FakeEngine.saying("x" * 10_000, delay_s=0.01, max_model_len=20_000))
    answers: list[Any] = []
    sampling = {"max_new_tokens": 9000}
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/generate", {"text": "a", "rid": "me", "sampling_params": sampling}))
    )
    thread.start()
    while not server.engine.num_live:
        time.sleep(0.01)
    assert server.post("/generate", {"text": "a", "rid": "me"}).json()["error"]["param"] == "rid"
    assert server.post("/abort", {"rid": "other"}).json()["num_aborted"] == 0
    assert server.post("/abort", {"rid": "me"}).json() == {"success": True, "num_aborted": 1}
    thread.join(5.0)
    assert answers[0].status_code == 503
    assert "aborted" in answers[0].json()["error"]["message"]
    assert server.post("/abort", {}).status_code == 400


def test_each_prompt_of_a_batch_has_its_rid_and_can_be_aborted_by_it(serve: Serve) -> None:
    server = serve(FakeEngine.saying("x" * 10_000, delay_s=0.01, max_model_len=20_000))
    body = {"text": ["a", "b"], "rid": ["first", "second"], "sampling_params": [{"max_new_tokens": 9000}] * 2}
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    while server.engine.num_live < 2:
        time.sleep(0.01)
    assert server.post("/generate", {"text": "a", "rid": "second"}).json()["error"]["param"] == "rid"
    assert server.post("/abort", {"rid": "second"}).json() == {"success": True, "num_aborted": 1}
    thread.join(5.0)
    assert answers[0].status_code == 503
    done = server.post("/generate", {**body, "sampling_params": {"max_new_tokens": 2}}).json()
    assert [answer["meta_info"]["id"] for answer in done] == ["first", "second"]


def test_health_version_models_and_flush(serve: Serve) -> None:
    server = serve()
    assert server.http.get("/health").json() == {"status": "ready"}
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.get("/version").json()["version"]
    assert [model.id for model in server.openai.models.list()] == ["fake-model"]
    assert server.openai.models.retrieve("fake-model").id == "fake-model"
    for name in ("no-such", "..%2f..%2fetc", "FAKE-MODEL"):
        assert server.http.get(f"/v1/models/{name}").json()["error"]["code"] == "model_not_found"
    server.chat()
    assert server.post("/flush_cache", {}).json() == {"success": True, "pages_freed": 7}
    assert server.chat().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    info = server.http.get("/server_info").json()
    assert info["engine"] == {"backend": "fake"}


@pytest.mark.parametrize("state", ["loading", "draining", "stopped", "failed"])
def test_health_generate_is_503_where_nothing_is_generated(serve: Serve, state: Any) -> None:
    engine = FakeEngine()
    server = serve(engine)
    engine.current = state
    response = server.http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"]


@pytest.mark.parametrize(
    "engine",
    [
        FakeEngine(delay_s=60.0),
        FakeEngine(fail_after=0),
        FakeEngine(fail_after=0, failure=EngineUnavailableError("gone")),
        FakeEngine(max_live=0),
    ],
)
def test_health_generate_is_503_where_no_token_comes(
    serve: Serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that hangs, fails, dies or has no place: a monitor sees one status for all, and soon."""
    monkeypatch.setattr(native, "HEALTH_TIMEOUT_S", 0.3)
    response = serve(engine).http.get("/health_generate", timeout=5.0)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


def test_generate_lists_the_prompt_from_where_it_is_asked(serve: Serve) -> None:
    """A first token has nothing before it, and so no logprob; it is listed all the same."""
    server = serve()

    def listed(start: int, ids: list[int]) -> Any:
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
        meta = server.post("/generate", body).json()["meta_info"]
        assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"])
        return [(pair[0], pair[1]) for pair in meta["input_token_logprobs"]]

    assert listed(0, [97]) == [(None, 97)]
    assert listed(0, [97, 98]) == [(None, 97), (-0.5, 98)]
    assert listed(1, [97, 98]) == [(None, 98)]
    assert listed(2, [97, 98]) == []
    assert listed(-1, [97, 98]) == []


def test_tokenize_and_detokenize(serve: Serve) -> None:
    server = serve()
    assert server.post("/tokenize", {"prompt": "aé"}).json()["tokens"] == [97, 0xC3, 0xA9]
    assert server.post("/detokenize", {"tokens": [97, 0xC3, 0xA9]}).json()["prompt"] == "aé"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.post("/tokenize", chat).json()["count"] == server.chat().json()["usage"]["prompt_tokens"]
    assert server.post("/detokenize", {"tokens": [10**9]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_metrics_are_counters_that_only_grow(serve: Serve) -> None:
    server = serve()

    def read() -> dict[str, float]:
        text = server.http.get("/metrics").text
        families = text_string_to_metric_families(text)
        return {f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples}

    server.chat()
    before = read()
    server.chat()
    server.chat(max_tokens=-1)
    after = read()
    name = "phloem_http_responses_total[('route', '/v1/chat/completions'), ('status', '{}')]"
    assert after[name.format(200)] - before[name.format(200)] == 1
    assert after[name.format(400)] == 1
    assert after["phloem_output_tokens_total[]"] - before["phloem_output_tokens_total[]"] == 12
    assert (
        after["phloem_time_to_first_token_seconds_count[]"] - before["phloem_time_to_first_token_seconds_count[]"] == 1
    )
    assert "phloem_running[]" in after
    assert all(after[key] >= value for key, value in before.items() if "_total[" in key)
