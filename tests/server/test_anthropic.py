"""/v1/messages through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from phloem.config import ServerConfig
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

Serve = Callable[..., Running]
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "The weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wien"}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client_of() -> Iterator[Callable[[Running], anthropic.Anthropic]]:
    made: list[anthropic.Anthropic] = []

    def make(server: Running, key: str = "none") -> anthropic.Anthropic:
        http = anthropic.DefaultHttpxClient(trust_env=False)
        made.append(anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, http_client=http))
        return made[-1]

    yield make
    for client in made:
        client.close()


Clients = Callable[..., anthropic.Anthropic]


def test_text_whole_and_streamed(serve: Serve, client_of: Clients) -> None:
    client = client_of(serve(FakeEngine.saying("žluťoučký 😀")))
    whole = client.messages.create(model="fake-model", max_tokens=100, system="Be brief.", messages=HI)
    assert [block.text for block in whole.content if block.type == "text"] == ["žluťoučký 😀"]
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.usage.cache_read_input_tokens == 0
    with client.messages.stream(model="fake-model", max_tokens=100, system="Be brief.", messages=HI) as stream:
        assert "".join(stream.text_stream) == "žluťoučký 😀"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens == 1
    assert final.usage.cache_read_input_tokens == whole.usage.input_tokens - 1
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_reasons(serve: Serve, client_of: Clients) -> None:
    client = client_of(serve())
    cut = client.messages.create(model="fake-model", max_tokens=3, messages=HI)
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(model="fake-model", max_tokens=50, stop_sequences=["wor"], messages=HI)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wor")


def test_tools_whole_and_streamed(serve: Serve, client_of: Clients) -> None:
    server = serve(FakeEngine.saying("Let me see.\n" + CALL))
    client = client_of(server)
    whole = client.messages.create(model="fake-model", max_tokens=200, tools=TOOLS, messages=HI)
    text, use = whole.content
    assert text.type == "text"
    assert use.type == "tool_use"
    assert (text.text, use.name, use.input, whole.stop_reason) == (
        "Let me see.",
        "weather",
        {"city": "Wien"},
        "tool_use",
    )
    with client.messages.stream(model="fake-model", max_tokens=200, tools=TOOLS, messages=HI) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].type == "tool_use"
    assert final.content[1].input == {"city": "Wien"}
    history: list[Any] = [
        *HI,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    client.messages.create(model="fake-model", max_tokens=20, tools=TOOLS, messages=history)
    prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt.tolist(), False)
    assert "Let me see.<call weather>" in prompt
    assert "tool\nsunny" in prompt
    assert "user\nand now?" in prompt


def test_forced_tools(serve: Serve, client_of: Clients) -> None:
    client = client_of(serve(FakeEngine.saying(CALL)))
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}]
    for choice in choices:
        answer = client.messages.create(
            model="fake-model", max_tokens=500, tools=TOOLS, tool_choice=choice, messages=HI
        )
        assert answer.content[0].type == "tool_use"
    answer = client.messages.create(
        model="fake-model", max_tokens=500, tools=TOOLS, tool_choice={"type": "none"}, messages=HI
    )
    assert answer.content[0].type == "text"


def test_thinking_becomes_a_block(serve: Serve, client_of: Clients) -> None:
    client = client_of(serve(FakeEngine.saying("<think>hm</think>yes")))
    answer = client.messages.create(model="fake-model", max_tokens=50, messages=HI)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    with client.messages.stream(model="fake-model", max_tokens=50, messages=HI) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]


def test_count_tokens_counts_what_is_charged(serve: Serve, client_of: Clients) -> None:
    client = client_of(serve())
    counted = client.messages.count_tokens(model="fake-model", messages=HI, tools=TOOLS).input_tokens
    answer = client.messages.create(model="fake-model", max_tokens=1, messages=HI, tools=TOOLS)
    assert counted == answer.usage.input_tokens


def test_errors_have_the_form_of_this_api(serve: Serve, client_of: Clients) -> None:
    config = ServerConfig(api_keys=("k",))
    server = serve(FakeEngine(max_live=0), config)
    with pytest.raises(anthropic.AuthenticationError) as failed:
        client_of(server, "wrong").messages.create(model="fake-model", max_tokens=1, messages=HI)
    assert failed.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    client = client_of(server, "k")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such", max_tokens=1, messages=HI)
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(model="fake-model", max_tokens=1, messages=HI)
    bad: list[Any] = [
        {"messages": HI},
        {"max_tokens": 1, "messages": [{"role": "system", "content": "x"}]},
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"max_tokens": 1, "messages": HI, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"max_tokens": 1, "messages": HI, "tool_choice": {"type": "tool", "name": "x"}},
        {"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
        {"max_tokens": 1, "messages": [3]},
        {"max_tokens": 0, "messages": HI},
    ]
    for body in bad:
        response = server.post("/v1/messages", body)
        assert response.status_code == 400, response.text
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_failure_in_the_stream_is_an_error_event(serve: Serve, client_of: Clients) -> None:
    server = serve(FakeEngine(fail_after=2))
    body = {"max_tokens": 9, "messages": HI, "stream": True}
    events = [event for event in server.post("/v1/messages", body).text.split("\n\n") if event]
    name, data = events[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data[6:])["error"]["type"] == "api_error"
