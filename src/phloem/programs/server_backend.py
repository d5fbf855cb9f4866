"""How a Phloem server answers a program, over HTTP.

Owns the requests and the reading of answers and errors. Must not know states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import httpx

from phloem.engine.generation import GeneratedSequence, Score, Usage, gather_or_cancel
from phloem.errors import EngineUnavailableError, PhloemError
from phloem.programs.backend import Message
from phloem.types import UNLIMITED, FinishReason, SamplingParams, TokenLogprob

MAX_TRIES = 8
"""How often a request is sent that the server has no room for."""

MAX_CONNECTIONS = 256

_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
    "logprobs",
)


class ServerBackend:
    """A server at a URL such as http://127.0.0.1:30000. `share` False salts each call, to see what sharing saves."""

    def __init__(
        self, url: str, *, api_key: str = "", share: bool = True, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._share = share
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    async def encode(self, text: str, add_special: bool) -> list[int]:
        answer = await self._post("/tokenize", {"prompt": text, "add_special_tokens": add_special})
        ids: list[int] = answer["tokens"]
        return ids

    async def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        body = {"tokens": list(token_ids), "skip_special_tokens": skip_special}
        text: str = (await self._post("/detokenize", body))["prompt"]
        return text

    async def render_chat(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """The server gives a chat's token ids; their text, special tokens included, is what the template wrote."""
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt, "add_special_tokens": False}
        return await self.decode((await self._post("/tokenize", body))["tokens"], False)

    async def generate(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[GeneratedSequence, Usage]:
        body = {name: getattr(params, name) for name in _SAME_NAME}
        body |= {
            "prompt": list(token_ids),
            "max_tokens": UNLIMITED - 1 if params.max_tokens is None else params.max_tokens,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "include_stop_str_in_output": params.include_stop,
            "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias.items()},
            "return_token_ids": True,
        }
        answer = await self._post("/v1/completions", self._salted(body))
        (choice,), usage = answer["choices"], answer["usage"]
        ids = tuple(choice["token_ids"])
        logprobs = None
        if params.logprobs is not None:
            values = choice["logprobs"]["token_logprobs"]
            logprobs = tuple(TokenLogprob(i, value) for i, value in zip(ids, values, strict=True))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        sequence = GeneratedSequence(
            text=choice["text"],
            token_ids=ids,
            finish_reason=FinishReason(choice["finish_reason"]),
            stop_reason=choice["stop_reason"],
            logprobs=logprobs,
            cached_tokens=cached,
        )
        return sequence, Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])

    async def score(
        self, token_ids: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> tuple[list[Score], Usage]:
        inputs = [[*token_ids, *continuation] for continuation in continuations]
        body = {
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            # Scores begin with the token after this one.
            "logprob_start_len": len(token_ids) - 1,
        }
        # One request for all; without sharing one for each, since a salt goes with a request.
        batches = [inputs] if self._share else [[ids] for ids in inputs]
        parts = await gather_or_cancel(
            self._post("/generate", self._salted({**body, "input_ids": batch})) for batch in batches
        )
        answers = [answer for part in parts for answer in part]
        metas = [answer["meta_info"] for answer in answers]
        usage = Usage(sum(meta["prompt_tokens"] for meta in metas), sum(meta["cached_tokens"] for meta in metas), 0)
        return [_score(meta, one) for meta, one in zip(metas, continuations, strict=True)], usage

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.aclose()

    def _salted(self, body: dict[str, Any]) -> dict[str, Any]:
        return body if self._share else {**body, "cache_salt": uuid4().hex}

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that the server answers with; waits and tries again while its queue is full."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._url,
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
                timeout=httpx.Timeout(None, connect=10.0),
                limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
                transport=self._transport,
            )
        for num_tries in range(1, MAX_TRIES + 1):
            try:
                response = await self._client.post(path, json=body)
            except httpx.HTTPError as error:
                raise EngineUnavailableError(
                    f"no answer from {self._url} ({type(error).__name__}); is a server running there?"
                ) from error
            if response.status_code != 429 or num_tries == MAX_TRIES:
                break
            await asyncio.sleep(_retry_after_s(response))
        if response.status_code != 200:
            raise _error(response)
        return response.json()


def _score(meta: dict[str, Any], continuation: Sequence[int]) -> Score:
    entries = meta["input_token_logprobs"][-len(continuation) :]
    if [entry[1] for entry in entries] != list(continuation):
        raise PhloemError("the server scored other tokens than those it was asked for")
    return Score(tuple(continuation), tuple(float(entry[0]) for entry in entries))


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "1")
    return float(value) if value.isdigit() else 1.0


def _error(response: httpx.Response) -> PhloemError:
    """The server's error as the class that it was raised as there, as far as its code tells."""
    try:
        detail = response.json()["error"]
        message, code, param = str(detail["message"]), detail.get("code"), detail.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return PhloemError(f"the server answered {response.status_code}: {response.text[:200]}")
    kinds = [PhloemError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    kind = next((kind for kind in kinds if kind.code == code), PhloemError)
    error = kind(message)
    error.param = param
    return error
