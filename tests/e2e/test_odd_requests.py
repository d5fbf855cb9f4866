"""Requests that have brought engines down or out of step, against the demo model: masks, bad ids, forced ends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.conftest import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = "/v1/chat/completions"


def strict(text: str) -> Any:
    """JSON without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def forced(value: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [value]}, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": forced("Xyzzy 😀")},
        {"top_p": 0.01, "temperature": 1.0, "max_tokens": 8},
        {"top_k": 1, "temperature": 1.0, "max_tokens": 8},
        {"logit_bias": {"100": -100, "200": 100}, "max_tokens": 4},
    ],
)
def test_masked_tokens_have_finite_logprobs(server: Server, fields: dict[str, Any]) -> None:
    """Logprobs are of the model's own distribution, whatever a mask, a bias or a filter leaves of it."""
    body = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 5, **fields}
    entries = strict(server.http.post(CHAT, json=body).text)["choices"][0]["logprobs"]["content"]
    assert entries
    for entry in entries:
        assert -9999.0 <= entry["logprob"] <= 0.0
        assert len(entry["top_logprobs"]) == 5
    plain = {"prompt": "The capital", "echo": True, "logprobs": 1, "temperature": 0, **fields}
    logprobs = strict(server.http.post("/v1/completions", json=plain).text)["choices"][0]["logprobs"]
    tokens = zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:], strict=True)
    assert all(token in top and -9999.0 <= logprob <= 0.0 for token, top, logprob in tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_many_tokens_come_whole(server: Server, stream: bool) -> None:
    text = "žluťoučký 日本語 👩‍👩‍👧 e\u0301 한국 😀\u200d🏳️‍🌈"
    body = {"messages": QUESTION, "response_format": forced(text), "stream": stream}
    answer = server.http.post(CHAT, json=body)
    if not stream:
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == text
        return
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"]]
    assert "\ufffd" not in "".join(deltas)
    assert json.loads("".join(deltas)) == text


@pytest.mark.parametrize("form", [{"type": "json_object"}, None])
def test_structured_answers_have_no_runs_of_space(server: Server, form: dict[str, Any] | None) -> None:
    """20 seeds of a small model that likes blanks: each answer parses unless its length ran out."""
    properties = {"city": {"type": "string", "maxLength": 12}, "n": {"type": "array", "items": {"type": "integer"}}}
    schema = {"type": "object", "properties": properties, "required": ["city", "n"], "additionalProperties": False}
    schema_form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": QUESTION, "response_format": form or schema_form, "n": 20, "max_tokens": 80, "seed": 4}
    choices = server.http.post(CHAT, json={**body, "temperature": 1.5}).json()["choices"]
    assert len(choices) == 20
    for choice in choices:
        text = choice["message"]["content"]
        outside = re.sub(r'"(?:[^"\\]|\\.)*"?', "s", text)
        assert not re.search(r"\s{2}", outside), text
        if choice["finish_reason"] == "stop":
            assert form or set(json.loads(text)) == {"city", "n"}
            json.loads(text)


def test_bad_token_ids_leave_running_streams_alone(server: Server) -> None:
    body = {"prompt": "One, two, three,", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    bad = [[999999], [1, 999999, 2], [[1, 2], [999999]], [-1], [2**31], [2**63], [2**70]]
    text = ""
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if bad:
                refused = server.http.post("/v1/completions", json={"prompt": bad.pop()})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert not bad
    assert text == whole


@pytest.mark.parametrize("stop", ["stop", "length", "stop string", "stop token"])
def test_each_end_says_what_it_was(server: Server, stop: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "messages": QUESTION}
    (paris,) = server.http.post("/tokenize", json={"prompt": " Paris", "add_special_tokens": False}).json()["tokens"]
    extra, reason, detail = {
        "stop": ({}, "stop", None),
        "length": ({"max_tokens": 3}, "length", None),
        "stop string": ({"stop": ["France is Pa", "zz"]}, "stop", "France is Pa"),
        "stop token": ({"stop_token_ids": [paris]}, "stop", paris),
    }[stop]
    choice = server.http.post(CHAT, json={**fields, **extra}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, detail)
    text = server.http.post(CHAT, json={**fields, **extra, "stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (reason, detail)
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == choice["message"]["content"]
    assert "Paris" in choice["message"]["content"] if stop == "stop" else "Pa" not in choice["message"]["content"]
