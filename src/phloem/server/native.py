"""POST /generate and its neighbours, as users of SGLang call them.

Owns the JSON of these routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phloem.errors import EngineUnavailableError, InvalidRequestError, PhloemError
from phloem.server.answering import respond
from phloem.server.body import read_model
from phloem.server.client_names import client_names
from phloem.server.context import Caller, ServerContext, caller_of, context_of
from phloem.server.engine_api import Tokenizer
from phloem.server.generation import Answer, Generation, extend
from phloem.server.http_errors import error_body, json_response
from phloem.server.logprobs import finite
from phloem.server.prompts import MAX_PROMPTS, Prompt, encode_prompts, split_prompts
from phloem.server.protocol import Body
from phloem.server.protocol import Generation as GenerationBody
from phloem.server.requests import make_request
from phloem.server.sampling import CONSTRAINED, num_choices, sampling_params
from phloem.server.sse import DONE, event
from phloem.server.structured import answer_grammar
from phloem.types import Request, TokenLogprob

DEFAULT_MAX_NEW_TOKENS = 128
HEALTH_TIMEOUT_S = 20.0


Rid = Annotated[str, Field(min_length=1, max_length=128)]


class NativeSampling(GenerationBody):
    """The `sampling_params` of a request."""

    max_new_tokens: Annotated[int, Field(ge=0)] | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None


class GenerateBody(Body):
    """POST /generate: one prompt or a batch, as text or as ids."""

    text: Any = None
    input_ids: Any = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(max_length=MAX_PROMPTS)] | None = None
    rid: Rid | Annotated[list[Rid], Field(max_length=MAX_PROMPTS)] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: int | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: int | None = None


class AbortBody(Body):
    """POST /abort: one request by its id, or all."""

    rid: str | None = None
    abort_all: bool | None = None


@dataclass(slots=True)
class GenerateJob:
    """One request of this route while it runs. Choices of one prompt stand next to each other."""

    tokenizer: Tokenizer
    generation: Generation
    prompts: list[Prompt]
    ids: list[str]
    is_batch: bool
    num_top: int | None
    score_from: int | None = None
    """First prompt token that `input_token_logprobs` lists; None for none of them."""
    start_s: float = field(default_factory=time.monotonic)

    def result(self, choice: int, answer: Answer) -> dict[str, Any]:
        """The JSON of one choice, finished or not."""
        prompt = self.prompts[choice]
        meta: dict[str, Any] = {
            "id": self.ids[choice],
            "finish_reason": _finish(answer),
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": answer.cached_tokens,
            "e2e_latency": time.monotonic() - self.start_s,
        }
        if self.num_top is not None:
            scored = answer.prompt_logprobs
            ids = [] if self.score_from is None else prompt.token_ids[self.score_from :].tolist()
            first: list[list[Any]] = [[None, ids[0], None]] if ids else []
            meta["input_token_logprobs"] = first + _pairs(scored)
            meta["output_token_logprobs"] = _pairs(answer.logprobs)
            if self.num_top:
                meta["input_top_logprobs"] = ([None] if ids else []) + _tops(scored, self.num_top)
                meta["output_top_logprobs"] = _tops(answer.logprobs, self.num_top)
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def _finish(answer: Answer) -> dict[str, Any] | None:
    """Why a choice ended, in the native form."""
    if answer.finish_reason is None:
        return None
    if answer.finish_reason == "length":
        return {"type": "length", "length": len(answer.token_ids)}
    matched = answer.stop_reason
    if matched is None and answer.token_ids:
        matched = answer.token_ids[-1]
    return {"type": answer.finish_reason.value, "matched": matched}


def _pairs(entries: Sequence[TokenLogprob | None]) -> list[list[Any]]:
    return [[finite(entry.logprob), entry.token_id, None] for entry in entries if entry is not None]


def _tops(entries: Sequence[TokenLogprob | None], num_top: int) -> list[list[list[Any]]]:
    return [
        [[finite(logprob), token_id, None] for token_id, logprob in entry.top[:num_top]]
        for entry in entries
        if entry is not None
    ]


async def generate(request: HttpRequest) -> Response:
    """Continue prompts: text or ids in, text and ids out."""
    context = context_of(request)
    context.check_ready()
    body = await read_model(request, GenerateBody, context.config.max_body_bytes)
    job = await prepare_generate(context, caller_of(request), body)
    return await respond(request, job.generation, lambda: _collect(job), _stream(job) if body.stream else None)


async def prepare_generate(context: ServerContext, caller: Caller, body: GenerateBody) -> GenerateJob:
    """Check everything and tokenise; nothing is queued yet."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("send either text or input_ids", param="text")
    given, name = (body.text, "text") if body.text is not None else (body.input_ids, "input_ids")
    prompts = split_prompts(given, name)
    if any(isinstance(prompt, str) != (name == "text") for prompt in prompts):
        form = "texts" if name == "text" else "token ids"
        raise InvalidRequestError(f"{name} must hold {form} only", param=name)
    is_single = isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int))
    sampling = _sampling_of(body, len(prompts))
    num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
    encoded = await encode_prompts(context, prompts, param=name)
    job_id, request_ids = _ids_of(context, body.rid, 0 if is_single else len(prompts))
    requests, expanded, ids = [], [], []
    for position, (prompt, fields, request_id) in enumerate(zip(encoded, sampling, request_ids, strict=True)):
        listed = f"[{position}]" if isinstance(body.sampling_params, list) else ""
        with client_names(_names(name, f"sampling_params{listed}", fields)):
            made = await _request(context, caller, body, prompt, fields, request_id, num_top)
        requests.append(made)
        expanded += [prompt] * made.n
        ids += [request_id] * made.n
    if len(expanded) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"n times the number of prompts may be at most {MAX_PROMPTS}", param="sampling_params.n"
        )
    generation = Generation(context, job_id, requests, _names(name, "sampling_params", sampling[0]))
    is_batch = not is_single or len(expanded) > 1
    return GenerateJob(context.engine.tokenizer, generation, expanded, ids, is_batch, num_top, _first_scored(body))


def _first_scored(body: GenerateBody) -> int | None:
    """Position of the first prompt token that gets a logprob entry; None for none of them."""
    start = body.logprob_start_len
    return start if body.return_logprob and start is not None and start >= 0 else None


def _names(prompt: str, sampling: str, fields: NativeSampling) -> dict[str, str]:
    """What this API calls the fields of an engine request: the prompt, and those of `fields`, which are `sampling`."""
    given = fields.model_fields_set
    renamed = {"max_tokens": "max_new_tokens"}
    renamed |= {"min_tokens": "min_new_tokens"} if "min_new_tokens" in given else {}
    renamed |= {"seed": "sampling_seed"} if "sampling_seed" in given else {}
    renamed |= {"guided_json": "json_schema"} if "json_schema" in given else {}
    names = {name: f"{sampling}.{renamed.get(name, name)}" for name in NativeSampling.model_fields}
    return names | {
        "prompt": prompt,
        "priority": "priority",
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "top_logprobs_num",
    }


def _ids_of(context: ServerContext, rid: str | list[str] | None, batch: int) -> tuple[str, list[str]]:
    """Id of the job and of each prompt's request; `batch` is the number of prompts, 0 for one that is no batch."""
    given = rid if isinstance(rid, list) else [rid] if rid else []
    if isinstance(rid, list) and len(rid) != batch:
        raise InvalidRequestError(f"rid has {len(rid)} entries for {batch or 'one'} prompts", param="rid")
    taken = {name for job, members in context.jobs.items() for name in (job, *members)} if given else set()
    for name in given:
        if name in taken:
            raise InvalidRequestError(f"rid {name!r} is in use", param="rid")
        taken.add(name)
    if isinstance(rid, list):
        return uuid4().hex, rid
    job_id = rid or uuid4().hex
    return job_id, [f"{job_id}-{position}" for position in range(batch)] or [job_id]


def _sampling_of(body: GenerateBody, count: int) -> list[NativeSampling]:
    """Sampling of each prompt; all of a batch need the same n, so that choices can be numbered."""
    given = body.sampling_params
    if not isinstance(given, list):
        return [given or NativeSampling()] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(given)} entries for {count} prompts", param="sampling_params"
        )
    if len({fields.n or 1 for fields in given}) > 1:
        raise InvalidRequestError("n must be the same for all prompts of a batch", param="sampling_params.n")
    return given


async def _request(
    context: ServerContext,
    caller: Caller,
    body: GenerateBody,
    prompt: Prompt,
    fields: NativeSampling,
    request_id: str,
    num_top: int | None,
) -> Request:
    n = num_choices(fields)
    if fields.json_schema is not None:
        fields = fields.model_copy(update={"guided_json": fields.json_schema})
    masker = await context.maskers(answer_grammar(fields), n)
    limit = DEFAULT_MAX_NEW_TOKENS if fields.max_new_tokens is None else fields.max_new_tokens
    start = _first_scored(body)
    if start is not None and start > len(prompt.token_ids):
        raise InvalidRequestError(
            f"logprob_start_len may be at most the length of the prompt ({len(prompt.token_ids)}), got {start}",
            param="logprob_start_len",
        )
    params = sampling_params(
        fields,
        max_tokens=limit,
        logprobs=num_top,
        prompt_logprobs=None if start is None else num_top,
        **({"min_tokens": fields.min_new_tokens} if fields.min_new_tokens is not None else {}),
        **({"seed": fields.sampling_seed} if fields.sampling_seed is not None else {}),
        **(CONSTRAINED if masker else {}),
    )
    return make_request(
        context,
        caller,
        request_id,
        prompt.token_ids,
        params,
        n=n,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        masker=masker,
        score_from=0 if start is None or start + 1 >= len(prompt.token_ids) else start + 1,
    )


async def _collect(job: GenerateJob) -> dict[str, Any] | list[dict[str, Any]]:
    """Read all choices to their end."""
    results = [job.result(choice, answer) for choice, answer in enumerate(await job.generation.collect())]
    return results if job.is_batch else results[0]


async def _stream(job: GenerateJob) -> AsyncGenerator[bytes, None]:
    """Server-sent events; each carries the whole text of its choice so far."""
    answers = [Answer() for _ in job.prompts]
    try:
        async with aclosing(job.generation.deltas()) as items:
            async for choice, delta in items:
                answer = answers[choice]
                extend(answer, delta)
                answer.text += delta.text
                index = {"index": choice} if job.is_batch else {}
                yield event(to_json({**job.result(choice, answer), **index}))
    except PhloemError as error:
        yield event(to_json({"error": error_body(error)}))
    yield DONE


async def abort(request: HttpRequest) -> Response:
    """End a request by its id (that of its answer, or its `rid`; a batch's `rid` ends all of it), or all of them."""
    context = context_of(request)
    body = await read_model(request, AbortBody, context.config.max_body_bytes)
    if not body.abort_all and not body.rid:
        raise InvalidRequestError("send rid, or abort_all: true", param="rid")
    rid = body.rid or ""
    jobs = list(context.jobs.values()) if body.abort_all else [context.jobs.get(rid, (rid,))]
    ended = [await context.engine.abort(request_id) for job in jobs for request_id in job]
    return json_response({"success": True, "num_aborted": sum(ended)})


async def health_generate(request: HttpRequest) -> Response:
    """200 when the engine produces a token in time; for monitors that want to see it work."""
    context = context_of(request)
    context.check_ready()
    body = GenerateBody(input_ids=[0], sampling_params=NativeSampling(max_new_tokens=1, temperature=0.0))
    job = await prepare_generate(context, caller_of(request), body)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await job.generation.start()
            await job.generation.collect()
    except TimeoutError:
        raise EngineUnavailableError(f"no token came within {HEALTH_TIMEOUT_S:.0f} s") from None
    except PhloemError as error:
        raise EngineUnavailableError(f"the engine produced no token: {error.message}") from None
    finally:
        await job.generation.close()
    return json_response({"status": "ready"})
