"""The JSON of the Responses API: items of an answer and the events by which they grow.

Owns names and numbering of events. Must not know how a body becomes a chat.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from pydantic_core import to_json

from phloem.server.blocks import Block, Blocks, Change
from phloem.server.chat_job import ChatJob
from phloem.server.events import Message, ToolCall
from phloem.server.sse import event
from phloem.types import FinishReason, TextDelta

_ID_PREFIX = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_ECHOED: tuple[tuple[str, Any], ...] = (
    ("instructions", None),
    ("max_output_tokens", None),
    ("metadata", {}),
    ("parallel_tool_calls", True),
    ("previous_response_id", None),
    ("temperature", 1.0),
    ("text", {"format": {"type": "text"}}),
    ("tool_choice", "auto"),
    ("tools", []),
    ("top_p", 1.0),
    ("truncation", "disabled"),
    ("user", None),
    ("store", True),
)


class ResponseView:
    """One answer of this API while it grows. `fields` are those of the request that answers repeat."""

    def __init__(self, job: ChatJob, fields: dict[str, Any]) -> None:
        self.blocks = Blocks()
        self._job = job
        self._fields = fields
        self._created = int(time.time())
        self._sequence = -1
        self._ids: list[str] = []

    def envelope(self, status: str) -> dict[str, Any]:
        """The response object without its output."""
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._job.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "reasoning": {"effort": None, "summary": None} | self._fields.get("reasoning", {}),
            "usage": None,
            **{name: self._fields.get(name, default) for name, default in _ECHOED},
        }

    def finish(self, delta: TextDelta) -> dict[str, Any]:
        """The whole response object, once the last delta came."""
        is_cut = delta.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        usage = self._job.generation.usage
        return {
            **self.envelope(status),
            "output": [self._item(block, status) for block in self.blocks.all],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def message(self) -> dict[str, Any]:
        """The answer as a chat message, for conversations that go on."""
        message = Message()
        for block in self.blocks.all:
            if block.kind == "text":
                message.content += block.text
            elif block.kind == "reasoning":
                message.reasoning += block.text
            else:
                message.calls.append(ToolCall(block.call_id, block.name, block.text))
        plain: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.reasoning:
            plain["reasoning_content"] = message.reasoning
        if message.calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
        return plain

    def named(self, name: str, /, **members: Any) -> bytes:
        """One numbered event."""
        self._sequence += 1
        return event(to_json({"type": name, "sequence_number": self._sequence, **members}), name)

    def _id(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(_ID_PREFIX[self.blocks.all[len(self._ids)].kind] + uuid4().hex)
        return self._ids[block.index]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """An item of `output`; one in progress is still empty."""
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        text = "" if status == "in_progress" else block.text
        if block.kind == "call":
            return item | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
        content = [] if status == "in_progress" else [_part(block, text)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def change(self, change: Change, block: Block, text: str) -> list[bytes]:
        """The events of a change of a block."""
        place = {"item_id": self._id(block), "output_index": block.index}
        inside = place if block.kind == "call" else {**place, "content_index": 0}
        stem = {
            "text": "response.output_text",
            "reasoning": "response.reasoning_text",
            "call": "response.function_call_arguments",
        }[block.kind]
        if change == "grow":
            logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            return [self.named(f"{stem}.delta", **inside, delta=text, **logprobs)]
        if change == "open":
            item = self._item(block, "in_progress")
            events = [self.named("response.output_item.added", output_index=block.index, item=item)]
            if block.kind != "call":
                events.append(self.named("response.content_part.added", **inside, part=_part(block, "")))
            return events
        whole = block.text
        key = "arguments" if block.kind == "call" else "text"
        extra: dict[str, Any] = {}
        if block.kind == "text":
            extra = {"logprobs": []}
        elif block.kind == "call":
            extra = {"name": block.name}
        events = [self.named(f"{stem}.done", **inside, **{key: whole}, **extra)]
        if block.kind != "call":
            events.append(self.named("response.content_part.done", **inside, part=_part(block, whole)))
        item = self._item(block, "completed")
        return [*events, self.named("response.output_item.done", output_index=block.index, item=item)]


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
