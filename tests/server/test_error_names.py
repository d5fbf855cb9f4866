"""An error names the field as the client wrote it, on every route, and its message speaks of the same field."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest

from tests.server.conftest import Running, serving
from tests.server.fake_engine import FakeEngine

HUGE = 2**31
USER = {"role": "user", "content": "x"}
LONG = "x" * 300
DEEP = reduce(lambda inner, _: {"items": inner}, range(120), dict[str, Any]())
Case = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine(max_model_len=256)) as running:
        yield running


def message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def check(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert "None" not in error["message"]


CHAT: tuple[Case, ...] = (
    ({"max_completion_tokens": HUGE}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop": [1]}, "stop[0]"),
    ({"priority": 2**40}, "priority"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1.5}, "repetition_penalty"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"response_format": {"type": "x"}}, "response_format.type"),
    (tool(), "tools[0].function.name"),
    ({**tool(name="a"), "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"messages": [USER, USER, message([{"type": "image_url"}])]}, "messages[2].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{**USER, "name": 4}]}, "messages[0].name"),
    ({"messages": [message(LONG)]}, "messages"),
    ({"messages": []}, "messages"),
)
RESPONSES: tuple[Case, ...] = (
    ({"max_output_tokens": HUGE}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"input": LONG}, "input"),
    ({"input": [message(5)]}, "input[0].content"),
    ({"instructions": "i", "input": [USER, message([{"type": "input_image"}])]}, "input[1].content[0]"),
    ({"input": [USER, {"type": "x"}]}, "input[1]"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "name": 4}]}, "input[1].name"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": 4}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "call_id": 4, "output": "a"}]}, "input[0].call_id"),
    ({"input": [{"role": "y", "content": "a"}]}, "input[0].role"),
    (
        {"input": [{"type": "reasoning", "content": [{"text": "t"}]}, {"role": "assistant", "content": 5}]},
        "input[1].content",
    ),
    ({"tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    (
        {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "function", "name": 5}},
        "tool_choice.name",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "zz"}}}, "text.format.type"),
    ({"reasoning": {"effort": "x"}}, "reasoning.effort"),
    ({"priority": 2**40}, "priority"),
)
GENERATE: tuple[Case, ...] = (
    ({"sampling_params": {"max_new_tokens": HUGE}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"text": ["x", "y"], "sampling_params": [{}, {"top_p": 0}]}, "sampling_params[1].top_p"),
    ({"sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    ({"sampling_params": {"guided_json": "{"}}, "sampling_params.guided_json"),
    ({"sampling_params": {"sampling_seed": 2**70}}, "sampling_params.sampling_seed"),
    ({"sampling_params": {"seed": 2**70}}, "sampling_params.seed"),
    ({"sampling_params": {"min_new_tokens": -1}}, "sampling_params.min_new_tokens"),
    ({"sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"sampling_params": {"logit_bias": {"99999": 1}}}, "sampling_params.logit_bias"),
    ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"priority": 2**40}, "priority"),
    ({"text": LONG}, "text"),
    ({"text": None, "input_ids": [1] * 256}, "input_ids"),
    ({"text": None, "input_ids": [[1], ["a"]]}, "input_ids[1]"),
)
OTHERS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [[1], []]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/embeddings", {"input": ["a", 5]}, "input[1]"),
    ("/v1/embeddings", {"input": [99999]}, "input"),
    ("/v1/embeddings", {"input": LONG}, "input"),
    ("/tokenize", {"messages": [message(5)]}, "messages[0].content"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
)
MESSAGES: tuple[Case, ...] = (
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"system": "s", "messages": [USER, message(5)]}, "messages[1].content"),
    ({"messages": [message([{"type": "image"}])]}, "messages[0].content[0]"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"tools": [{"name": ""}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": DEEP}]}, "tools[0].input_schema"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}]},
        "messages[1].content[0].name",
    ),
    (
        {
            "system": "s",
            "messages": [USER, message([{"type": "text", "text": "a"}, {"type": "tool_result", "content": 5}])],
        },
        "messages[1].content[1].content",
    ),
)


@pytest.mark.parametrize(("fields", "param"), CHAT)
def test_chat(server: Running, fields: dict[str, Any], param: str) -> None:
    check(server, "/v1/chat/completions", {"messages": [USER], **fields}, param)


@pytest.mark.parametrize(("fields", "param"), RESPONSES)
def test_responses(server: Running, fields: dict[str, Any], param: str) -> None:
    check(server, "/v1/responses", {"input": "x", **fields}, param)


def test_responses_count_from_their_own_input(server: Running) -> None:
    first = server.post("/v1/responses", {"input": [USER, USER], "instructions": "i"}).json()
    body = {"previous_response_id": first["id"], "input": [USER, message(5)]}
    check(server, "/v1/responses", body, "input[1].content")


@pytest.mark.parametrize(("fields", "param"), GENERATE)
def test_generate(server: Running, fields: dict[str, Any], param: str) -> None:
    check(server, "/generate", {"text": "x", **fields}, param)


@pytest.mark.parametrize(("path", "body", "param"), OTHERS)
def test_other_routes(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    check(server, path, body, param)


@pytest.mark.parametrize(("fields", "param"), MESSAGES)
def test_messages(server: Running, fields: dict[str, Any], param: str) -> None:
    """This API has no `param`: the message begins with the field."""
    response = server.post("/v1/messages", {"messages": [USER], "max_tokens": 3, **fields})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), response.text
    assert response.json()["error"]["message"].startswith(param), response.text


def test_count_tokens(server: Running) -> None:
    response = server.post("/v1/messages/count_tokens", {"system": "s", "messages": [USER, message(5)]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[1].content")


COMMON = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "seed", "n")
COMMON = (*COMMON, "presence_penalty", "frequency_penalty")
NUMBERS = {
    "/v1/chat/completions": (*COMMON, "max_tokens", "max_completion_tokens", "min_tokens", "priority", "top_logprobs"),
    "/v1/completions": (*COMMON, "max_tokens", "min_tokens", "priority", "logprobs"),
    "/generate": (*COMMON, "max_new_tokens", "min_new_tokens", "sampling_seed"),
    "/v1/responses": ("temperature", "top_p", "priority", "max_output_tokens"),
    "/v1/messages": ("temperature", "top_p", "top_k", "max_tokens"),
}
HUGE_TEXT = "1" + "0" * 400


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", f"-{HUGE_TEXT}", HUGE_TEXT, "1e999", '"1"', "[]", "true"]
)
@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in NUMBERS.items() for name in names])
def test_values_that_are_no_usable_number(server: Running, path: str, name: str, value: str) -> None:
    """Not a number, infinite, huge, or of another type: refused by the field's name. A huge top_k means all."""
    inner = f'"{name}": {value}'
    body = (
        '{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "text": "x", "input": "x", "logprobs": true, '
    )
    body = body.replace('"text": "x", ', "") if path == "/v1/responses" else body
    body = body.replace('"logprobs": true, ', "") if path == "/v1/completions" else body
    body = body + '"max_tokens": 1, ' if path == "/v1/messages" and name != "max_tokens" else body
    body += f'"sampling_params": {{{inner}}}}}' if path == "/generate" else f"{inner}}}"
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    if name == "top_k" and value == HUGE_TEXT:
        assert response.status_code == 200, response.text
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    shown = error["message"].partition(" ")[0].rstrip(":") if path == "/v1/messages" else error["param"]
    assert shown == (f"sampling_params.{name}" if path == "/generate" else name), error
