"""/v1/responses through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from phloem.config import ServerConfig
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

Serve = Callable[..., Running]
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wien"}}\n</tool_call>'


def prompt_of(server: Running) -> str:
    return server.engine.tokenizer.decode(server.engine.requests[-1].prompt.tolist(), False)


def test_text_whole_and_streamed(serve: Serve) -> None:
    server = serve(FakeEngine.saying("<think>hm</think>žluťoučký 😀"))
    whole = server.openai.responses.create(model="fake-model", input="hi", instructions="Be brief.")
    assert (whole.output_text, whole.status) == ("žluťoučký 😀", "completed")
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 0
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with server.openai.responses.stream(model="fake-model", input="hi", instructions="Be brief.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_cut_answers_are_incomplete(serve: Serve) -> None:
    answer = serve().openai.responses.create(model="fake-model", input="hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_tools_and_the_next_turn(serve: Serve) -> None:
    server = serve(FakeEngine.saying(CALL))
    first = server.openai.responses.create(model="fake-model", input="weather?", tools=TOOLS)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Wien"})
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    server.openai.responses.create(model="fake-model", input=output, previous_response_id=first.id, tools=TOOLS)
    prompt = prompt_of(server)
    assert prompt.index("weather?") < prompt.index("<call weather>") < prompt.index("tool\nsunny")
    by_hand: Any = [{"role": "user", "content": "weather?"}, call.model_dump(exclude_none=True), *output]
    server.openai.responses.create(model="fake-model", input=by_hand, tools=TOOLS)
    assert prompt_of(server) == prompt
    with server.openai.responses.stream(model="fake-model", input="weather?", tools=TOOLS) as stream:
        final = stream.get_final_response()
    assert final.output[0].type == "function_call"
    assert json.loads(final.output[0].arguments) == {"city": "Wien"}
    forced = server.openai.responses.create(model="fake-model", input="x", tools=TOOLS, tool_choice="required")
    assert forced.output[0].type == "function_call"


def test_json_schema(serve: Serve) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "t", "schema": {"enum": ["x"]}, "strict": True}}
    assert serve().openai.responses.create(model="fake-model", input="hi", text=form).output_text == '"x"'


def test_stored_answers_belong_to_their_key(serve: Serve) -> None:
    server = serve(FakeEngine(), ServerConfig(api_keys=("alpha", "beta")))
    answer = server.openai.responses.create(model="fake-model", input="hi")
    assert server.openai.responses.retrieve(answer.id).output_text == "Hello world"
    other = server.openai.with_options(api_key="beta")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.create(model="fake-model", input="go on", previous_response_id=answer.id)
    server.openai.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(answer.id)
    secret = server.openai.responses.create(model="fake-model", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(secret.id)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 400),
        ({"input": []}, 400),
        ({"input": 5}, 400),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]}, 400),
        ({"input": "x", "tools": [{"type": "web_search"}]}, 400),
        ({"input": "x", "tools": [{"type": "function"}]}, 400),
        ({"input": "x", "tool_choice": "sometimes"}, 400),
        ({"input": "x", "max_output_tokens": 0}, 400),
        ({"input": "x", "previous_response_id": "resp_none"}, 404),
        ({"input": "x", "background": True}, 400),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, 400),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, 200),
    ],
)
def test_odd_bodies(serve: Serve, fields: dict[str, Any], status: int) -> None:
    response = serve().post("/v1/responses", fields)
    assert response.status_code == status, response.text


def test_a_failure_in_the_stream_is_response_failed(serve: Serve) -> None:
    text = serve(FakeEngine(fail_after=2)).post("/v1/responses", {"input": "x", "stream": True}).text
    assert text.rstrip().split("\n\n")[-1].startswith("event: response.failed")
