"""POST /v1/messages: the Messages API, so that coding agents can point here.

Owns the translation of its bodies into chats, and of answers into its blocks and events.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.errors import InvalidRequestError, PhloemError, UnsupportedError
from phloem.server.answering import respond
from phloem.server.blocks import Block, Blocks, Change
from phloem.server.body import read_model
from phloem.server.chat_job import ChatJob, chat_body, encode_chat, prepare_chat
from phloem.server.client_names import client_names
from phloem.server.context import caller_of, context_of
from phloem.server.http_errors import anthropic_error, json_response
from phloem.server.protocol import MAX_STOPS, MAX_TOOLS, Body, ChatBody, Objects, StopString
from phloem.server.sse import event
from phloem.types import FinishReason, TextDelta


class MessagesTool(Body):
    """A tool that the client runs. Tools that a server would run have another `type` and are refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessagesToolChoice(Body):
    """Which tool must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model shall think first, where its template knows of that."""

    type: str


class MessagesBody(Body):
    """POST /v1/messages and /v1/messages/count_tokens."""

    model: str | None = None
    messages: Objects
    max_tokens: int | None = None
    system: str | Objects | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: Thinking | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, max_length=256)


async def messages(request: HttpRequest) -> Response:
    """Answer whole or as a stream of events."""
    context = context_of(request)
    context.check_ready()
    body = await read_model(request, MessagesBody, context.config.max_body_bytes)
    if body.max_tokens is None:
        raise InvalidRequestError("max_tokens is missing", param="max_tokens")
    names: dict[str, str] = {}
    with client_names(names):
        chat = await context.in_pool(lambda: to_chat(body, names))
        job = await prepare_chat(context, caller_of(request), chat, id_prefix="msg_")
        view = MessagesView(job)
        return await respond(request, job.generation, view.collect, view.stream() if body.stream else None)


async def count_tokens(request: HttpRequest) -> Response:
    """Tokens of the prompt that a body would make."""
    context = context_of(request)
    body = await read_model(request, MessagesBody, context.config.max_body_bytes)
    context.check_model(body.model)
    names: dict[str, str] = {}
    with client_names(names):
        engine, form = context.engine, context.answer_form
        prompt, _ = await context.in_pool(lambda: encode_chat(engine, form, to_chat(body, names)))
    return json_response({"input_tokens": len(prompt.token_ids)})


def to_chat(body: MessagesBody, names: dict[str, str]) -> ChatBody:
    """The same request as a chat; `names` gets what this API calls its fields. Raises InvalidRequestError."""
    names["stop"] = "stop_sequences"
    names["tool_choice.function"] = "tool_choice"
    for i in range(len(body.tools or ())):
        names |= {f"tools[{i}].function": f"tools[{i}]", f"tools[{i}].function.parameters": f"tools[{i}].input_schema"}
    history: list[dict[str, Any]] = []
    if body.system:
        names["messages[0]"] = "system"
        history.append({"role": "system", "content": _system_text(body.system)})
    for position, message in enumerate(body.messages):
        turn = _Turn(message, f"messages[{position}]", len(history), names)
        history += turn.finish()
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": history,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "cache_salt": body.cache_salt,
        **_tool_fields(body),
    }
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    return chat_body(fields)


def _tool_fields(body: MessagesBody) -> dict[str, Any]:
    tools = []
    for position, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise UnsupportedError(
                f"tools[{position}]: tools that the server runs are not served", param=f"tools[{position}]"
            )
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    fields: dict[str, Any] = {"tools": tools or None}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _system_text(system: str | list[dict[str, Any]]) -> str:
    """The system text; its blocks are joined as paragraphs."""
    if isinstance(system, str):
        return system
    texts = [block.get("text") for block in system]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("system must hold text blocks only", param="system")
    return "\n\n".join(str(text) for text in texts)


class _Turn:
    """One message as chat messages, of which `num_before` stand before it in the chat.

    Results of tools become messages of their own, in order. `names` gets the block that each member came from.
    """

    def __init__(self, message: dict[str, Any], param: str, num_before: int, names: dict[str, str]) -> None:
        self._role, content = message.get("role"), message.get("content")
        self._param = param
        self._num_before = num_before
        self._names = names
        self._parts: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._call_params: list[str] = []
        self._thoughts: list[str] = []
        self._done: list[dict[str, Any]] = []
        if self._role not in ("user", "assistant"):
            got = str(self._role)[:40]
            raise InvalidRequestError(f"{param}.role must be user or assistant, got {got!r}", param=f"{param}.role")
        if not isinstance(content, list):
            self._append(param, {"role": self._role, "content": content})
            return
        for position, block in enumerate(content):
            name = f"{param}.content[{position}]"
            if not isinstance(block, dict):
                raise InvalidRequestError(f"{name} must be an object", param=name)
            self._add(block, name)

    def _append(self, param: str, message: dict[str, Any]) -> str:
        """Add a chat message that came from `param`; its name in the chat."""
        name = f"messages[{self._num_before + len(self._done)}]"
        self._names[name] = param
        self._done.append(message)
        return name

    def _add(self, block: dict[str, Any], param: str) -> None:
        match block.get("type"):
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                self._calls.append({"id": block.get("id"), "type": "function", "function": function})
                self._call_params.append(param)
            case "tool_result":
                if self._parts:
                    self._append(self._param, {"role": self._role, "content": self._parts})
                    self._parts = []
                call_id = block.get("tool_use_id")
                name = self._append(param, {"role": "tool", "content": block.get("content"), "tool_call_id": call_id})
                self._names[f"{name}.tool_call_id"] = f"{param}.tool_use_id"
            case "thinking":
                self._thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case "text" if isinstance(block.get("text"), str):
                self._parts.append({"type": "text", "text": block["text"]})
            case kind:
                raise UnsupportedError(f"{param}: blocks of type {str(kind)[:40]!r} are not served", param=param)

    def finish(self) -> list[dict[str, Any]]:
        """The messages."""
        if self._parts or self._calls or not self._done:
            message: dict[str, Any] = {"role": self._role, "content": self._parts or None}
            if self._calls:
                message["tool_calls"] = self._calls
            if self._thoughts:
                message["reasoning_content"] = "\n".join(self._thoughts)
            name = self._append(self._param, message)
            for number, param in enumerate(self._call_params):
                self._names[f"{name}.tool_calls[{number}].function"] = param
                self._names[f"{name}.tool_calls[{number}].function.arguments"] = f"{param}.input"
        return self._done


@dataclass(slots=True)
class MessagesView:
    """The JSON of one request of this API."""

    job: ChatJob
    blocks: Blocks = field(default_factory=Blocks)

    async def collect(self) -> dict[str, Any]:
        """Read the answer to its end."""
        parser = self.job.make_parser()
        last: TextDelta | None = None
        async with aclosing(self.job.generation.deltas()) as items:
            async for _, delta in items:
                self.blocks.add(self.job.read(parser, delta))
                last = delta
        assert last is not None
        return {**self._envelope(), "content": [_whole(block) for block in self.blocks.all], **self._end(last)} | {
            "usage": self._usage()
        }

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "type": "message",
            "role": "assistant",
            "model": self.job.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self, delta: TextDelta) -> dict[str, Any]:
        stop_sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self.blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stop_sequence is not None else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}

    def _usage(self) -> dict[str, Any]:
        """Cached tokens are counted apart from `input_tokens`, as this API does."""
        usage = self.job.generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events with names. An error after the start is an `error` event, then the stream ends."""
        parser = self.job.make_parser()
        started = False
        try:
            async with aclosing(self.job.generation.deltas()) as items:
                async for _, delta in items:
                    if not started:
                        started = True
                        yield _named("message_start", message=self._envelope())
                    final = delta.finish_reason is not None
                    for change in self.blocks.add(self.job.read(parser, delta)):
                        yield _change(*change)
                    if final:
                        for change in self.blocks.close():
                            yield _change(*change)
                        yield _named("message_delta", delta=self._end(delta), usage=self._usage())
            yield _named("message_stop")
        except PhloemError as error:
            yield event(to_json(anthropic_error(error)), "error")


def _named(name: str, **members: Any) -> bytes:
    return event(to_json({"type": name, **members}), name)


def _change(change: Change, block: Block, text: str) -> bytes:
    """The event of a change of a block."""
    if change == "open":
        return _named("content_block_start", index=block.index, content_block=_empty(block))
    if change == "close":
        return _named("content_block_stop", index=block.index)
    delta = {
        "text": {"type": "text_delta", "text": text},
        "reasoning": {"type": "thinking_delta", "thinking": text},
        "call": {"type": "input_json_delta", "partial_json": text},
    }[block.kind]
    return _named("content_block_delta", index=block.index, delta=delta)


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, Any]:
    result = _empty(block)
    if block.kind == "call":
        result["input"] = _loads(block.text)
    else:
        result["text" if block.kind == "text" else "thinking"] = block.text
    return result


def _loads(text: str) -> Any:
    """The arguments of a call; those of one that was cut off by a limit may be no JSON and are left out."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}
