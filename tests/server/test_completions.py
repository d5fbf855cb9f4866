"""/v1/completions: forms of the prompt, echo, logprobs, odd values; each odd value leaves the server alive."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine
from tests.server.test_openai_chat import events

Serve = Callable[..., Running]
URL = "/v1/completions"


@pytest.fixture(scope="module")
def shared() -> Any:
    """One server for all the odd values: after each of them it must still answer."""
    from tests.server.conftest import serving

    with serving(FakeEngine()) as server:
        yield server


def check_alive(server: Running) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.chat().json()["choices"][0]["message"]["content"] == "Hello world"


def test_lists_of_prompts_with_n(serve: Serve) -> None:
    server = serve(FakeEngine(script=lambda request, index: f"<{request.prompt.tolist()}{index}>"))
    for prompts in (["p0", "p1", "p2"], [[112, 48], [112, 49], [112, 50]]):
        body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 50}
        choices = server.post(URL, body).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        for choice in choices:
            number = choice["index"] // 2
            assert choice["text"].startswith(f"p{number}<[112, {48 + number}]{choice['index'] % 2}>")
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
        chunks = events(server, URL, body)
        for choice in choices:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
            tokens = [token for c in own if c["logprobs"] for token in c["logprobs"]["tokens"]]
            offsets = [offset for c in own if c["logprobs"] for offset in c["logprobs"]["text_offset"]]
            assert (tokens, offsets) == (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"])
    assert len(server.post(URL, {"prompt": ["one"]}).json()["choices"]) == 1


def test_official_client(serve: Serve) -> None:
    server = serve()
    answer = server.openai.completions.create(model="fake-model", prompt="x", logprobs=2, max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hell", "length")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["H", "e", "l", "l"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    parts = server.openai.completions.create(model="fake-model", prompt="x", stream=True)
    assert "".join(part.choices[0].text for part in parts) == "Hello world"


def test_usage_in_streams(serve: Serve) -> None:
    server = serve()
    body = {"prompt": ["ab", "ac"], "stream_options": {"include_usage": True}}
    usage = events(server, URL, body)[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 24)
    assert all(not chunk.get("usage") for chunk in events(server, URL, {"prompt": "ab"}))


def test_scoring_a_prompt(shared: Running) -> None:
    answer = shared.post(URL, {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert shared.post(URL, {"prompt": "abc", "echo": True, "max_tokens": 0}).json()["choices"][0]["text"] == "abc"
    response = shared.post(URL, {"prompt": "abc", "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_logprobs_are_strict_json(serve: Serve) -> None:
    server = serve(FakeEngine.saying("~\n"))
    text = server.post(URL, {"prompt": "a", "echo": True, "logprobs": 1, "top_k": 1}).text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    logprobs = json.loads(text, parse_constant=refuse)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][1] == -9999.0
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))


ODD = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [""]}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt[0]"),
    ({"prompt": None}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt[0]"),
    ({"prompt": [999999]}, 400, "prompt"),
    ({"prompt": [1, 999999, 2]}, 400, "prompt"),
    ({"prompt": [[1, 999999]]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [2**70]}, 400, "prompt"),
    ({"prompt": ["a"] * 100_000}, 400, "prompt"),
    ({"prompt": "x" * 4_000_000}, 400, "prompt"),
    ({"prompt": [1] * 100_000}, 400, "prompt"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"n": 0}, 400, "n"),
    ({"n": -1}, 400, "n"),
    ({"n": 1_000_000}, 400, "n"),
    ({"n": 128, "max_tokens": 1}, 200, None),
    ({"best_of": 10_000}, 400, "best_of"),
    ({"max_tokens": 2**31}, 400, "max_tokens"),
    ({"max_tokens": 2**63}, 400, "max_tokens"),
    ({"max_tokens": "7"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": None}, 200, None),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 0}, 200, None),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": 9_999_999}, 200, None),
    ({"top_k": 0}, 200, None),
    ({"top_k": -1}, 200, None),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"seed": 2**64}, 400, "seed"),
    ({"seed": 7}, 200, None),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"logit_bias": {"99999999": 5}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, 400, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(10_000)}}, 400, "logit_bias"),
    ({"logit_bias": {"97": 100, "98": -100}}, 200, None),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a"] * 65}, 400, "stop"),
    ({"stop": "x" * 2000}, 400, "stop"),
    ({"stop": 5}, 400, "stop"),
    ({"stop_token_ids": [10**9]}, 400, "stop_token_ids"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    ({"priority": 2**31}, 400, "priority"),
    ({"priority": -(2**70)}, 400, "priority"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": 3}, 400, "stream_options"),
    ({"cache_salt": "x" * 300}, 400, "cache_salt"),
    ({"model": "no-such"}, 404, "model"),
    ({"model": ""}, 200, None),
    ({"model": "../../etc/passwd"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"unknown_field": {"a": 1}}, 200, None),
    ({"user": "me", "prompt_cache_key": "k", "priority": 3, "cache_salt": "s"}, 200, None),
]


@pytest.mark.parametrize(("fields", "status", "param"), ODD)
def test_odd_values(shared: Running, fields: dict[str, Any], status: int, param: str | None) -> None:
    body = fields if fields == {} or "prompt" in fields else {"prompt": "hi", **fields}
    response = shared.post(URL, body)
    assert response.status_code == status, response.text[:300]
    if status != 200:
        error = response.json()["error"]
        assert error["param"] == param, error
        assert len(error["message"]) < 600
    else:
        assert response.json()["model"] == "fake-model"
    check_alive(shared)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "logit_bias": {"5": NaN}}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
    ],
)
def test_broken_bodies(shared: Running, content: bytes) -> None:
    response = shared.http.post(URL, content=content)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    check_alive(shared)


def test_forced_tokens_and_end_of_text(serve: Serve) -> None:
    server = serve()
    answer = server.post(URL, {"prompt": "a", "logit_bias": {"120": 100}, "max_tokens": 5}).json()
    assert answer["choices"][0]["text"] == "xxxxx"
    longer = server.post(URL, {"prompt": "a", "ignore_eos": True, "max_tokens": 20}).json()
    assert longer["usage"]["completion_tokens"] == 20


def test_prompts_around_the_context_length(serve: Serve) -> None:
    server = serve(FakeEngine.saying("x" * 200, max_model_len=64))
    for length, status in ((62, 200), (63, 200), (64, 400), (65, 400), (128, 400)):
        for fields in ({"max_tokens": 1}, {}):
            response = server.post(URL, {"prompt": [97] * length, **fields})
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["code"] == "context_length_exceeded"
                assert str(length) in response.json()["error"]["message"]
                assert "64" in response.json()["error"]["message"]
            else:
                assert response.json()["choices"][0]["finish_reason"] == "length"
