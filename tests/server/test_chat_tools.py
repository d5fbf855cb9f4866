"""Tool calls, reasoning and odd conversations through /v1/chat/completions."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem.config import ServerConfig
from phloem.server.tools import answer_form
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.test_openai_chat import chat_body, check_choices, events

Serve = Callable[..., Running]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Wien"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wien"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
FORMS = {
    "hermes": TWO,
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Wien"}}, {"name": "clock", "arguments": {}}]',
    "llama3": '<|python_tag|>{"name": "weather", "parameters": {"city": "Wien"}}; {"name": "clock", "parameters": {}}',
    "pythonic": '[weather(city="Wien"), clock()]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nWien\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
}


def tokens_of(text: str) -> list[int]:
    return FakeTokenizer().encode(text)


def streamed_calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls put together as OpenAI's own client does: by index; id and name come once."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return calls


def whole_calls(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("form", FORMS)
def test_parallel_calls_in_each_form(serve: Serve, form: str) -> None:
    server = serve(FakeEngine.saying(tokens_of(FORMS[form])), ServerConfig(tool_call_parser=form))
    answer = server.chat(tools=TOOLS).json()
    assert whole_calls(answer) == [("weather", {"city": "Wien"}), ("clock", {})]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["content"] is None
    chunks = events(server, "/v1/chat/completions", chat_body(tools=TOOLS))
    assert [(c["name"], json.loads(c["arguments"])) for c in streamed_calls(chunks)] == whole_calls(answer)
    assert check_choices(chunks) == [""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    only = server.chat(tools=TOOLS, parallel_tool_calls=False).json()
    assert whole_calls(only) == [("weather", {"city": "Wien"})]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} <tool_call> name arguments", "hermes"),
        ("{{ tools }} <tool_call>\n<function=example_function_name>\n<parameter=p>", "qwen3_coder"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3"),
        ("{{ tools }} [func_name1(params_name1=value)]", "pythonic"),
        ("no word of them", "hermes"),
    ],
)
def test_the_template_chooses_the_form(template: str, form: str) -> None:
    assert answer_form(FakeTokenizer(template)).tool_form == form


def test_the_official_client_accumulates_the_stream(serve: Serve) -> None:
    server = serve(FakeEngine.saying(TWO))
    with server.openai.chat.completions.stream(
        model="fake-model",
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,  # type: ignore[arg-type]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["weather", "clock"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Wien"}


@pytest.mark.parametrize("form", [*FORMS, "hermes"])
@pytest.mark.parametrize("said", ["free text", "right"])
def test_required_and_named_force_calls(serve: Serve, form: str, said: str) -> None:
    """Whatever the model would rather say, the answer is a call with arguments that fit the schema."""
    script = {"free text": "I would rather not", "right": FORMS[form]}[said]
    server = serve(FakeEngine.saying(tokens_of(script)), ServerConfig(tool_call_parser=form))
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        body = chat_body(tools=TOOLS, tool_choice=choice, max_tokens=2000)
        answer = server.post("/v1/chat/completions", body).json()
        calls = whole_calls(answer)
        assert calls
        assert calls[0][0] in (["weather", "clock"] if choice == "required" else ["weather"])
        assert all(arguments in ({"city": "Paris"}, {"city": "Wien"}) for name, arguments in calls if name == "weather")
        chunks = events(server, "/v1/chat/completions", body)
        assert [(c["name"], json.loads(c["arguments"])) for c in streamed_calls(chunks)] == calls
        reasons = {answer["choices"][0]["finish_reason"], chunks[-1]["choices"][0]["finish_reason"]}
        assert reasons == {"tool_calls"}


def test_tool_choice_none_hides_tools_and_finds_no_calls(serve: Serve) -> None:
    server = serve(FakeEngine.saying(ONE))
    message = server.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == (ONE, "stop")
    assert b"tools:" not in bytes(server.engine.requests[-1].prompt.clip(0, 255).astype("uint8"))
    server.chat(tools=TOOLS)
    assert b"tools:" in bytes(server.engine.requests[-1].prompt.clip(0, 255).astype("uint8"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a+"}, "regex"),
    ],
)
def test_wrong_tools_are_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    response = serve().chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_schema_and_tools_together_allow_either(serve: Serve) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "t",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    answer = serve(FakeEngine.saying('{"a": 7}')).chat(tools=TOOLS, response_format=form).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 7}
    assert whole_calls(serve(FakeEngine.saying(ONE)).chat(tools=TOOLS, response_format=form).json()) == [
        ("weather", {"city": "Wien"})
    ]


def test_templates_without_tools_get_instructions(serve: Serve) -> None:
    server = serve(FakeEngine.saying(ONE, tokenizer=FakeTokenizer("no idea of functions")))
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city": "Paris"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = server.post("/v1/chat/completions", {"messages": history, "tools": TOOLS}).json()
    assert whole_calls(answer) == [("weather", {"city": "Wien"})]
    prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt.tolist(), False)
    assert '"name": "weather"' in prompt
    assert prompt.index("Be brief.") < prompt.index("You may call functions")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_reasoning_is_split_from_content(serve: Serve) -> None:
    server = serve(FakeEngine.saying("<think>\nlet me see\n</think>\n\nyes"))
    message = server.chat().json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "let me see")
    chunks = events(server, "/v1/chat/completions", chat_body())
    assert check_choices(chunks) == ["yes"]
    assert "".join(c["choices"][0]["delta"].get("reasoning_content", "") for c in chunks) == "let me see"
    plain = server.chat(separate_reasoning=False).json()["choices"][0]["message"]
    assert plain["content"] == "<think>\nlet me see\n</think>\n\nyes"


@pytest.mark.parametrize("content", ["", None, "absent", []])
def test_assistant_turns_without_content(serve: Serve, content: Any) -> None:
    server = serve()
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [call("weather", '{"city":"Paris"}')]}
    if content != "absent":
        turn["content"] = content
    user = {"role": "user", "content": "x"}
    messages = [user, turn, {"role": "tool", "tool_call_id": "c1", "content": "ok"}, user]
    assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt.tolist(), False)
    assert "None" not in prompt
    bare = {"role": "assistant", **({} if content == "absent" else {"content": content})}
    assert server.post("/v1/chat/completions", {"messages": [user, bare, user]}).status_code == 200


@pytest.mark.parametrize(
    ("messages", "status", "param"),
    [
        ([], 400, "messages"),
        ([{"role": "assistant", "content": "a"}], 200, None),
        ([{"role": "system", "content": "a"}], 200, None),
        ([{"role": "tool", "content": "a", "tool_call_id": "x"}], 200, None),
        ([{"role": "developer", "content": "a"}], 200, None),
        ([{"role": "foo", "content": "a"}], 400, "messages[0].role"),
        ([{"content": "a"}], 400, "messages[0].role"),
        ([{"role": 3, "content": "a"}], 400, "messages[0].role"),
        ([{"role": "user", "content": ""}] * 2000, 400, "messages"),
        ([{"role": "user", "content": ""}], 200, None),
        ([{"role": "user", "content": []}], 200, None),
        ([{"role": "user", "content": 7}], 400, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], 400, "messages[0].content[0].text"),
        ([{"role": "user", "content": [7]}], 400, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], 200, None),
        ([{"role": "user", "content": "a", "tool_calls": [call("f", "{}")]}], 400, "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], 400, "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": "no"}], 400, "messages[0].tool_calls"),
        ([{"role": "user", "content": "template error"}], 400, "messages"),
        ("hello", 400, "messages"),
        ([3], 400, "messages[0]"),
        (None, 400, "messages"),
    ],
)
def test_odd_conversations(serve: Serve, messages: Any, status: int, param: str | None) -> None:
    response = serve().post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == param


def test_parts_that_are_not_text_are_refused_by_kind_alone(serve: Serve, tmp_path: Path) -> None:
    """Whatever a part points to, the answer is the same to the letter: nothing is fetched, opened or looked for."""
    server = serve()
    (tmp_path / "there.png").write_bytes(b"x")
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "fifo")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        hosts = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "0177.0.0.1", "[::ffff:127.0.0.1]")
        urls = [f"http://{host}:{port}/x.png" for host in hosts]
        urls += [
            "http://169.254.169.254/latest",
            "http://10.0.0.1/",
            f"ftp://127.0.0.1:{port}/",
            "gopher://127.0.0.1:1/",
        ]
        urls += ["file:///etc/hostname", "/etc/hostname", "../x.png", "/dev/zero", "data:image/png;base64,AAAA"]
        urls += [str(tmp_path / name) for name in ("there.png", "not-there.png", "link.png", "fifo")]
        answers: dict[str, set[str]] = {}
        for url in urls:
            for kind in ("image_url", "audio_url", "video_url", "input_image", "input_audio", "file"):
                part = {"type": kind, kind: {"url": url}, "file": {"file_data": url, "filename": url}, "image_url": url}
                body = {"messages": [{"role": "user", "content": [part]}]}
                response = server.post("/v1/chat/completions", body)
                assert response.status_code == 400
                answers.setdefault(kind, set()).add(response.text)
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()
    for kind, texts in answers.items():
        (text,) = texts
        error = json.loads(text)["error"]
        assert (error["code"], error["param"]) == ("unsupported_value", "messages[0].content[0]")
        assert kind in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        *[
            ({"chat_template_kwargs": {name: "x"}}, "chat_template_kwargs")
            for name in ("chat_template", "tokenize", "add_generation_prompt", "messages", "tools", "tokenizer", "a b")
        ],
    ],
)
def test_the_template_is_the_servers(serve: Serve, fields: dict[str, Any], param: str) -> None:
    response = serve().chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_template_variables_pass(serve: Serve) -> None:
    assert serve().chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200


def test_continue_final_message(serve: Serve) -> None:
    server = serve()
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}]
    body = {"messages": messages, "continue_final_message": True}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.engine.tokenizer.decode(server.engine.requests[-1].prompt.tolist(), False).endswith("The answer")
    body["messages"] = messages[:1]
    assert server.post("/v1/chat/completions", body).json()["error"]["param"] == "continue_final_message"
