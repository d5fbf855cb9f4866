"""Chat turns piece by piece: what the model's template writes before and after each turn.

Owns the turns so far. Must not know tokens: the state encodes what comes from here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from phloem.errors import InvalidRequestError
from phloem.programs.backend import Message

Render = Callable[[list[Message], bool], Awaitable[str]]

_PROBE = "turn-text-probe"
_PAST_ANSWER = "..."


@dataclass(slots=True)
class Chat:
    """The turns of a conversation, closed and open.

    The template is asked for the chat with and without the new turn, and the difference is what the turn adds. So the
    text before a turn is never rendered again, and what the model generated stays as it was drawn, token by token.
    Past answers are shown to the template as a placeholder: some templates cut them, which must not touch ours.
    """

    messages: list[Message] = field(default_factory=list)
    role: str = ""
    content: str = ""
    tail: str = ""

    def copy(self) -> Chat:
        """An equal one that goes its own way."""
        return replace(self, messages=list(self.messages))

    def add(self, text: str) -> None:
        """Text of the open turn, or text outside turns, which the template never sees."""
        if self.role:
            self.content += text

    async def open(self, role: str, render: Render) -> str:
        """Begin a turn: the text before its content. Raises InvalidRequestError where the template has no such turn."""
        before = await render(self.messages, False) if self.messages else ""
        after = await render([*self.messages, {"role": role, "content": _PROBE}], False)
        head, found, tail = after.removeprefix(before).partition(_PROBE)
        if not after.startswith(before) or not found:
            raise InvalidRequestError(
                f"this model's chat template rewrites earlier turns when a {role!r} turn follows "
                f"{self.messages[-1]['role']!r}, so turns cannot be added one by one; write the prompt as plain text",
                param="messages",
            )
        if role == "assistant" and self.messages:
            prompted = await render(self.messages, True)
            if prompted.startswith(before):
                head = prompted.removeprefix(before)
        self.role, self.content, self.tail = role, "", tail
        return head

    def close(self) -> str:
        """End the open turn: the text after its content."""
        content = _PAST_ANSWER if self.role == "assistant" else self.content
        self.messages.append({"role": self.role, "content": content})
        self.role = ""
        return self.tail
