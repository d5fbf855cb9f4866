"""Reading tool calls out of JSON while it is still being written.

Owns two scanners: `CallScanner` for one object {"name": ..., "arguments": {...}}, `TagScanner` for markers in text.
Both take text in any pieces and give the same result. They must not know which model writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_NAME_KEYS = ("name", "function")
_SPACE = " \t\r\n"


@dataclass(slots=True)
class _Value:
    """A JSON value of which the end is being looked for."""

    parts: list[str] = field(default_factory=list)
    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def take(self, character: str) -> bool:
        """Add a character unless the value ended before it; True when it did."""
        if self.in_string:
            if self.escaped:
                self.escaped = False
            elif character == "\\":
                self.escaped = True
            elif character == '"':
                self.in_string = False
        elif character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            if self.depth == 0:
                return True
            self.depth -= 1
        elif character == "," and self.depth == 0:
            return True
        self.parts.append(character)
        return False

    @property
    def text(self) -> str:
        """The value so far, without space around it."""
        return "".join(self.parts).strip(_SPACE)


class CallScanner:
    """One call as a JSON object. `take` gets one character at a time.

    `name` is set once it is known; `take_arguments` gives the argument text that came since the last call,
    exactly as the model wrote it. `done` when the object has ended, `failed` when it is none. `raw` is all text taken.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self.has_arguments = False
        self.raw: list[str] = []
        self._state = "start"
        self._key = ""
        self._value = _Value()
        self._streaming = False
        self._pending: list[str] = []

    def take(self, character: str) -> None:
        """Advance by one character."""
        self.raw.append(character)
        if self._state in ("value", "key"):
            self._in_value(character)
        elif character not in _SPACE:
            self._between(character)

    def _between(self, character: str) -> None:
        """Punctuation around keys and values."""
        if self._state == "start" and character == "{":
            self._state = "before_key"
        elif self._state == "before_key" and character == '"':
            self._state, self._value = "key", _Value(['"'], in_string=True)
        elif self._state == "colon" and character == ":":
            self._state, self._value = "before_value", _Value()
        elif self._state == "before_value":
            self._state = "value"
            self._in_value(character)
        elif self._state == "after_value" and character == ",":
            self._state = "before_key"
        elif self._state in ("after_value", "before_key") and character == "}":
            self._finish()
        else:
            self.failed = True

    def _in_value(self, character: str) -> None:
        value = self._value
        if self._state == "key":
            value.take(character)
            if not value.in_string:
                self._key = str(_loads(value.text))
                self._state = "colon"
            return
        ended = value.take(character)
        if ended:
            self._end_value()
            self._state = "after_value"
            if character == ",":
                self._state = "before_key"
            elif character == "}":
                self._finish()
            else:
                self.failed = True
        elif self._key in _ARGUMENT_KEYS and value.parts[0] == "{":
            self._stream_value(character)

    def _stream_value(self, character: str) -> None:
        """Pass on an object of arguments as it grows; space after it is left out."""
        if self.has_arguments and not self._streaming:
            return  # a second member of arguments: the first one counts
        self.has_arguments = self._streaming = True
        if self._value.depth > 0 or character == "}":
            self._pending.append(character)

    def _end_value(self) -> None:
        text = self._value.text
        self._streaming = False
        if self._key in _NAME_KEYS and self.name is None:
            name = _loads(text)
            if isinstance(name, str) and name:
                self.name = name
            else:
                self.failed = True
        elif self._key in _ARGUMENT_KEYS and not self.has_arguments:
            self.has_arguments = True
            inner = _loads(text)
            self._pending.append(inner if isinstance(inner, str) and inner.strip() else "{}" if not inner else text)

    def _finish(self) -> None:
        self.done = True
        if self.name is None:
            self.failed = True
        elif not self.has_arguments:
            self.has_arguments = True
            self._pending.append("{}")

    def take_arguments(self) -> str:
        """New argument text; nothing before the name is known."""
        if self.name is None or not self._pending:
            return ""
        text = "".join(self._pending)
        self._pending.clear()
        return text


def _loads(text: str) -> object:
    """A JSON value, None when it is broken."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def held_suffix(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class TagScanner:
    """Splits text at the first of some markers; what may be the beginning of one is held back."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self.held = ""

    def push(self, text: str, final: bool) -> tuple[str, str, str]:
        """(text before, marker, rest). Without a marker the last two are empty, and some of the text may be held."""
        text = self.held + text
        self.held = ""
        found = [(position, marker) for marker in self._markers if (position := text.find(marker)) >= 0]
        if found:
            position, marker = min(found, key=lambda item: (item[0], -len(item[1])))
            return text[:position], marker, text[position + len(marker) :]
        keep = 0 if final else held_suffix(text, self._markers)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], "", ""
