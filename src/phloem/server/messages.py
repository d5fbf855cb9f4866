"""Chat messages as clients send them, checked and brought into the form that chat templates expect.

Owns roles, content parts and the way from a conversation to prompt ids. Must not know the template's language: the
tokenizer renders. Nothing is ever fetched: parts that are not text are refused by kind, whatever they point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phloem.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from phloem.server.engine_api import Engine
from phloem.server.prompts import Prompt, check_length
from phloem.server.protocol import Tool

MAX_TEMPLATE_KWARGS = 64

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking")
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "tokenizer", "tokenize", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "documents", "return_tensors", "return_dict", "padding"}
    | {"truncation", "max_length", "conversation", "self"}
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation, ready to render."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def normalise(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and reduce them to what templates know. Raises InvalidRequestError naming the place."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _message(message: dict[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequestError(f"{param}.role must be one of {known}, got {str(role)[:40]!r}", param=f"{param}.role")
    plain: dict[str, Any] = {"role": _ROLES[role], "content": _content(message.get("content"), f"{param}.content")}
    for name in _KEPT:
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidRequestError(f"{param}.{name} must be a text", param=f"{param}.{name}")
            plain[name] = value
    calls = message.get("tool_calls")
    if calls:
        if plain["role"] != "assistant":
            raise InvalidRequestError(f"{param}.tool_calls belongs to assistant messages", param=f"{param}.tool_calls")
        plain["tool_calls"] = _tool_calls(calls, f"{param}.tool_calls")
    return plain


def _content(content: Any, param: str) -> str:
    """Text of a message; the parts of a list are joined as lines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{param} must be a text or a list of parts", param=param)
    return "\n".join(_part(part, f"{param}[{position}]") for position, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise InvalidRequestError(f"{param}.text must be a text", param=f"{param}.text")
    if isinstance(kind, str):
        raise UnsupportedError(
            f"{param}: content of type {kind[:40]!r} is not served: the model reads text only", param=param
        )
    raise InvalidRequestError(f"{param} must be an object with a type", param=param)


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{param} must be a list", param=param)
    checked = []
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            name = f"{param}[{position}].function.name"
            raise InvalidRequestError(f"{name} must be a text", param=name)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict | None):
            name = f"{param}[{position}].function.arguments"
            raise InvalidRequestError(f"{name} must be a JSON object as text", param=name)
        call_id = call.get("id")
        checked.append(
            {
                "id": call_id if isinstance(call_id, str) else "",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return checked


def check_template_kwargs(kwargs: dict[str, Any] | None, chat_template: Any) -> dict[str, Any]:
    """Variables that a client may hand to the template. The template itself is the server's alone."""
    if chat_template is not None:
        raise InvalidRequestError("chat_template is set by the server, not by requests", param="chat_template")
    if len(kwargs or {}) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(
            f"chat_template_kwargs may hold at most {MAX_TEMPLATE_KWARGS} variables", param="chat_template_kwargs"
        )
    for name in kwargs or {}:
        if name in _RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequestError(
                f"chat_template_kwargs: {name[:60]!r} is reserved or no variable name", param="chat_template_kwargs"
            )
    return dict(kwargs or {})


def tools_as_json(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates read them: absent members left out."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def encode_conversation(engine: Engine, conversation: Conversation) -> Prompt:
    """Render and tokenise. Blocks; raises InvalidRequestError or ContextLengthError."""
    for message in conversation.messages:
        check_length(engine, message["content"])
    text = render(engine, conversation)
    check_length(engine, text)
    ids = engine.tokenizer.encode(text, False)
    if not ids:
        raise InvalidRequestError("the conversation renders to an empty prompt", param="messages")
    if len(ids) >= engine.max_model_len:
        raise ContextLengthError(
            f"the messages have {len(ids)} tokens, and the context length is {engine.max_model_len} tokens, of which "
            "at least one is needed for the answer; shorten the messages",
            param="messages",
        )
    return Prompt(np.array(ids, dtype=np.int32), text)


def render(engine: Engine, conversation: Conversation) -> str:
    """The prompt text; with `continue_final_message` it ends inside the last message."""
    keep_open = conversation.continue_final_message
    text = engine.tokenizer.render_chat(
        conversation.messages,
        conversation.tools,
        conversation.add_generation_prompt and not keep_open,
        **conversation.template_kwargs,
    )
    if not keep_open:
        return text
    last = conversation.messages[-1]
    if last["role"] != "assistant" or not last["content"].strip():
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant with content", param="continue_final_message"
        )
    content = last["content"] if last["content"] in text else last["content"].strip()
    position = text.rfind(content)
    if position < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template changes the last message", param="continue_final_message"
        )
    return text[: position + len(content)]
