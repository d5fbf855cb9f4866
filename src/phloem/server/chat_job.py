"""From a chat body to a job: prompt, sampling, grammar and parser decided, nothing queued yet.

Owns what the fields of a chat mean together. Shared by every route that holds conversations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from phloem.errors import InvalidRequestError, UnsupportedError
from phloem.server.client_names import Names, client_names
from phloem.server.context import Caller, ServerContext
from phloem.server.engine_api import Engine, Tokenizer
from phloem.server.events import AnswerParser, Event, Reasoning
from phloem.server.generation import Generation
from phloem.server.http_errors import from_validation
from phloem.server.messages import (
    Conversation,
    check_template_kwargs,
    encode_conversation,
    normalise,
    tools_as_json,
)
from phloem.server.prompts import Prompt
from phloem.server.protocol import ChatBody
from phloem.server.reasoning import opens_thoughts
from phloem.server.requests import make_request
from phloem.server.sampling import CONSTRAINED, chat_max_tokens, num_choices, sampling_params
from phloem.server.structured import AnswerGrammar, answer_grammar
from phloem.server.tools import AnswerForm, ToolPlan, calls_or, forced_grammar, plan_tools, with_instructions
from phloem.types import TextDelta


@dataclass(slots=True)
class ChatJob:
    """One conversation to answer."""

    body: ChatBody
    id: str
    model: str
    tokenizer: Tokenizer
    generation: Generation
    make_parser: Callable[[], AnswerParser]

    def read(self, parser: AnswerParser, delta: TextDelta) -> list[Event]:
        """The events of a delta; tokens that were thoughts are counted as such."""
        events = parser.push(delta.text, delta.finish_reason is not None)
        if events and all(isinstance(item, Reasoning) for item in events):
            usage = self.generation.usage
            usage.reasoning_tokens = (usage.reasoning_tokens or 0) + len(delta.token_ids)
        return events


async def prepare_chat(
    context: ServerContext, caller: Caller, body: ChatBody, *, id_prefix: str = "chatcmpl-"
) -> ChatJob:
    """Check everything, compile the grammar, render and tokenise. Raises InvalidRequestError and its kinds."""
    names = _names(body)
    with client_names(names):
        return await _prepare(context, caller, body, id_prefix, names)


def _names(body: ChatBody) -> Names:
    """What this body calls fields that sampling and engine know by other names."""
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return names


async def _prepare(context: ServerContext, caller: Caller, body: ChatBody, id_prefix: str, names: Names) -> ChatJob:
    model = context.check_model(body.model)
    n = num_choices(body)
    check_chat_fields(body)
    engine, form = context.engine, context.answer_form

    def encode() -> tuple[Prompt, ToolPlan, AnswerGrammar | None]:
        prompt, plan = encode_chat(engine, form, body)
        return prompt, plan, chat_grammar(body, plan, engine.tokenizer)

    prompt, plan, grammar = await context.in_pool(encode)
    masker = await context.maskers(grammar, n)
    params = sampling_params(
        body,
        max_tokens=chat_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **(CONSTRAINED if masker else {}),
        **({"skip_special_tokens": False} if plan.keeps_special_tokens else {}),
    )
    job_id = id_prefix + uuid4().hex
    request = make_request(
        context,
        caller,
        job_id,
        prompt.token_ids,
        params,
        n=n,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        masker=masker,
    )
    inside = opens_thoughts(prompt.text or "") and not body.continue_final_message
    separate = body.separate_reasoning is not False and not masker

    def make_parser() -> AnswerParser:
        return plan.make_parser(inside, separate)

    generation = Generation(context, job_id, [request], names)
    return ChatJob(body, job_id, model, engine.tokenizer, generation, make_parser)


def chat_grammar(body: ChatBody, plan: ToolPlan, tokenizer: Tokenizer) -> AnswerGrammar | None:
    """The grammar of an answer: forced calls, or the form that the request asks for."""
    asked = answer_grammar(body)
    if plan.forced:
        if asked is not None:
            raise InvalidRequestError(
                f"{asked.param} cannot shape an answer that must be a tool call", param=asked.param
            )
        return forced_grammar(plan, tokenizer)
    if asked is not None and plan.active:
        return calls_or(asked, plan, tokenizer)
    return asked


def chat_body(fields: dict[str, Any]) -> ChatBody:
    """A chat body from the fields of another API. Raises InvalidRequestError naming the field."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def encode_chat(engine: Engine, form: AnswerForm, body: ChatBody) -> tuple[Prompt, ToolPlan]:
    """The prompt that a body makes. Blocks."""
    plan = plan_tools(body, form)
    return encode_conversation(engine, conversation_of(body, plan)), plan


def check_chat_fields(body: ChatBody) -> None:
    """Fields that contradict each other or ask for what is not served."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.modalities and set(body.modalities) != {"text"}:
        raise UnsupportedError("modalities: this server answers in text only", param="modalities")


def conversation_of(body: ChatBody, plan: ToolPlan) -> Conversation:
    """The conversation of a body, checked."""
    kwargs = check_template_kwargs(body.chat_template_kwargs, body.chat_template)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    messages = normalise(body.messages)
    tools = tools_as_json(body.tools) if plan.active else None
    if tools and not plan.form.shows_tools:
        messages, tools = with_instructions(messages, tools), None
    return Conversation(
        messages=messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=kwargs,
    )
