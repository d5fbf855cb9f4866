"""Structured output: grammars compiled once, and the state of one sequence inside a grammar.

Owns the compiler and its cache. A compiled grammar is copied for each sequence; the copy then lives on the engine
thread as a `types.TokenMasker`. Must not know requests or HTTP. Compiling is for other threads: it may take a second.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from phloem.errors import InvalidRequestError

GrammarKind = Literal["json_schema", "regex", "lark", "ebnf"]

MAX_GRAMMAR_BYTES = 512 * 1024
"""Longest grammar or schema, as text."""

MAX_SCHEMA_DEPTH = 100
"""Deepest nesting of a JSON schema."""

MAX_REPEATS = 20_000
"""Most parts that the counted repeats of one regular expression may multiply out to."""

_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[0-9]{1,9}(?:,[0-9]{0,9})?\}|.", re.DOTALL)
_WHITESPACE = "[ ]?"
_CACHE_SIZE = 64
_MAX_REASON = 300


class GrammarTokenizer(Protocol):
    """What a grammar asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `text` is a JSON schema as JSON text, a regex, or a grammar."""

    kind: GrammarKind
    text: str


ANY_JSON_OBJECT = Grammar("json_schema", '{"type":"object"}')


def json_schema(schema: Any, param: str) -> Grammar:
    """The grammar of a JSON schema given as parsed JSON. Raises InvalidRequestError for what can be no schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param}: a JSON schema must be an object or true, got {_name(schema)}", param=param)
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    _check_size(text, param)
    for pattern in _patterns(schema, param):
        check_repeats(pattern, param)
    return Grammar("json_schema", text)


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"{param} may have at most {MAX_GRAMMAR_BYTES} characters", param=param)


def choice_regex(choices: Sequence[str]) -> Grammar:
    """The grammar that allows exactly one of the texts."""
    rules = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar("lark", f"start: {rules}")


def _name(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _patterns(schema: dict[str, Any], param: str) -> list[str]:
    """All regular expressions in a schema, without recursion. Raises InvalidRequestError when it nests too deep."""
    patterns: list[str] = []
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                properties = item.get("patternProperties")
                named = properties if isinstance(properties, dict) else {}
                patterns += (text for text in (item.get("pattern"), *named) if isinstance(text, str))
            elif isinstance(item, list):
                below += item
        level = below
        if not level:
            return patterns
    raise InvalidRequestError(f"{param}: the JSON schema nests deeper than {MAX_SCHEMA_DEPTH}", param=param)


def check_repeats(pattern: str, param: str) -> None:
    """Refuse counted repeats that multiply out to a huge expression: `(a{999}){999}`. One pass over the text."""
    sizes, last = [1], [1]
    for token in _PARTS.finditer(pattern):
        text = token.group()
        if text == "(":
            sizes.append(1)
            last.append(1)
        elif text == ")" and len(sizes) > 1:
            last.pop()
            size = sizes.pop()
            sizes[-1] += size
            last[-1] = size
        elif text[0] == "{" and len(text) > 1:
            count = max(int(number) for number in text[1:-1].split(",") if number)
            sizes[-1] += last[-1] * (count - 1)
            last[-1] *= max(1, count)
        else:
            sizes[-1] += 1
            last[-1] = 1
        if last[-1] > MAX_REPEATS and text[-1] == "}":
            raise InvalidRequestError(
                f"{param}: the counted repeats of a pattern multiply out to more than {MAX_REPEATS} parts", param=param
            )


class GrammarMasker:
    """State of one sequence; see `types.TokenMasker`. Nothing here raises: a step must not fail for one grammar.

    When the grammar turns out too complex while it runs, only the end of the answer is allowed from there on,
    and `error` says so.
    """

    __slots__ = ("_buffer", "_end_ids", "_matcher", "error")

    def __init__(self, matcher: LLMatcher, num_words: int, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._buffer = np.zeros(num_words, dtype=np.uint32)
        self._end_ids = end_ids
        self.error = ""

    def fill(self, bitmask: NDArray[np.uint32]) -> None:
        """Write the allowed next tokens into uint32[ceil(vocab / 32)]; what lies past the tokenizer is forbidden."""
        if not self.finished:
            self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
            self._check()
        if self.finished:
            self._buffer[:] = 0
            for token_id in self._end_ids:
                self._buffer[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        width = min(len(bitmask), len(self._buffer))
        bitmask[:width] = self._buffer[:width]
        bitmask[width:] = 0

    def accept(self, token_id: int) -> None:
        """Advance by one drawn token."""
        if not self.finished:
            self._matcher.consume_token(token_id)
            self._check()

    @property
    def finished(self) -> bool:
        """True when nothing but the end may follow."""
        return bool(self.error) or self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = _reason(self._matcher.get_error())


class _Vocabulary:
    """A tokenizer in the form that the grammar library reads."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._encode = tokenizer.encode
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.eos_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._encode(plain, False)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and remembers the last ones. Safe to call from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, *, cache_size: int = _CACHE_SIZE) -> None:
        if not tokenizer.eos_ids:
            raise InvalidRequestError("structured output needs a model with an end-of-text token")
        self._end_ids = sorted(tokenizer.eos_ids)
        self._tokenizer = LLTokenizer(cast(TokenizerWrapper, _Vocabulary(tokenizer)), eos_token=self._end_ids)
        self._num_words = (self._tokenizer.vocab_size + 31) // 32
        self._cache_size = cache_size
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def maskers(self, grammar: Grammar, count: int, param: str) -> tuple[GrammarMasker, ...]:
        """Fresh states for `count` sequences. Raises InvalidRequestError with the reason; bounded time and memory."""
        with self._lock:
            matcher = self._cache.get(grammar)
            if matcher is not None:
                self._cache.move_to_end(grammar)
        if matcher is None:
            matcher = self._compile(grammar, param)
            with self._lock:
                self._cache[grammar] = matcher
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        return tuple(GrammarMasker(matcher.deep_copy(), self._num_words, self._end_ids) for _ in range(count))

    def _compile(self, grammar: Grammar, param: str) -> LLMatcher:
        _check_size(grammar.text, param)
        if grammar.kind in ("regex", "ebnf"):
            check_repeats(grammar.text, param)
        try:
            source = _to_source(grammar)
        except (ValueError, GbnfToLarkError, RecursionError) as error:
            raise InvalidRequestError(f"{param}: {_reason(str(error))}", param=param) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise InvalidRequestError(f"{param}: {_reason(matcher.get_error())}", param=param)
        self._probe(matcher.deep_copy(), param)
        return matcher

    def _probe(self, matcher: LLMatcher, param: str) -> None:
        """Take the first mask: it shows grammars that are too complex, and those that allow no answer at all."""
        masker = GrammarMasker(matcher, self._num_words, self._end_ids)
        mask = np.zeros(self._num_words, dtype=np.uint32)
        masker.fill(mask)
        if masker.error and not masker.error.startswith("NoExtension"):
            raise InvalidRequestError(f"{param} is too complex: {masker.error}", param=param)
        for token_id in self._end_ids:
            mask[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        if not mask.any():
            raise InvalidRequestError(f"{param} allows no answer, or only an empty one", param=param)


def _to_source(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises ValueError."""
    if grammar.kind == "json_schema":
        options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)  # type: ignore[arg-type]
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "ebnf":
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    return LLMatcher.grammar_from_lark(grammar.text)


def _limits() -> LLParserLimits:
    """What one grammar may cost, at compile time and in each step."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
    )


def _reason(text: str) -> str:
    """First line of a library's message, short enough for a reply; its dumps of state stay out."""
    line = " ".join(part.strip() for part in text.partition("<state>")[0].split("\n") if part.strip())
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
