"""Tool-call and reasoning parsers: what they find, and that it does not depend on how the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.server.events import AnswerParser, CallStart, Message
from phloem.server.reasoning import ReasoningParser
from phloem.server.tool_parsers import (
    TOOL_PARSERS,
    HermesParser,
    LlamaParser,
    MistralParser,
    PythonicParser,
    make_tool_parser,
    parse_pythonic,
)

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "n": {"type": ["array", "null"]}, "é": {}}},
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}},
}
NAMES = frozenset(TOOLS)
ARGUMENTS = {"city": 'Bad "Ischl" {[,', "n": [1, {"a": None}], "é": "日本\n"}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)


def read(parser: AnswerParser, pieces: list[str]) -> Message:
    message = Message()
    ids: dict[int, str] = {}
    for position, piece in enumerate(pieces):
        for event in parser.push(piece, position == len(pieces) - 1):
            message.add(event)
            if isinstance(event, CallStart):
                assert event.index == len(ids), "indices count up, each call starts once"
                ids[event.index] = event.id
    assert len(set(ids.values())) == len(ids)
    return message


def calls(message: Message) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


CASES = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {TEXT}}}\n</tool_call>', "", [("weather", ARGUMENTS)]),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{{"arguments": {TEXT}, "name": "weather"}}</tool_call>\n'
        '<tool_call>{"name":"add"}</tool_call>\n<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>',
        "Let me see.",
        [("weather", ARGUMENTS), ("add", {}), ("add", {"a": 1})],
    ),
    ("hermes", "a <tool_call>no json</tool_call> b", "a <tool_call>no json</tool_call> b", []),
    ("hermes", "no call <tool", "no call <tool", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "  \n", "  \n", []),
    ("llama3", f'{{"name": "weather", "parameters": {TEXT}}}', "", [("weather", ARGUMENTS)]),
    (
        "llama3",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "other", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("other", {})],
    ),
    ("llama3", '{"name": "Alice", "parameters": {}} is JSON', '{"name": "Alice", "parameters": {}} is JSON', []),
    ("llama3", '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
    ("llama3", 'Say: {"name": "add"}', 'Say: {"name": "add"}', []),
    (
        "mistral",
        f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {TEXT}}}, {{"name": "add", "arguments": {{}}}}]',
        "Well.",
        [("weather", ARGUMENTS), ("add", {})],
    ),
    (
        "mistral",
        f'[TOOL_CALLS]weather[ARGS]{TEXT}[TOOL_CALLS]add{{"a": {{"b": 1}}}}',
        "",
        [("weather", ARGUMENTS), ("add", {"a": {"b": 1}})],
    ),
    ("mistral", "nothing [TOOL", "nothing [TOOL", []),
    (
        "pythonic",
        '[weather(city="Wien", n=[1, {"a": None}]), add()]',
        "",
        [("weather", {"city": "Wien", "n": [1, {"a": None}]}), ("add", {})],
    ),
    ("pythonic", "[unknown(a=1)]", "[unknown(a=1)]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[weather(__import__('os'))]", "[weather(__import__('os'))]", []),
    ("pythonic", "[add(a=1)] and more", "[add(a=1)] and more", []),
    (
        "qwen3_coder",
        'Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nBad "Ischl" {[,\n</parameter>\n'
        '<parameter=n>\n[1, {"a": null}]\n</parameter>\n<parameter=é>\n日本\n\n</parameter>\n</function>\n</tool_call>',
        "Let me see.",
        [("weather", ARGUMENTS)],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=add></function></tool_call>\n<tool_call>\n<function=add>\n<parameter=a>12</parameter>\n"
        "<parameter=b>null</parameter></function>\n</tool_call>",
        "",
        [("add", {}), ("add", {"a": 12, "b": "null"})],
    ),
    # What such models leave out, write wrongly or merely talk about.
    ("qwen3_coder", "<function=add>\n<parameter=a>\nNaN\n</parameter>\n</function>", "", [("add", {"a": "NaN"})]),
    ("qwen3_coder", "<tool_call><function=add><parameter=b>x</parameter></tool_call>", "", [("add", {"b": "x"})]),
    ("qwen3_coder", "<function=other><parameter=q>1</parameter></function> done", "done", [("other", {"q": "1"})]),
    ("qwen3_coder", "a <tool_call>no call</tool_call> b", "a <tool_call>no call</tool_call> b", []),
    ("qwen3_coder", "write <function=name here> so", "write <function=name here> so", []),
    ("qwen3_coder", "<tool_call>\n<function=ad", "<tool_call>\n<function=ad", []),
    ("qwen3_coder", "<function=<function=add></function>", "<function=", [("add", {})]),
]


@pytest.mark.parametrize(("form", "text", "content", "expected"), CASES)
def test_forms(form: str, text: str, content: str, expected: list[tuple[str, object]]) -> None:
    whole = read(make_tool_parser(form, TOOLS), [text])
    assert (whole.content, calls(whole)) == (content, expected)
    single = read(make_tool_parser(form, TOOLS), [*text, ""])
    assert (single.content, calls(single)) == (content, expected)


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "add[ARGS]"]
MARKS += ["<function=", "add>", "<parameter=", "a>", "</parameter>", "</function>"]
SIGNS = ["{", "}", "[add(", "a=1)]", ";", ",", "text", "<", "[", "\\", '"', " ", "\n"]
PARTS = st.sampled_from([*MARKS, *SIGNS, '{"name": "add", "arguments": {"a": "x}"}}'])


@given(
    parts=st.lists(PARTS, max_size=12),
    cuts=st.sets(st.integers(0, 200)),
    form=st.sampled_from([*TOOL_PARSERS, "think"]),
)
def test_cuts_do_not_matter_and_nothing_raises(parts: list[str], cuts: set[int], form: str) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]

    def make() -> AnswerParser:
        return ReasoningParser(HermesParser(), False) if form == "think" else make_tool_parser(form, TOOLS)

    whole, cut = read(make(), [text]), read(make(), pieces)
    assert (whole.content, whole.reasoning) == (cut.content, cut.reasoning)
    assert [(c.name, c.arguments) for c in whole.calls] == [(c.name, c.arguments) for c in cut.calls]


def test_arguments_stream_as_they_are_written() -> None:
    parser = HermesParser()
    parser.push('<tool_call>{"name": "add", "arguments": {"a": 1', False)
    (event,) = parser.push('2, "b"', False)
    assert event.text == '2, "b"'  # type: ignore[union-attr]


def test_xml_arguments_come_one_at_a_time() -> None:
    parser = make_tool_parser("qwen3_coder", TOOLS)
    parser.push("<tool_call>\n<function=add>\n<parameter=a>\n1", False)
    (event,) = parser.push("2\n</parameter>\n<para", False)
    assert event.text == '"a": 12'  # type: ignore[union-attr]


def test_the_forced_list_form() -> None:
    message = read(
        MistralParser(tagged=False), list('[{"name": "add", "arguments": {"a": 1}},{"name": "b", "arguments": {}}]')
    )
    assert calls(message) == [("add", {"a": 1}), ("b", {})]


@pytest.mark.parametrize(
    ("starts_inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (True, "hm\n</think>yes", "hm", "yes"),
        (False, "plain", "", "plain"),
        (False, "a <think>b</think>", "", "a <think>b</think>"),
        (True, "never closed", "never closed", ""),
        (False, "<think></think>x", "", "x"),
    ],
)
def test_reasoning(starts_inside: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], [*text, ""]):
        message = read(ReasoningParser(HermesParser(), starts_inside), pieces)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_unfinished_calls_keep_what_was_written() -> None:
    message = read(LlamaParser(NAMES), ['{"name": "add", "parameters": {"a": '])
    assert [(c.name, c.arguments) for c in message.calls] == [("add", '{"a": ')]


def test_pythonic_runs_nothing() -> None:
    assert parse_pythonic("[f(a=open('x'))]") is None
    assert parse_pythonic("[" * 5000) is None
    assert read(PythonicParser(NAMES), ["[add(a=" + "9" * 5000 + ")]"]).calls == []
