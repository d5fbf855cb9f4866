"""Request bodies of the OpenAI routes as pydantic models.

Owns the fields and their types. Ranges of sampling numbers live in `types.SamplingParams`. Types are strict
("7" is no integer), unknown fields are ignored, and null means absent, as OpenAI clients send it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
MAX_TOOLS = 512
MAX_MESSAGES = 16384
MAX_IDS = 1 << 20
MAX_TEXTS = 4096


def _check_bias_size(bias: object) -> object:
    """Refuse a large map before its values are looked at, each of which would be an error of its own."""
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("too_long", f"may have at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    return bias


# Lists end their validation at the first wrong item: millions of them would each become an error.
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True)]
TokenIds = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)]
StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
LogitBias = Annotated[dict[str, float], BeforeValidator(_check_bias_size)]


class Body(BaseModel):
    """Base of all bodies: strict types, finite numbers, unknown fields ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` member of a response format."""

    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """How the answer must be formed."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """Grammar of the answer in the form that vLLM clients send."""

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None


class Generation(Body):
    """Fields that chat and plain completions share: sampling, stopping, streaming, structure, cache."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None


class CompletionBody(Generation):
    """POST /v1/completions. `prompt` is checked by `prompts.parse_prompts`."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class FunctionDefinition(Body):
    """One function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The function that a tool choice names."""

    name: str


class NamedToolChoice(Body):
    """A tool choice that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Generation):
    """POST /v1/chat/completions. `messages` are checked by `messages.normalise`."""

    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    separate_reasoning: bool | None = None
    modalities: Texts | None = None


class TokenizeBody(Body):
    """POST /tokenize: a plain text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None
