"""/v1/chat/completions through the official client and through a strict reader of its chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from phloem.config import ServerConfig
from phloem.errors import PhloemError
from tests.server.conftest import Running
from tests.server.fake_engine import IM_END, FakeEngine

Serve = Callable[..., Running]
FORCED = "žluťoučký 日本 👩‍👩‍👧 e\u0301 😀"


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a stream, checked: framing, [DONE] at the end, the same id, created and model in all."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    return chunks


def chat_body(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def check_choices(chunks: list[dict[str, Any]], n: int = 1) -> list[str]:
    """Text of each choice; each has one role first, one finish_reason last and null before."""
    texts = []
    for index in range(n):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert all("role" not in c["delta"] for c in own[1:])
        assert all(c["finish_reason"] is None for c in own[:-1])
        assert own[-1]["finish_reason"] in ("stop", "length", "tool_calls")
        texts.append("".join(c["delta"].get("content") or "" for c in own))
    return texts


def test_stream_equals_whole_answer(serve: Serve) -> None:
    server = serve(FakeEngine.saying(FORCED))
    whole = server.chat().json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": FORCED, "refusal": None}
    assert check_choices(events(server, "/v1/chat/completions", chat_body())) == [FORCED]
    streamed = server.openai.chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == FORCED


@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [({}, "stop", None), ({"stop": "wor"}, "stop", "wor"), ({"max_tokens": 3}, "length", None)],
)
def test_finish_reasons(serve: Serve, fields: dict[str, Any], reason: str, stop: str | None) -> None:
    server = serve()
    choice = server.chat(**fields).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    last = events(server, "/v1/chat/completions", chat_body(**fields))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (reason, stop)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_usage_chunk_comes_only_when_asked(serve: Serve, n: int, tools: Any) -> None:
    server = serve()
    for options in (None, {"include_usage": False}):
        body = chat_body(n=n, tools=tools, stream_options=options)
        assert all(not c.get("usage") for c in events(server, "/v1/chat/completions", body))
    body = chat_body(n=n, tools=tools, stream_options={"include_usage": True})
    chunks = events(server, "/v1/chat/completions", body)
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12 * n
    assert sum(bool(c["usage"]) for c in chunks) == 1


def test_names_of_the_model(serve: Serve) -> None:
    """An alias is served under the first name; case counts; an unknown name is told what there is."""
    server = serve(FakeEngine(), ServerConfig(served_model_name="first, alias"))
    for fields in ({}, {"model": None}, {"model": ""}, {"model": "first"}, {"model": "alias"}):
        assert server.chat(**fields).json()["model"] == "first"
        assert {chunk["model"] for chunk in events(server, "/v1/chat/completions", chat_body(**fields))} == {"first"}
    for name in ("First", "ALIAS", "first, alias", "fake-model", "no-such"):
        response = server.chat(model=name)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "first, alias" in error["message"]
    assert [model.id for model in server.openai.models.list()] == ["first", "alias"]


def test_cached_tokens_are_reported_in_both_modes(serve: Serve) -> None:
    server = serve()
    cold = server.chat("x" * 400).json()["usage"]
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0}
    warm = server.chat("x" * 400).json()["usage"]
    assert warm["prompt_tokens_details"]["cached_tokens"] == warm["prompt_tokens"] - 1
    body = chat_body("x" * 400, stream_options={"include_usage": True})
    assert events(server, "/v1/chat/completions", body)[-1]["usage"] == warm


def test_n_choices_have_their_own_index_and_the_prompt_counts_once(serve: Serve) -> None:
    server = serve(FakeEngine(script=lambda _request, index: f"answer {index}"))
    whole = server.chat(n=3).json()
    assert [c["message"]["content"] for c in whole["choices"]] == ["answer 0", "answer 1", "answer 2"]
    assert whole["usage"]["completion_tokens"] == 3 * len("answer 0") + 3
    assert whole["usage"]["prompt_tokens"] == server.chat().json()["usage"]["prompt_tokens"]
    assert check_choices(events(server, "/v1/chat/completions", chat_body(n=3)), 3) == [
        "answer 0",
        "answer 1",
        "answer 2",
    ]


def test_stop_strings_never_leak(serve: Serve) -> None:
    server = serve(FakeEngine.saying("ABCDEFGHIJK"))
    chunks = events(server, "/v1/chat/completions", chat_body(stop=["DEFGHIJ"]))
    assert check_choices(chunks) == ["ABC"]
    assert server.chat(stop=["DEFGHIJ"]).json()["choices"][0]["message"]["content"] == "ABC"
    assert server.chat(stop=["x", "EF"], include_stop_str_in_output=True).json()["choices"][0]["message"][
        "content"
    ] == ("ABCDEF")


def test_the_end_marker_is_never_text(serve: Serve) -> None:
    server = serve(FakeEngine.saying([*b"done", IM_END]))
    for fields in ({}, {"skip_special_tokens": False}, {"stop_token_ids": [IM_END]}):
        assert server.chat(**fields).json()["choices"][0]["message"]["content"] == "done"
        assert check_choices(events(server, "/v1/chat/completions", chat_body(**fields))) == ["done"]
    shown = server.chat(skip_special_tokens=False, include_stop_str_in_output=True).json()
    assert shown["choices"][0]["message"]["content"] == "done<|im_end|>"


def test_max_completion_tokens_wins_and_counts(serve: Serve) -> None:
    server = serve()
    choice = server.chat(max_completion_tokens=7).json()
    assert (choice["usage"]["completion_tokens"], choice["choices"][0]["finish_reason"]) == (7, "length")
    assert server.chat(max_completion_tokens=4, max_tokens=9).json()["usage"]["completion_tokens"] == 4
    for name in ("max_completion_tokens", "max_tokens"):
        for value in (0, -1):
            response = server.chat(**{name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_output_is_capped_at_the_context_and_the_prompt_never_cut(serve: Serve) -> None:
    server = serve(FakeEngine.saying("x" * 500, max_model_len=100))
    answer = server.chat("y" * 60, max_tokens=100_000).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 100
    assert answer["usage"]["prompt_tokens"] > 60
    response = server.chat("y" * 200)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "100" in error["message"]
    assert str(len("y" * 200) + answer["usage"]["prompt_tokens"] - 60) in error["message"]


def test_logprobs_in_both_modes(serve: Serve) -> None:
    server = serve(FakeEngine.saying("a~é"))
    content = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:2]] == ["a", "~"]
    assert content[1]["logprob"] == -9999.0
    assert content[2]["bytes"] == [0xC3]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 5
    chunks = events(server, "/v1/chat/completions", chat_body(logprobs=True, top_logprobs=2))
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == content
    response = server.chat(top_logprobs=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


def test_json_schema_forces_the_text(serve: Serve) -> None:
    server = serve(FakeEngine.saying("no json at all"))
    schema = {"name": "t", "schema": {"enum": [FORCED]}}
    form = {"type": "json_schema", "json_schema": schema}
    text = server.chat(response_format=form).json()["choices"][0]["message"]["content"]
    assert json.loads(text) == FORCED
    assert (
        json.loads(check_choices(events(server, "/v1/chat/completions", chat_body(response_format=form)))[0]) == FORCED
    )


def test_an_error_after_the_start_is_an_event(serve: Serve) -> None:
    server = serve(FakeEngine(fail_after=3, failure=PhloemError("boom")))
    response = server.chat(stream=True)
    lines = [line for line in response.text.split("\n\n") if line]
    assert json.loads(lines[-2][6:])["error"]["message"] == "boom"
    assert lines[-1] == "data: [DONE]"
    assert server.chat().status_code == 500
    with pytest.raises(openai.APIError, match="boom"):
        list(
            server.openai.chat.completions.create(
                model="fake-model", messages=[{"role": "user", "content": "hi"}], stream=True
            )
        )
