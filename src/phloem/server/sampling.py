"""From request fields to SamplingParams: one table of names, defaults and limits for all routes.

Owns what absent fields mean. Must not know routes or streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phloem.errors import InvalidRequestError
from phloem.server.protocol import MAX_CHOICES, ChatBody, CompletionBody, Generation
from phloem.types import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""Output limit of a plain completion that names none, as in the OpenAI API."""

_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)


CONSTRAINED = {"ignore_eos": False, "min_tokens": 0}
"""What a grammar decides: where it ends, the answer ends."""


def sampling_params(body: Generation, **overrides: Any) -> SamplingParams:
    """Sampling of a request; `overrides` are fields that its route decides. Raises InvalidRequestError."""
    values = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    values["stop"] = parse_stop(body.stop)
    values["stop_token_ids"] = tuple(body.stop_token_ids or ())
    values["include_stop"] = bool(body.include_stop_str_in_output or body.no_stop_trim)
    values["logit_bias"] = parse_logit_bias(body.logit_bias or {})
    return SamplingParams(**(values | overrides))


def parse_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; empty ones are refused, since they would end every answer at once."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise InvalidRequestError("stop strings must not be empty", param="stop")
    return stops


def parse_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Token ids of JSON's string keys. The engine checks them against the vocabulary."""
    parsed = {}
    for key, value in bias.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 12):
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias")
        parsed[int(key)] = value
    return parsed


def chat_max_tokens(body: ChatBody) -> int | None:
    """Output limit of a chat: `max_completion_tokens` wins over `max_tokens`; None is up to the context."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value: int | None = getattr(body, name)
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name} must be at least 1, got {value}", param=name)
    return value


def completion_max_tokens(body: CompletionBody) -> int:
    """Output limit of a plain completion; 0 only scores or echoes the prompt."""
    if body.max_tokens is None:
        return COMPLETION_MAX_TOKENS
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens must be at least 1, or 0 together with echo", param="max_tokens")
    return body.max_tokens


def num_choices(body: Generation) -> int:
    """`n`, checked. `best_of` above n is not served."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError(f"n must be from 1 to {MAX_CHOICES}, got {n}", param="n")
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequestError(f"best_of must equal n ({n}) or be absent, got {body.best_of}", param="best_of")
    return n
