"""How models write tool calls: the Hermes/Qwen, Qwen3-Coder, Llama-3, Mistral and Pythonic forms, read as a stream.

Owns one parser for each form. All give the same events however the text is cut. Text that turns out to be no call is
content, as it was written. Must not know HTTP.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from secrets import choice, token_hex
from string import ascii_letters, digits
from typing import Any

from phloem.server.events import AnswerParser, CallArguments, CallStart, Content, Event, joined
from phloem.server.json_calls import CallScanner, TagScanner

_SPACE = " \t\r\n"
_MAX_PYTHONIC = 64 * 1024


def new_call_id() -> str:
    """An id as OpenAI clients expect it."""
    return f"call_{token_hex(12)}"


def new_short_id() -> str:
    """An id of nine letters and digits, which Mistral's templates insist on."""
    return "".join(choice(ascii_letters + digits) for _ in range(9))


class _Output:
    """Events of one answer: numbers the calls, and drops space around them."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self._new_id = new_id
        self._space = ""

    def content(self, text: str) -> None:
        """Text; space at its end waits until it is known whether more text follows."""
        body = text.rstrip(_SPACE)
        if body:
            self.events.append(Content(self._space + body))
            self._space = ""
        self._space += text[len(body) :]

    def start(self, name: str) -> None:
        self._space = ""
        self.events.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(CallArguments(self.num_calls - 1, text))

    def take(self, final: bool) -> list[Event]:
        """All events since the last time."""
        if final and self._space and not self.num_calls:
            self.events.append(Content(self._space))
            self._space = ""
        events, self.events = self.events, []
        return joined(events)


class _JsonCall:
    """One call being read: passes what the scanner finds on to the output."""

    def __init__(self, output: _Output, accepts: Callable[[str], bool] = lambda _name: True) -> None:
        self._output = output
        self._accepts = accepts
        self._scanner = CallScanner()
        self._started = False

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def failed(self) -> bool:
        """True when it is no call; its text is then `raw`, unless the call was started already."""
        return self._scanner.failed

    @property
    def raw(self) -> str:
        return "" if self._started else "".join(self._scanner.raw)

    def take(self, character: str) -> None:
        scanner = self._scanner
        scanner.take(character)
        if scanner.failed or scanner.name is None or not scanner.has_arguments:
            return
        if not self._started:
            if not self._accepts(scanner.name):
                scanner.failed = True
                return
            self._started = True
            self._output.start(scanner.name)
        self._output.arguments(scanner.take_arguments())


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, between text."""

    def __init__(self) -> None:
        self._output = _Output()
        self._opening = TagScanner("<tool_call>")
        self._closing = TagScanner("</tool_call>", "<tool_call>")
        self._state = "text"
        self._call = _JsonCall(self._output)

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`."""
        while True:
            if self._state == "call":
                text = self._read_call(text)
                if self._state == "call":
                    if final:
                        self._fail()
                    break
            elif self._state == "text":
                before, marker, text = self._opening.push(text, final)
                self._output.content(before)
                if not marker:
                    break
                self._open()
            else:
                _, marker, text = self._closing.push(text, final)
                if not marker:
                    break
                self._state = "text"
                if marker == "<tool_call>":
                    self._open()
        return self._output.take(final)

    def _open(self) -> None:
        self._state = "call"
        self._call = _JsonCall(self._output)

    def _read_call(self, text: str) -> str:
        """Read until the object ends; return what follows it."""
        for position, character in enumerate(text):
            self._call.take(character)
            if self._call.failed:
                self._fail()
                return text[position + 1 :]
            if self._call.done:
                self._state = "closing"
                self._closing = TagScanner("</tool_call>", "<tool_call>")
                return text[position + 1 :]
        return ""

    def _fail(self) -> None:
        """What looked like a call is text."""
        raw = self._call.raw
        if raw:
            self._output.content("<tool_call>" + raw)
        self._state = "text" if raw else "closing"


class XmlParser:
    """<tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> </tool_call>: Qwen3-Coder's form.

    Values are plain text; the schema of the tool says which of them are not strings. Arguments go out one at a time.
    A value may hold anything but its own closing tag, so none is shown before that came.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._output = _Output()
        self._tools = tools
        self._read = {
            "text": self._read_text,
            "opened": self._read_opened,
            "name": self._read_name,
            "body": self._read_body,
            "key": self._read_key,
            "value": self._read_value,
            "closing": self._read_closing,
        }
        self._state = "text"
        self._held = ""
        self._before = ""
        self._name = ""
        self._key = ""
        self._num_arguments = 0

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`."""
        self._held += text
        while self._read[self._state](final):
            pass
        return self._output.take(final)

    def _cut(self, *markers: str, final: bool = False) -> tuple[str, str]:
        """Take the held text up to the first of some markers, and the marker; without one, what cannot begin one."""
        scanner = TagScanner(*markers)
        before, marker, rest = scanner.push(self._held, final)
        self._held = rest if marker else scanner.held
        return before, marker

    def _read_text(self, final: bool) -> bool:
        before, marker = self._cut("<tool_call>", "<function=", final=final)
        self._output.content(before)
        if marker:
            self._state, self._before = ("opened" if marker == "<tool_call>" else "name"), marker
        return bool(marker)

    def _read_opened(self, final: bool) -> bool:
        """After <tool_call>: a function, or this is no call but text."""
        rest = self._held.lstrip(_SPACE)
        if rest.startswith("<function="):
            self._before += self._held[: len(self._held) - len(rest)] + "<function="
            self._held, self._state = rest.removeprefix("<function="), "name"
            return True
        return self._is_no_call() if final or not "<function=".startswith(rest) else False

    def _read_name(self, final: bool) -> bool:
        name, marker, rest = self._held.partition(">")
        if not marker and re.fullmatch(r"[\w.:-]*", name) and not final:
            return False
        if not marker or not re.fullmatch(r"[\w.:-]+", name):
            return self._is_no_call()
        self._held, self._name, self._state, self._num_arguments = rest, name, "body", 0
        self._output.start(name)
        self._output.arguments("{")
        return True

    def _is_no_call(self) -> bool:
        self._output.content(self._before)
        self._state = "text"
        return True

    def _read_body(self, final: bool) -> bool:
        _, marker = self._cut("<parameter=", "</function>", "</tool_call>", final=final)
        if marker == "<parameter=":
            self._state, self._key = "key", ""
        elif marker:
            self._output.arguments("}")
            self._state = "closing" if marker == "</function>" else "text"
        return bool(marker)

    def _read_key(self, final: bool) -> bool:
        key, marker = self._cut(">", final=final)
        self._key += key
        if marker:
            self._state = "value"
        return bool(marker)

    def _read_value(self, _final: bool) -> bool:
        text, marker, rest = self._held.partition("</parameter>")
        if not marker:
            return False
        schema = self._tools.get(self._name, {}).get("properties", {})
        key = self._key.strip()
        separator = ", " if self._num_arguments else ""
        self._output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {xml_value(text, schema.get(key))}")
        self._held, self._state = rest, "body"
        self._num_arguments += 1
        return True

    def _read_closing(self, final: bool) -> bool:
        """After </function>: its </tool_call>, which some answers leave out."""
        rest = self._held.lstrip(_SPACE)
        if "</tool_call>".startswith(rest) and rest != "</tool_call>" and not final:
            return False
        self._held, self._state = rest.removeprefix("</tool_call>"), "text"
        return bool(self._held)


def xml_value(text: str, schema: Any) -> str:
    """The JSON of a value that was written as text: a string, unless its schema has other types and the text is one."""
    text = text.removeprefix("\n").removesuffix("\n")
    declared = schema.get("type") if isinstance(schema, dict) else None
    if declared is not None and "string" not in (declared if isinstance(declared, list) else [declared]):
        try:
            return json.dumps(json.loads(text, parse_constant=_no_number), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


class LlamaParser:
    """{"name": ..., "parameters": {...}}, alone or after <|python_tag|>, several separated by ; or space.

    Without the tag, an object counts as a call only if it names one of the tools.
    """

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._output = _Output()
        self._tag = TagScanner("<|python_tag|>")
        self._names = tool_names
        self._tagged = False
        self._call: _JsonCall | None = None
        self._text_only = False

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`."""
        before, marker, rest = self._tag.push(text, final)
        self._read(before)
        while marker:
            if self._call is not None:
                self._give_up()
            self._tagged, self._text_only = True, False
            before, marker, rest = self._tag.push(rest, final)
            self._read(before)
        if final and self._call is not None:
            self._give_up()
        return self._output.take(final)

    def _read(self, text: str) -> None:
        for position, character in enumerate(text):
            if self._text_only:
                self._output.content(text[position:])
                return
            if self._call is None:
                if character in _SPACE or (character == ";" and self._output.num_calls):
                    continue
                if character != "{":
                    self._text_only = True
                    self._output.content(text[position:])
                    return
                self._call = _JsonCall(self._output, self._accepts)
            self._call.take(character)
            if self._call.failed:
                self._give_up()
            elif self._call.done:
                self._call = None

    def _accepts(self, name: str) -> bool:
        return self._tagged or name in self._names

    def _give_up(self) -> None:
        assert self._call is not None
        raw = self._call.raw
        self._call = None
        self._text_only = True
        if raw:
            self._output.content(raw)


class MistralParser:
    """[TOOL_CALLS] and then a JSON list of calls, or name[ARGS]{...} or name{...}, the tag before each.

    `tagged` False reads a bare JSON list from the first character on: the form that grammars force.
    """

    def __init__(self, *, tagged: bool = True) -> None:
        self._output = _Output(new_short_id if tagged else new_call_id)
        self._tag = TagScanner("[TOOL_CALLS]")
        self._state = "text" if tagged else "list"
        self._call: _JsonCall | None = None
        self._name = ""

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`."""
        while True:
            before, marker, text = self._tag.push(text, final)
            self._read(before)
            if not marker:
                break
            self._state, self._call, self._name = "list", None, ""
        if final and self._call is not None and self._call.raw:
            self._output.content(self._call.raw)
            self._call = None
        return self._output.take(final)

    def _read(self, text: str) -> None:
        if self._state == "text":
            self._output.content(text)
            return
        for character in text:
            if self._call is not None:
                self._call.take(character)
                if self._call.done or self._call.failed:
                    self._output.content(self._call.raw if self._call.failed else "")
                    self._call = None
            elif self._state == "name":
                self._in_name(character)
            elif character == "{":
                self._call = _JsonCall(self._output)
                self._call.take(character)
            elif character not in _SPACE + "[],":
                self._state = "name"
                self._in_name(character)

    def _in_name(self, character: str) -> None:
        """name[ARGS]{ ... or name{ ...: from the brace on, the arguments are those of an ordinary call."""
        if character != "{":
            self._name += character
            return
        name = re.sub(r"\[(?:CALL_ID\]\S*?\[)?ARGS\]", "", self._name).strip()
        self._call = _JsonCall(self._output)
        for each in f'{{"name": {json.dumps(name)}, "arguments": {{':
            self._call.take(each)
        self._state, self._name = "arguments", ""


class PythonicParser:
    """[f(a=1), g(b="x")]: Python calls with literal arguments, as the whole answer."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._output = _Output()
        self._names = tool_names
        self._text = ""
        self._is_text = False

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`. The list is read when it is complete: Python cannot be judged by its beginning."""
        if self._is_text:
            self._output.content(text)
            return self._output.take(final)
        self._text += text
        start = self._text.lstrip(_SPACE)
        may_be_calls = not start or re.match(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|$)|$)", start) is not None
        if not may_be_calls or len(start) > _MAX_PYTHONIC or (final and not self._emit(start)):
            self._give_up()
        return self._output.take(final)

    def _give_up(self) -> None:
        self._is_text = True
        self._output.content(self._text)

    def _emit(self, text: str) -> bool:
        """The calls of a complete list; False when it is none."""
        calls = parse_pythonic(text)
        if not calls or not all(name in self._names for name, _ in calls):
            return False
        for name, arguments in calls:
            self._output.start(name)
            self._output.arguments(json.dumps(arguments, ensure_ascii=False))
        return True


def parse_pythonic(text: str) -> list[tuple[str, dict[str, object]]] | None:
    """Calls of a Python list of calls, read as literals and never run; None when it is anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if not isinstance(tree.body, ast.List):
            return None
        return [_pythonic_call(node) for node in tree.body.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _pythonic_call(node: ast.expr) -> tuple[str, dict[str, object]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments only")
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments)
    return ast.unparse(node.func), arguments


TOOL_PARSERS = ("hermes", "llama3", "mistral", "pythonic", "qwen3_coder")


def make_tool_parser(form: str, tools: Mapping[str, Mapping[str, Any]]) -> AnswerParser:
    """A parser of one of TOOL_PARSERS, for tools of these names and parameters."""
    match form:
        case "hermes":
            return HermesParser()
        case "qwen3_coder":
            return XmlParser(tools)
        case "llama3":
            return LlamaParser(frozenset(tools))
        case "mistral":
            return MistralParser()
        case _:
            assert form == "pythonic", form
            return PythonicParser(frozenset(tools))
