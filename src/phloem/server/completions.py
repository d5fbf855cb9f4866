"""POST /v1/completions: plain continuation of one or many prompts.

Owns the JSON of this route.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.errors import InvalidRequestError, PhloemError, UnsupportedError
from phloem.server.answering import respond
from phloem.server.body import read_model
from phloem.server.context import Caller, ServerContext, caller_of, context_of
from phloem.server.generation import Answer, Generation
from phloem.server.http_errors import error_body
from phloem.server.logprobs import CompletionLogprobs
from phloem.server.prompts import MAX_PROMPTS, Prompt, encode_prompts, split_prompts
from phloem.server.protocol import CompletionBody
from phloem.server.requests import make_request
from phloem.server.sampling import CONSTRAINED, completion_max_tokens, num_choices, sampling_params
from phloem.server.sse import DONE, event
from phloem.server.structured import answer_grammar
from phloem.types import TextDelta, TokenLogprob


@dataclass(slots=True)
class CompletionJob:
    """One request of this route while it runs."""

    context: ServerContext
    body: CompletionBody
    model: str
    prompts: list[Prompt]
    n: int
    generation: Generation
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def completions(request: HttpRequest) -> Response:
    """Answer whole or as a stream."""
    context = context_of(request)
    context.check_ready()
    body = await read_model(request, CompletionBody, context.config.max_body_bytes)
    job = await prepare(context, caller_of(request), body)
    return await respond(request, job.generation, lambda: collect(job), stream(job) if body.stream else None)


async def prepare(context: ServerContext, caller: Caller, body: CompletionBody) -> CompletionJob:
    """Check everything and tokenise; nothing is queued yet."""
    model = context.check_model(body.model)
    if body.suffix:
        raise UnsupportedError("suffix is not served: the model continues text, it does not fill gaps", param="suffix")
    if body.prompt is None:
        raise InvalidRequestError("prompt is missing", param="prompt")
    n = num_choices(body)
    prompts = split_prompts(body.prompt)
    if len(prompts) * n > MAX_PROMPTS:
        raise InvalidRequestError(
            f"n times the number of prompts may be at most {MAX_PROMPTS}, got {len(prompts) * n}", param="n"
        )
    masker = await context.maskers(answer_grammar(body), n * len(prompts))
    params = sampling_params(
        body,
        max_tokens=completion_max_tokens(body),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        **(CONSTRAINED if masker else {}),
    )
    encoded = await encode_prompts(context, prompts, add_special=body.add_special_tokens is not False)
    job_id = f"cmpl-{uuid4().hex}"
    requests = [
        make_request(
            context,
            caller,
            f"{job_id}-{position}" if len(encoded) > 1 else job_id,
            prompt.token_ids,
            params,
            n=n,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            masker=masker[position * n : (position + 1) * n],
            score_from=1 if body.echo and body.logprobs is not None else 0,
        )
        for position, prompt in enumerate(encoded)
    ]
    return CompletionJob(context, body, model, encoded, n, Generation(context, job_id, requests), job_id)


def _prompt_entries(prompt: Prompt, scored: list[TokenLogprob | None]) -> list[TokenLogprob | None]:
    """Scores of all prompt tokens; the first ones, which have nothing before them, have none."""
    missing: list[TokenLogprob | None] = [None] * (len(prompt.token_ids) - len(scored))
    return missing + scored


def _choice(job: CompletionJob, choice: int, answer: Answer) -> dict[str, Any]:
    body, tokenizer, prompt = job.body, job.context.engine.tokenizer, job.prompt_of(choice)
    logprobs = None
    if body.logprobs is not None:
        entries = [*(_prompt_entries(prompt, answer.prompt_logprobs) if body.echo else ()), *answer.logprobs]
        logprobs = CompletionLogprobs(tokenizer, body.logprobs).add(entries, int(prompt.token_ids[0]))
    result = {
        "index": choice,
        "text": (prompt.as_text(tokenizer) if body.echo else "") + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if body.return_token_ids:
        result |= {"prompt_token_ids": prompt.token_ids.tolist(), "token_ids": answer.token_ids}
    return result


class _ChoiceStream:
    """Chunks of one choice: the echoed prompt goes out with its first news."""

    def __init__(self, job: CompletionJob, choice: int) -> None:
        self._job = job
        self._choice = choice
        self._prompt = job.prompt_of(choice)
        tokenizer = job.context.engine.tokenizer
        self._echo = self._prompt.as_text(tokenizer) if job.body.echo else ""
        self._scores: list[TokenLogprob | None] = []
        num_top = job.body.logprobs
        self._logprobs = None if num_top is None else CompletionLogprobs(tokenizer, num_top)
        self._owes_scores = bool(job.body.echo)

    def chunk(self, delta: TextDelta) -> dict[str, Any] | None:
        """A choice of a chunk; None where there is nothing to say."""
        self._scores += delta.prompt_logprobs or ()
        text, self._echo = self._echo + delta.text, ""
        finish = delta.finish_reason
        logprobs = None
        if self._logprobs is not None:
            entries: list[TokenLogprob | None] = list(delta.logprobs or ())
            if self._owes_scores and (entries or finish):
                entries = _prompt_entries(self._prompt, self._scores) + entries
                self._owes_scores = False
            logprobs = self._logprobs.add(entries, int(self._prompt.token_ids[0])) if entries else None
        shows_ids = bool(self._job.body.return_token_ids and delta.token_ids)
        if not (text or logprobs or finish or shows_ids):
            return None
        result: dict[str, Any] = {"index": self._choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            result["stop_reason"] = delta.stop_reason
        if shows_ids:
            result["token_ids"] = delta.token_ids
        return result


async def collect(job: CompletionJob) -> dict[str, Any]:
    """Read all choices to their end."""
    choices = [_choice(job, choice, answer) for choice, answer in enumerate(await job.generation.collect())]
    return {**job.envelope(choices), "usage": job.generation.usage.as_openai()}


async def stream(job: CompletionJob) -> AsyncGenerator[bytes, None]:
    """Server-sent events of all choices. An error after the start is an event, then the stream ends."""
    choices = [_ChoiceStream(job, choice) for choice in range(job.generation.num_choices)]
    wants_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    extra = {"usage": None} if wants_usage else {}
    try:
        async with aclosing(job.generation.deltas()) as items:
            async for choice, delta in items:
                chunk = choices[choice].chunk(delta)
                if chunk is not None:
                    yield event(to_json({**job.envelope([chunk]), **extra}))
        if wants_usage:
            yield event(to_json({**job.envelope([]), "usage": job.generation.usage.as_openai()}))
    except PhloemError as error:
        yield event(to_json({"error": error_body(error)}))
    yield DONE
