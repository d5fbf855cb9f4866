"""Chat templates: equal to transformers where both render, and nothing but text comes out of a hostile one."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from phloem.errors import InvalidRequestError
from phloem.models.chat_template import ChatTemplate
from phloem.models.gguf_file import GgufFile
from tests.helpers.models import CHAT_TEMPLATE, byte_level_tokenizer

USER = {"role": "user", "content": "What is 2 < 3 & 'x'?"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "  yes \n"}, {"role": "user", "content": "Why? 你好 😀"}],
    "tools": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Plzeň", "n": 2}}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "items": [1, None]}}}]
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "headers": (
        "{{- bos_token }}\n{%- set ns = namespace(first=true) %}\n"
        "{%- if tools is not none %}{{- 'Tools: ' + tools | tojson(indent=2) }}{%- endif %}\n"
        "{%- for message in messages %}\n    {%- if message.tool_calls %}\n"
        "        {%- for call in message.tool_calls %}\n"
        "{{- '<call>' + call.function.name }}{%- for key, value in call.function.arguments | items %}"
        "{{- key ~ '=' ~ (value if value is string else value | tojson) }}{{- ', ' if not loop.last }}{%- endfor %}\n"
        "        {%- endfor %}\n    {%- else %}\n"
        "        {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}\n    {%- endif %}\n"
        "    {%- if ns.first %}{%- set ns.first = false %}{{- '!' }}{%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    ),
    "alternating": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}"
        "{% for message in loop_messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
        "{% if message.role == 'user' %}[INST] {% if loop.first and system is defined %}<<{{ system }}>>\n{% endif %}"
        "{{ message.content.strip() }} [/INST]{% else %} {{ message.content.split('>')[-1].lstrip() }}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "macros": (
        "{% macro show(m, depth=0) %}{{ '  ' * depth }}{{ m.role.upper() }}: {{ m.content }}\n{% endmacro %}"
        "{% for m in messages[::-1] %}{{ show(m, loop.index0) }}{% generation %}{{ m.content | length }}"
        "{% endgeneration %}{% endfor %}{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ dict(a=1, b=[true]) | tojson }}"
        "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | list | tojson }}"
    ),
}


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", [*TEMPLATES, "demo"])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_text_equals_transformers(
    name: str, chat: str, tools: list[dict[str, Any]] | None, prompt: bool, demo_model: Path
) -> None:
    source = TEMPLATES.get(name) or GgufFile(demo_model).metadata["tokenizer.chat_template"]
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **special)
    expected = theirs.apply_chat_template(
        CHATS[chat], tools=tools, chat_template=source, tokenize=False, add_generation_prompt=prompt
    )
    assert template(source, **special).render(CHATS[chat], tools, prompt) == expected


def test_extra_variables_reach_the_template_and_reserved_ones_do_not() -> None:
    think = template("{{ enable_thinking }}{{ bos_token }}", bos_token="B")
    assert think.render([USER], enable_thinking=False) == "FalseB"
    for name in ("bos_token", "__budget__"):
        with pytest.raises(InvalidRequestError, match="reserved"):
            think.render([USER], **{name: "x"})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": None}, "assistant:[]"),
        ({"role": "assistant"}, "assistant:[]"),
        ({"role": "assistant", "content": "", "name": None}, "assistant:[]"),
        ({"role": "user", "content": []}, "user:[]"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "user:[a\nb]"),
        ({"role": "assistant", "content": None, "tool_calls": None}, "assistant:[]"),
    ],
)
def test_null_and_absent_content_is_empty_and_none_is_never_written(message: dict[str, Any], expected: str) -> None:
    plain = template("{{ messages[0].role + ':[' + messages[0].content + ']' }}{{ messages[0].name }}{{ none }}")
    assert plain.render([message]) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"city": "Paris"}', "city=Paris;"), ("", ""), ("{}", ""), (None, ""), ({"a": 1}, "a=1;")],
)
def test_tool_arguments_are_rendered_as_a_mapping(arguments: Any, expected: str) -> None:
    source = "{% for k, v in messages[0].tool_calls[0].function.arguments|items %}{{ k }}={{ v }};{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    assert template(source).render(messages) == expected
    assert messages == before


@pytest.mark.parametrize("arguments", ["not json", "[1]", "5", '"x"', "[" * 100_000])
def test_tool_arguments_that_are_no_object_are_the_callers_fault(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
        template("x").render([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].role }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ unclosed",
        "{% include 'other' %}",
        "{% import 'os' as os %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_a_failing_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        template(source).render([USER])


def test_a_named_template_without_default_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no default chat template"):
        ChatTemplate({"rag": "x"}, {}).render([USER])


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__",
        "messages[0]['__class__']",
        "''|attr('__class__')",
        "'{0.__class__}'.format(1)",
        "'{0.__class__}'.format_map({'0': 1})",
        "'%s' % messages",
        "'%s'|format(1)",
        "cycler.__init__.__globals__",
        "cycler.__init__.__globals__['os'].system(command)",
        "joiner.__init__.__globals__",
        "namespace.__init__.__globals__.os",
        "lipsum.__globals__",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "range.__class__",
        "dict.mro()",
        "self.__init__",
        "self._TemplateReference__context",
        "messages.append(1)",
        "messages.clear()",
        "messages[0].update(a=1)",
        "messages[0].pop('role')",
        "messages[0].setdefault('a', 1)",
        "messages.sort()",
        "tools.insert(0, 1)",
        "__budget__.iterations",
        "messages|map(attribute='__class__')|list",
        "messages|selectattr('content.__class__')|list",
        "(messages|groupby('__class__'))[0]",
        "messages|map('attr', '__class__')|list",
        "loop.__init__",
        "open('/etc/hostname').read()",
        "eval('1')",
        "messages[0].items.__self__",
    ],
)
@pytest.mark.parametrize("frame", ["{{{{ {} }}}}", "{{% set x = {} %}}{{{{ x }}}}", "{{% if {} %}}yes{{% endif %}}"])
def test_hostile_templates_run_no_code_and_change_nothing(expression: str, frame: str, tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]
    before = copy.deepcopy((messages, tools))
    try:
        text = template(frame.format(expression)).render(messages, tools, command=f"touch {marker}")
    except InvalidRequestError:
        text = ""
    assert "<" not in text  # no class, function or module was printed
    assert "root" not in text
    assert (messages, tools) == before
    assert not marker.exists()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'a' * 1000000000000 }}",
        "{{ [0] * 1000000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = [ns.x ~ ns.x][0] %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x|join(ns.x) %}{% endfor %}",
        "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
        "{{ 'a'|center(1000000000000) }}",
        "{{ 'a'.ljust(1000000000000) }}",
        "{{ 'a\na'|indent(1000000000000) }}",
        "{{ '{:1000000000000}'.format('a') }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ [1]|tojson(indent=1000000000000) }}",
        "{{ [1]|batch(1000000000000, 0)|list }}",
        "{% for i in range(2000) %}{{ 'a' * 100000 }}{% endfor %}",
    ],
)
def test_templates_are_bounded_in_time_and_size(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match="chat template"):
        template(source).render([USER])
    assert time.monotonic() - start < 10


def test_long_chats_stay_inside_the_bounds() -> None:
    messages = [{"role": "user", "content": "x" * 100}] * 5000
    assert template(TEMPLATES["chatml"]).render(messages).count("<|im_end|>") == 5000


def test_the_date_is_there_for_templates_that_print_it() -> None:
    assert template("{{ strftime_now('%Y') }}").render([USER]).startswith("20")
