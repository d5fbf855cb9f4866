"""What an answer is made of once it was read: visible text, reasoning, and tool calls, each growing piece by piece.

Owns the events and how they add up to a message. Must not know any model's way of writing them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; indices count from 0 within one answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, as JSON text; the pieces of one call join to one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


def joined(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind made one."""
    result: list[Event] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", 0))):
        first, *others = group
        if isinstance(first, Content):
            result.append(
                Content("".join([first.text, *(event.text for event in others if isinstance(event, Content))]))
            )
        elif isinstance(first, CallArguments):
            texts = (event.text for event in others if isinstance(event, CallArguments))
            result.append(CallArguments(first.index, "".join([first.text, *texts])))
        else:
            result += [first, *others]
    return result


class AnswerParser(Protocol):
    """Reads one answer as it comes. Joined events do not depend on how the text is cut into pieces."""

    def push(self, text: str, final: bool) -> list[Event]:
        """Take more text; `final` releases what was held back."""


class PlainParser:
    """All text is content."""

    def push(self, text: str, final: bool) -> list[Event]:
        """Pass the text on."""
        return [Content(text)] if text else []


@dataclass(slots=True)
class ToolCall:
    """One whole tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """One whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Let the message grow by one event."""
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(_, call_id, name):
                self.calls.append(ToolCall(call_id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
