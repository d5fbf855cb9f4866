"""What the HTTP side asks of an engine and of its tokenizer, as protocols.

Owns the contract only; `engine.async_engine.AsyncEngine` fulfils it, and so does the fake engine of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from phloem.types import Namespace, Request, TextDelta

EngineState = Literal["loading", "ready", "draining", "stopped", "failed"]


class Template(Protocol):
    """The model's chat template or templates, as text by name; `default` renders ordinary chats."""

    @property
    def sources(self) -> Mapping[str, str]: ...


class Tokenizer(Protocol):
    """Text to token ids and back, and the model's chat template."""

    @property
    def template(self) -> Template: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text. `add_special` adds what the model expects before a plain text (BOS)."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidRequestError where the template refuses it."""


class Stream(Protocol):
    """News of one request; ends after each sequence had its finish_reason. `aclose` early aborts the request."""

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    async def __anext__(self) -> TextDelta: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """One loaded model that serves requests. All methods are called on the event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one token."""

    @property
    def vocab_size(self) -> int:
        """Number of logits, which may be more than the tokenizer's."""

    async def submit(self, request: Request) -> Stream:
        """Queue a request. Raises InvalidRequestError and its kinds, QueueFullError, EngineUnavailableError."""

    async def abort(self, request_id: str) -> bool: ...

    async def flush_cache(self, namespace: Namespace | None = None) -> Mapping[str, int]: ...

    def stats(self) -> Mapping[str, float]: ...

    def describe(self) -> Mapping[str, object]: ...

    def state(self) -> EngineState: ...

    @property
    def num_live(self) -> int: ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the live ones, stop. True when all finished in time."""

    def close(self) -> None: ...
