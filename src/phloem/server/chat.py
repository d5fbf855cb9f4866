"""POST /v1/chat/completions: answers to conversations, with tools, reasoning and structured output.

Owns the JSON of this route. How a model writes tool calls is the parsers' business.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.errors import PhloemError
from phloem.server.answering import respond
from phloem.server.body import read_model
from phloem.server.chat_job import ChatJob, prepare_chat
from phloem.server.context import caller_of, context_of
from phloem.server.events import CallArguments, CallStart, Content, Event, Message, Reasoning
from phloem.server.generation import Answer, extend
from phloem.server.http_errors import error_body
from phloem.server.logprobs import chat_logprobs
from phloem.server.protocol import ChatBody
from phloem.server.sse import DONE, event
from phloem.types import FinishReason, TextDelta


async def chat_completions(request: HttpRequest) -> Response:
    """Answer whole or as a stream."""
    context = context_of(request)
    context.check_ready()
    body = await read_model(request, ChatBody, context.config.max_body_bytes)
    job = await prepare_chat(context, caller_of(request), body)
    view = ChatView(job)
    return await respond(request, job.generation, view.collect, view.stream() if body.stream else None)


def finish_name(reason: FinishReason, has_calls: bool) -> str:
    """finish_reason of a choice: an answer that ends by itself after a call says tool_calls."""
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value


def tool_calls_json(message: Message) -> list[dict[str, Any]]:
    """The `tool_calls` member of a message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]


@dataclass(slots=True)
class ChatView:
    """The JSON of one chat request, whole or in chunks."""

    job: ChatJob
    created: int = field(default_factory=lambda: int(time.time()))

    async def collect(self) -> dict[str, Any]:
        """Read the answer to its end."""
        job = self.job
        num_choices = job.generation.num_choices
        parsers = [job.make_parser() for _ in range(num_choices)]
        answers = [Answer() for _ in range(num_choices)]
        messages = [Message() for _ in range(num_choices)]
        async with aclosing(job.generation.deltas()) as items:
            async for choice, delta in items:
                extend(answers[choice], delta)
                for item in job.read(parsers[choice], delta):
                    messages[choice].add(item)
        choices = [self._choice(i, answers[i], messages[i]) for i in range(num_choices)]
        return {**self._envelope("chat.completion", choices), "usage": job.generation.usage.as_openai()}

    def _choice(self, index: int, answer: Answer, message: Message) -> dict[str, Any]:
        assert answer.finish_reason is not None
        calls = tool_calls_json(message)
        body: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not calls else None,
            "refusal": None,
        }
        if message.reasoning:
            body["reasoning_content"] = message.reasoning
        if calls:
            body["tool_calls"] = calls
        return {
            "index": index,
            "message": body,
            "logprobs": self._logprobs(answer),
            "finish_reason": finish_name(answer.finish_reason, bool(calls)),
            "stop_reason": answer.stop_reason,
            **({"token_ids": answer.token_ids} if self.job.body.return_token_ids else {}),
        }

    def _logprobs(self, news: Answer | TextDelta) -> dict[str, Any] | None:
        if not self.job.body.logprobs:
            return None
        return chat_logprobs(self.job.tokenizer, news.logprobs or (), self.job.body.top_logprobs or 0)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error after the start is an event, then the stream ends."""
        job = self.job
        options = job.body.stream_options
        wants_usage = bool(options and options.include_usage)
        extra: dict[str, Any] = {"usage": None} if wants_usage else {}
        parsers = [job.make_parser() for _ in range(job.generation.num_choices)]
        started = [False] * job.generation.num_choices
        has_calls = [False] * job.generation.num_choices
        try:
            async with aclosing(job.generation.deltas()) as items:
                async for choice, delta in items:
                    events = job.read(parsers[choice], delta)
                    has_calls[choice] |= any(isinstance(item, CallStart) for item in events)
                    for chunk in self._chunks(choice, delta, events, not started[choice], has_calls[choice]):
                        yield event(to_json({**self._envelope("chat.completion.chunk", [chunk]), **extra}))
                    started[choice] = True
            if wants_usage:
                usage = job.generation.usage.as_openai()
                yield event(to_json({**self._envelope("chat.completion.chunk", []), "usage": usage}))
        except PhloemError as error:
            yield event(to_json({"error": error_body(error)}))
        yield DONE

    def _chunks(
        self, choice: int, delta: TextDelta, events: list[Event], first: bool, has_calls: bool
    ) -> list[dict[str, Any]]:
        """The choices to send for one delta: the role first, one chunk for each event, the reason last."""
        deltas: list[dict[str, Any]] = [_event_json(item) for item in events]
        logprobs = self._logprobs(delta) if delta.logprobs else None
        shows_ids = bool(self.job.body.return_token_ids and delta.token_ids)
        if (logprobs is not None or shows_ids) and not deltas:
            deltas.append({"content": ""})
        if first:
            role = {"role": "assistant", "content": "" if not events or isinstance(events[0], Content) else None}
            deltas.insert(0, role)
        chunks: list[dict[str, Any]] = [
            {"index": choice, "delta": item, "logprobs": None, "finish_reason": None} for item in deltas
        ]
        if logprobs is not None:
            chunks[-1]["logprobs"] = logprobs
        if shows_ids:
            chunks[-1]["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            chunks.append(
                {
                    "index": choice,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": finish_name(delta.finish_reason, has_calls),
                    "stop_reason": delta.stop_reason,
                }
            )
        return chunks


def _event_json(item: Event) -> dict[str, Any]:
    """The `delta` member of a chunk."""
    match item:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
