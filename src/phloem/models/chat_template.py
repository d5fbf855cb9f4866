"""Chat templates: owns the sandbox in which a model's Jinja template turns messages into a prompt.

Must not know tokens or HTTP. A template comes from a model file and is not trusted: it may compute text from what it
is given, and nothing else. It reaches no attributes but those listed here, changes no argument, and its loops and
its text are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from phloem.errors import InvalidRequestError

MAX_TEXT = 1 << 24
"""Most characters of one value and of all text that one rendering puts out."""
MAX_ITERATIONS = 2_000_000
"""Most loop rounds of one rendering, all loops together."""
_MAX_INDENT = 100


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,
        _words(
            "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
            "isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
            "rstrip split splitlines startswith strip swapcase title upper"
        ),
    ),
    (dict, _words("get items keys values")),
    (list, _words("count index")),
    (tuple, _words("count index")),
    (
        LoopContext,
        _words("changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"),
    ),
    (Cycler, _words("current next reset")),
    (Macro, _words("arguments name")),
)
_FILTERS = _words(
    "abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max "
    "min reject rejectattr reverse round safe select selectattr sort string sum title trim truncate unique upper"
)
_BUDGET = "__budget__"
_RESERVED = frozenset(("messages", "tools", "add_generation_prompt", _BUDGET))


class ChatTemplate:
    """The template or named templates of one model, compiled on first use.

    `sources` maps names to template text; `default` renders chats, `tool_use` (if there) chats with tools.
    `special_tokens` are variables such as bos_token, as text.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _Sandbox()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`, which stay unchanged; `kwargs` are further variables of the template.

        Null or absent content becomes the empty string, a list of text parts their lines, and the arguments of
        tool calls, which the API carries as JSON text, a mapping. Raises InvalidRequestError if there is no
        template, the template fails, breaks the sandbox or a bound, or a message does not fit.
        """
        if not self.sources:
            raise InvalidRequestError(
                "this model has no chat template; give one with --chat-template FILE, or use /v1/completions"
            )
        clash = sorted(_RESERVED & kwargs.keys() | self._special_tokens.keys() & kwargs.keys())
        if clash:
            raise InvalidRequestError(f"chat template variable {clash[0]!r} is reserved", param="chat_template_kwargs")
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        try:
            variables = {
                **self._special_tokens,
                **kwargs,
                "messages": [_plain_message(message, i) for i, message in enumerate(messages)],
                "tools": _copy(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
                _BUDGET: _Budget(),
            }
            return "".join(self._template(name).generate(variables))
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise InvalidRequestError(f"the model has no default chat template, only {names}; give --chat-template")
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self.sources[name])
        return self._compiled[name]


class _Budget:
    """What one rendering may still spend; out of reach for templates, which see no attribute of it."""

    def __init__(self) -> None:
        self.text = MAX_TEXT
        self.iterations = MAX_ITERATIONS

    def take_text(self, count: int) -> None:
        self.text -= count
        if self.text < 0:
            raise jinja2.TemplateRuntimeError(f"the template writes more than {MAX_TEXT} characters")

    def take_iterations(self, count: int) -> None:
        self.iterations -= count
        if self.iterations < 0:
            raise jinja2.TemplateRuntimeError(f"the template's loops take more than {MAX_ITERATIONS} rounds")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with lists of what is allowed in place of lists of what is not."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run filters when the template is compiled, outside any budget
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
        )
        standard = self.filters
        self.filters = {name: standard[name] for name in _FILTERS}
        self.filters |= {
            "bounded_loop": _bounded_loop,
            "bounded_text": _bounded,
            "indent": _limit_indent(standard["indent"]),
            "join": _limit_join(standard["join"]),
            "replace": _limit_replace(standard["replace"]),
            "tojson": _to_json,
        }
        self.globals = {
            "cycler": Cycler,
            "dict": _make_dict,
            "joiner": Joiner,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "range": self.globals["range"],
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if type(obj) is Namespace:
            return True
        return any(isinstance(obj, kind) and attr in allowed for kind, allowed in _METHODS)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a value, bounding the two of str that can multiply its length."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_size(len(owner) * len(args[0]))
            elif obj.__name__ == "replace":
                _check_replace(owner, *args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    _check_size(len(value) * count)
        elif operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise jinja2.TemplateRuntimeError("the template computes too large a power")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("string formatting with % is not allowed in chat templates")
        return _bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse str.format: its mini language reads attributes and pads to any width."""
        return None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then put a bound around the source of each loop and each concatenation."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
        _bound_concatenations(template)
        return template


def _bound_concatenations(parent: nodes.Node) -> None:
    for field, value in parent.iter_fields():
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _bound_concatenations(child)
            if isinstance(child, nodes.Concat):
                bounded = nodes.Filter(child, "bounded_text", [], [], None, None, lineno=child.lineno)
                if isinstance(value, list):
                    value[i] = bounded
                else:
                    setattr(parent, field, bounded)


class _GenerationTag(Extension):
    """`{% generation %}`, by which training code marks the assistant's part: here only its content counts."""

    tags = {"generation"}  # noqa: RUF012  (read by jinja from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Charge what is put out; null is written as nothing, never as a word."""
    if value is None:
        return ""
    text = value if isinstance(value, str | Undefined) else str(value)
    context[_BUDGET].take_text(len(str(text)))
    return text


@jinja2.pass_context
def _bounded_loop(context: Context, values: Iterable[Any]) -> Iterable[Any]:
    budget: _Budget = context[_BUDGET]
    if isinstance(values, str | list | tuple | dict | range):
        budget.take_iterations(len(values))
        return values
    if isinstance(values, Undefined):
        return values
    return _counted(values, budget)


def _counted(values: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for value in values:
        budget.take_iterations(1)
        yield value


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise jinja2.TemplateRuntimeError(f"the template builds a value of more than {MAX_TEXT} characters")


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _check_replace(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + (text.count(old) if new else 0) * len(new))


def _limit_replace(replace: Callable[..., str]) -> Callable[..., str]:
    @jinja2.pass_eval_context
    def limited(context: nodes.EvalContext, text: str, old: str, new: str, count: int | None = None) -> str:
        _check_replace(str(text), str(old), str(new))
        return replace(context, text, old, new, count)

    return limited


def _limit_join(join: Callable[..., str]) -> Callable[..., str]:
    @jinja2.pass_eval_context
    def limited(context: nodes.EvalContext, values: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        items = list(values)
        _check_size(len(str(d)) * len(items))
        return str(_bounded(join(context, items, d, attribute)))

    return limited


def _limit_indent(indent: Callable[..., str]) -> Callable[..., str]:
    def limited(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = width if isinstance(width, int) else len(width)
        _check_size(max(size, 0) * (str(text).count("\n") + 1))
        return indent(text, width, first, blank)

    return limited


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, and Unicode as it is."""
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise jinja2.TemplateRuntimeError(f"tojson: indent must be from 0 to {_MAX_INDENT}, got {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_size(len(form) * 100)
    return datetime.now().strftime(form)


def _copy(value: Any) -> Any:
    """A deep copy of JSON-like data as plain dicts and lists, which is all that a template gets to see."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    plain = {"content": "", **{key: _copy(value) for key, value in message.items() if value is not None}}
    content = plain["content"]
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        plain["content"] = "\n".join(part if isinstance(part, str) else part["text"] for part in content)
    for j, call in enumerate(plain.get("tool_calls", ())):
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parse_arguments(
                function["arguments"], f"messages[{index}].tool_calls[{j}].function.arguments"
            )
        elif function.get("arguments") is None:
            function["arguments"] = {}
    return plain


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _parse_arguments(text: str, param: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} must be a JSON object as text: {error}", param=param) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be a JSON object as text, got {type(value).__name__}", param=param)
    return value
