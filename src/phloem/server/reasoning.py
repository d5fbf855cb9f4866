"""Splitting what a model thinks from what it says, where it marks its thoughts with <think> and </think>.

Owns the markers. What comes after the thoughts is read by the next parser.
"""

from __future__ import annotations

from phloem.server.events import AnswerParser, Event, Reasoning
from phloem.server.json_calls import TagScanner

_OPEN, _CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"

REASONING_PARSERS = ("think",)


class ReasoningParser:
    """Thoughts first, then the answer. `starts_inside` when the prompt has opened the thoughts already.

    Space around the thoughts is dropped. Markers anywhere but at the beginning are ordinary text.
    """

    def __init__(self, answer: AnswerParser, starts_inside: bool) -> None:
        self._answer = answer
        self._state = "thoughts" if starts_inside else "start"
        self._held = ""
        self._close = TagScanner(_CLOSE)
        self._space = ""
        self._has_thoughts = False

    def push(self, text: str, final: bool) -> list[Event]:
        """See `AnswerParser`."""
        events: list[Event] = []
        if self._state == "start":
            text = self._at_start(text, final)
        if self._state == "thoughts":
            before, marker, text = self._close.push(text, final)
            self._think(before, events)
            if marker:
                self._state = "gap"
        if self._state == "gap":
            text = text.lstrip(_SPACE)
            if text:
                self._state = "answer"
        if self._state == "answer" or final:
            events += self._answer.push(text, final)
        return events

    def _at_start(self, text: str, final: bool) -> str:
        """Decide whether the answer opens with thoughts; holds text back while it may."""
        self._held += text
        start = self._held.lstrip(_SPACE)
        if start.startswith(_OPEN):
            self._state = "thoughts"
            return start[len(_OPEN) :]
        if final or not _OPEN.startswith(start):
            self._state = "answer"
            return self._held
        return ""

    def _think(self, text: str, events: list[Event]) -> None:
        """Pass thoughts on; space waits for more of them."""
        if not self._has_thoughts:
            text = text.lstrip(_SPACE)
        body = text.rstrip(_SPACE)
        if body:
            events.append(Reasoning(self._space + body))
            self._space, self._has_thoughts = "", True
        self._space += text[len(body) :]


def opens_thoughts(prompt: str) -> bool:
    """Whether a rendered prompt ends inside thoughts."""
    return prompt.rstrip(_SPACE).endswith(_OPEN)
