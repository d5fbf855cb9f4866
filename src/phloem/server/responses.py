"""POST /v1/responses: the Responses API: text, tools, reasoning, streaming, previous_response_id.

Owns the translation of its bodies into chats. The JSON of its answers is in `response_items`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.errors import InvalidRequestError, NotFoundError, PhloemError, UnsupportedError
from phloem.server.answering import respond
from phloem.server.body import read_model
from phloem.server.chat_job import ChatJob, chat_body, prepare_chat
from phloem.server.client_names import client_names
from phloem.server.context import ServerContext, caller_of, context_of
from phloem.server.http_errors import json_response
from phloem.server.protocol import MAX_TOOLS, Body, ChatBody, Objects
from phloem.server.response_items import ResponseView
from phloem.server.response_store import StoredResponse
from phloem.types import TextDelta


class TextOptions(Body):
    """The `text` member."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    """The `reasoning` member."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None


async def create(request: HttpRequest) -> Response:
    """Answer whole or as a stream of events."""
    context = context_of(request)
    context.check_ready()
    caller = caller_of(request)
    body = await read_model(request, ResponsesBody, context.config.max_body_bytes)
    if body.background:
        raise UnsupportedError("background responses are not served", param="background")
    earlier = _earlier(context, body, caller.key_id)
    items = Items(len(earlier) + bool(body.instructions))
    items.add_all(body.input)
    history = earlier + items.messages
    with client_names(items.names | _names(body)):
        job = await prepare_chat(context, caller, to_chat(body, history), id_prefix="resp_")
        view = ResponseView(job, body.model_dump(exclude={"input"}, exclude_none=True))

        def finish(delta: TextDelta) -> dict[str, Any]:
            answer = view.finish(delta)
            if body.store is not False:
                conversation = [*history, view.message()]
                size = len(to_json(conversation)) + len(to_json(answer))
                context.stored.put(job.id, StoredResponse(caller.key_id, conversation, answer, size))
            return answer

        events = _stream(job, view, finish) if body.stream else None
        return await respond(request, job.generation, lambda: _collect(job, view, finish), events)


def _names(body: ResponsesBody) -> dict[str, str]:
    """What this API calls the fields of the chat that a body becomes."""
    return {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function": "tool_choice",
        **{f"tools[{i}].function": f"tools[{i}]" for i in range(len(body.tools or ()))},
    }


async def retrieve(request: HttpRequest) -> Response:
    """A stored answer."""
    response_id = request.path_params["response_id"]
    stored = context_of(request).stored.get(response_id, caller_of(request).key_id)
    if stored is None:
        raise _unknown(response_id, "response_id")
    return json_response(stored.answer)


async def delete(request: HttpRequest) -> Response:
    """Forget a stored answer."""
    response_id = request.path_params["response_id"]
    if not context_of(request).stored.delete(response_id, caller_of(request).key_id):
        raise _unknown(response_id, "response_id")
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _unknown(response_id: str, param: str) -> NotFoundError:
    return NotFoundError(f"no stored response {response_id[:80]!r}: it may be too old, or not yours", param=param)


def _earlier(context: ServerContext, body: ResponsesBody, owner: str) -> list[dict[str, Any]]:
    """Messages of the conversation that this request goes on with."""
    if body.previous_response_id is None:
        return []
    stored = context.stored.get(body.previous_response_id, owner)
    if stored is None:
        raise _unknown(body.previous_response_id, "previous_response_id")
    return stored.messages


async def _collect(job: ChatJob, view: ResponseView, finish: Any) -> dict[str, Any]:
    parser = job.make_parser()
    last: TextDelta | None = None
    async with aclosing(job.generation.deltas()) as items:
        async for _, delta in items:
            view.blocks.add(job.read(parser, delta))
            last = delta
    assert last is not None
    result: dict[str, Any] = finish(last)
    return result


async def _stream(job: ChatJob, view: ResponseView, finish: Any) -> AsyncGenerator[bytes, None]:
    """Server-sent events with names and sequence numbers. An error after the start ends as response.failed."""
    parser = job.make_parser()
    yield view.named("response.created", response=view.envelope("in_progress"))
    yield view.named("response.in_progress", response=view.envelope("in_progress"))
    try:
        async with aclosing(job.generation.deltas()) as items:
            async for _, delta in items:
                final = delta.finish_reason is not None
                changes = view.blocks.add(job.read(parser, delta))
                for change in changes + (view.blocks.close() if final else []):
                    for data in view.change(*change):
                        yield data
                if final:
                    answer = finish(delta)
                    yield view.named(f"response.{answer['status']}", response=answer)
    except PhloemError as error:
        failed = {**view.envelope("failed"), "error": {"code": error.code, "message": error.message}}
        yield view.named("response.failed", response=failed)


def to_chat(body: ResponsesBody, history: list[dict[str, Any]]) -> ChatBody:
    """The same request as a chat. Raises InvalidRequestError naming the field."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidRequestError("max_output_tokens must be at least 1", param="max_output_tokens")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": instructions + history,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _format(body.text),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    return chat_body(fields)


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise UnsupportedError(f"{param}: tools of type {kind!r} are not served, functions are", param=param)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: TextOptions | None) -> Any:
    form = text.format if text else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


@dataclass(slots=True)
class Items:
    """Collects input items as chat messages, of which `num_before` stand before them in the chat.

    `names` says of each message and its members which item they came from.
    """

    num_before: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def add_all(self, items: str | list[dict[str, Any]]) -> None:
        """Add the `input` of a body. Raises UnsupportedError naming the item."""
        if isinstance(items, str):
            self._append("input", {"role": "user", "content": items})
            self.names[f"{self._last_name}.content"] = "input"
            return
        for position, item in enumerate(items):
            self._add(item, f"input[{position}]")

    @property
    def _last_name(self) -> str:
        return f"messages[{self.num_before + len(self.messages) - 1}]"

    def _append(self, param: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.names[self._last_name] = param

    def _add(self, item: dict[str, Any], param: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._add_message(item, param)
            case "function_call":
                self._add_call(item, param)
            case "function_call_output":
                output, call_id = item.get("output"), item.get("call_id")
                self._append(param, {"role": "tool", "content": output, "tool_call_id": call_id})
                self.names[f"{self._last_name}.content"] = f"{param}.output"
                self.names[f"{self._last_name}.tool_call_id"] = f"{param}.call_id"
            case "reasoning":
                texts = [str(part.get("text", "")) for part in item.get("content") or () if isinstance(part, dict)]
                if texts:
                    thoughts = "\n".join(texts)
                    self._append(param, {"role": "assistant", "content": None, "reasoning_content": thoughts})
            case kind:
                raise UnsupportedError(f"{param}: items of type {str(kind)[:40]!r} are not served", param=param)

    def _add_message(self, item: dict[str, Any], param: str) -> None:
        """Add a message; what the assistant said after thinking belongs to the turn of its thoughts."""
        last = self.messages[-1] if self.messages else {}
        if item.get("role") == "assistant" and "reasoning_content" in last and last["content"] is None:
            last["content"] = item.get("content")
            self.names[f"{self._last_name}.content"] = f"{param}.content"
        else:
            self._append(param, {"role": item.get("role"), "content": item.get("content")})

    def _add_call(self, item: dict[str, Any], param: str) -> None:
        """Add a call; calls that follow each other, or a text, belong to one turn of the assistant."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._append(param, {"role": "assistant", "content": None})
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.names[f"{self._last_name}.tool_calls[{len(calls)}].function"] = param
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})
