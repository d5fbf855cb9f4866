"""Tools of a chat: which form the model writes calls in, which calls a request forces, how the model hears of them.

Owns the choice of parsers and the grammars of forced calls. The parsers themselves are elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phloem.engine.grammar import Grammar, json_schema
from phloem.errors import InvalidRequestError, UsageError
from phloem.server.engine_api import Tokenizer
from phloem.server.events import AnswerParser, CallArguments, CallStart, Event, PlainParser
from phloem.server.protocol import ChatBody, NamedToolChoice, Tool
from phloem.server.reasoning import REASONING_PARSERS, ReasoningParser
from phloem.server.structured import AnswerGrammar
from phloem.server.tool_parsers import TOOL_PARSERS, MistralParser, make_tool_parser

_MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
}
_FORCED_AS_LIST = ("pythonic", "qwen3_coder")
"""Forms whose calls no grammar of JSON schemas can shape: forced calls are a JSON list instead."""

_THOUGHT_MARKERS = ("<think>", "</think>")

_MAX_FORCED_CALLS = 16
_SPACING = {"whitespace_pattern": "[ ]?", "coerce_one_of": True}

_INSTRUCTIONS = """You may call functions to help with the request. The functions, as JSON:
{tools}
To call one, answer with its name and its arguments as JSON between these tags, once for each call:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a model writes: the form of its tool calls, whether it marks thoughts, whether its template shows tools."""

    tool_form: str
    has_thoughts: bool
    shows_tools: bool
    special_markers: frozenset[str] = frozenset()


def answer_form(tokenizer: Tokenizer, tool_parser: str = "", reasoning_parser: str = "") -> AnswerForm:
    """Read the form off the chat template, where the configuration does not name it. Raises UsageError."""
    template = "\n".join(tokenizer.template.sources.values())
    if tool_parser not in ("", *TOOL_PARSERS):
        raise UsageError(f"--tool-call-parser must be one of {', '.join(TOOL_PARSERS)}, got {tool_parser!r}")
    if reasoning_parser not in ("", "none", *REASONING_PARSERS):
        raise UsageError(f"--reasoning-parser must be none or think, got {reasoning_parser!r}")
    markers = [*_THOUGHT_MARKERS, *(marker for group in _MARKERS.values() for marker in group)]
    return AnswerForm(
        tool_form=tool_parser or _tool_form(template),
        has_thoughts=reasoning_parser == "think" or (not reasoning_parser and "</think>" in template),
        shows_tools="tools" in template,
        special_markers=frozenset(marker for marker in markers if _special_id(tokenizer, marker) is not None),
    )


def _tool_form(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3"
    return "hermes"


def _special_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """Id of a marker that is one control token, which plain text cannot spell."""
    ids = tokenizer.encode(marker, False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What one chat does about tools: how to read the answer, and the grammar that forces calls."""

    form: AnswerForm
    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    parallel: bool = True

    @property
    def active(self) -> bool:
        return bool(self.tools)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments, by the tool's name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether markers that must be read are control tokens, which are left out of text otherwise."""
        marks = set(_MARKERS.get(self.form.tool_form, ())) if self.active else set()
        return bool(self.form.special_markers & (marks | set(_THOUGHT_MARKERS if self.form.has_thoughts else ())))

    def make_parser(self, starts_inside_thoughts: bool, separate_reasoning: bool) -> AnswerParser:
        """A parser for one answer."""
        answer: AnswerParser = PlainParser()
        if self.forced and self.form.tool_form in _FORCED_AS_LIST:
            answer = MistralParser(tagged=False)
        elif self.active:
            answer = make_tool_parser(self.form.tool_form, self.parameters)
        if self.active and not self.parallel:
            answer = FirstCallOnly(answer)
        if self.form.has_thoughts and separate_reasoning and not self.forced:
            answer = ReasoningParser(answer, starts_inside_thoughts)
        return answer


class FirstCallOnly:
    """Drops every call but the first, for clients that asked for no parallel calls."""

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`."""
        events = self._inner.push(text, final)
        return [event for event in events if not (isinstance(event, CallStart | CallArguments) and event.index > 0)]


def plan_tools(body: ChatBody, form: AnswerForm) -> ToolPlan:
    """Check tools and tool_choice. Raises InvalidRequestError naming the field."""
    tools = body.tools or []
    choice = body.tool_choice
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise InvalidRequestError("tools: two functions have the same name", param="tools")
    for position, tool in enumerate(tools):
        json_schema(tool.function.parameters or {}, f"tools[{position}].function.parameters")
    if choice == "none":
        return ToolPlan(form)
    forced: tuple[Tool, ...] = ()
    if choice == "required":
        forced = tuple(tools)
    elif isinstance(choice, NamedToolChoice):
        forced = (by_name[choice.function.name],) if choice.function.name in by_name else ()
    if choice not in (None, "auto") and not forced:
        raise InvalidRequestError("tool_choice asks for a function that is not in tools", param="tool_choice")
    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    return ToolPlan(form, tuple(tools), forced, parallel)


def forced_grammar(plan: ToolPlan, tokenizer: Tokenizer) -> AnswerGrammar:
    """The grammar of an answer that consists of calls of the forced tools, in the model's own form."""
    begin, end, separator, arguments_key = _frame(plan.form.tool_form, tokenizer)
    rules = []
    for number, tool in enumerate(plan.forced):
        head = f'{{"name": {json.dumps(tool.function.name, ensure_ascii=False)}, "{arguments_key}": '
        rules.append(f"call_{number}: {_quoted(head)} args_{number} {_quoted('}')}")
        rules.append(f"args_{number}: %json {json.dumps(_parameters(tool), ensure_ascii=False)}")
    one = " | ".join(f"call_{number}" for number in range(len(plan.forced)))
    wraps = plan.form.tool_form == "hermes"
    call = f"call: {begin} one {end}" if wraps else "call: one"
    several = f"call ({separator} call){{0,{_MAX_FORCED_CALLS - 1}}}" if plan.parallel and separator else "call"
    start = f"start: {several}" if wraps else f"start: {begin} {several} {end}"
    return AnswerGrammar(Grammar("lark", "\n".join([start, call, f"one: {one}", *rules])), "tools")


def calls_or(answer: AnswerGrammar, plan: ToolPlan, tokenizer: Tokenizer) -> AnswerGrammar:
    """The grammar of an answer that is either tool calls or what `answer` allows. Raises InvalidRequestError."""
    if answer.grammar.kind != "json_schema":
        raise InvalidRequestError(f"{answer.param} and tools together are not served", param=answer.param)
    calls = forced_grammar(replace(plan, forced=plan.tools), tokenizer)
    schema = {**json.loads(answer.grammar.text), "x-guidance": _SPACING}
    lines = calls.grammar.text.replace("start:", "calls:", 1)
    start = f"start: calls | answer\nanswer: %json {json.dumps(schema, ensure_ascii=False)}"
    return AnswerGrammar(Grammar("lark", f"{start}\n{lines}"), answer.param)


def _frame(form: str, tokenizer: Tokenizer) -> tuple[str, str, str, str]:
    """(before, after, between, key of the arguments) of calls, as grammar text."""

    def mark(text: str) -> str:
        token_id = _special_id(tokenizer, text)
        return _quoted(text) if token_id is None else f"<[{token_id}]>"

    newline = _quoted("\n")
    match form:
        case "hermes":
            return f"{mark('<tool_call>')} {newline}", f"{newline} {mark('</tool_call>')}", newline, "arguments"
        case "llama3":
            return "", "", "", "parameters"
        case "mistral":
            return f"{mark('[TOOL_CALLS]')} {_quoted('[')}", _quoted("]"), _quoted(", "), "arguments"
        case _:
            return _quoted("["), _quoted("]"), _quoted(", "), "arguments"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, empty for a tool that names none, with compact space."""
    schema = tool.function.parameters
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    return {"type": "object", **schema, "x-guidance": _SPACING}


def with_instructions(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a model whose template cannot show tools: told in the system message, calls and results as text."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    plain = [_as_text(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}".strip()}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message without members that only templates with tools know."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
    content = "\n".join(([message["content"]] if message["content"] else []) + written)
    return {"role": message["role"], "content": content}


def _call_text(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text.strip() or "{}"}}}'
