"""An engine without a model: it says what a script tells it to, byte by byte, through the real detokeniser.

Token i < 256 is the byte i. Control tokens follow. Prefix reuse is computed exactly, per namespace, so that usage
numbers can be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from phloem.engine.admission import check_request
from phloem.engine.detokenizer import IncrementalDetokenizer
from phloem.errors import EngineUnavailableError, InvalidRequestError, PhloemError, QueueFullError
from phloem.server.engine_api import EngineState
from phloem.types import FinishReason, Int32Array, Namespace, Pooling, Request, TextDelta, TokenLogprob

CONTROL = ("<|bos|>", "<|end|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>", "<|eom|>")
VOCAB = 256 + len(CONTROL)
BOS, END, IM_START, IM_END = range(256, 260)


class FakeTokenizer:
    """Bytes and a few control tokens."""

    vocab_size = VOCAB
    special_ids = frozenset(range(256, VOCAB))
    eos_ids = frozenset({END, IM_END})

    def __init__(self, template: str = "{{ tools }} <tool_call> <think> </think>") -> None:
        self.template = SimpleNamespace(sources={"default": template})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = []
        rest = text
        while rest:
            control = next((c for c in CONTROL if rest.startswith(c)), None)
            if control is not None:
                ids.append(256 + CONTROL.index(control))
                rest = rest[len(control) :]
            else:
                end = min((p for c in CONTROL if (p := rest.find(c)) > 0), default=len(rest))
                ids += rest[:end].encode()
                rest = rest[end:]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else CONTROL[token_id - 256].encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        parts = [f"tools:{[t['function']['name'] for t in tools]}\n"] if tools else []
        for message in messages:
            if message["content"] == "template error":
                raise InvalidRequestError("the chat template refused the messages: no", param="messages")
            calls = "".join(f"<call {c['function']['name']}>" for c in message.get("tool_calls", ()))
            parts.append(f"<|im_start|>{message['role']}\n{message['content']}{calls}<|im_end|>\n")
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)


Script = Callable[[Request, int], str | list[int]]


def _script(text: str | list[int]) -> Script:
    return lambda _request, _index: text


@dataclass
class FakeEngine:
    """`script` gives the answer of a sequence; after it comes END. `delay_s` passes before each token."""

    script: Script = field(default_factory=lambda: _script("Hello world"))
    delay_s: float = 0.0
    max_model_len: int = 4096
    kv_tokens: int = 8192
    max_live: int = 1000
    fail_after: int | None = None
    failure: PhloemError = field(default_factory=lambda: PhloemError("the fake engine failed"))
    model_name: str = "fake-model"
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    vocab_size: int = VOCAB
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_tokens: int = 0
    current: EngineState = "ready"
    _seen: dict[Namespace, dict[bytes, Int32Array]] = field(default_factory=dict)
    _live: dict[str, FakeStream] = field(default_factory=dict)

    @classmethod
    def saying(cls, text: str | list[int], **options: Any) -> FakeEngine:
        return cls(script=_script(text), **options)

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.max_model_len - 1, self.kv_tokens)

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def submit(self, request: Request) -> FakeStream:
        if self.current != "ready":
            raise EngineUnavailableError(f"the engine is {self.current}")
        request = check_request(request, vocab_size=VOCAB, max_model_len=self.max_model_len, kv_tokens=self.kv_tokens)
        if len(self._live) >= self.max_live:
            raise QueueFullError("too many requests", retry_after_s=3)
        self.requests.append(request)
        stream = FakeStream(self, request, self._match(request))
        self._live[request.request_id] = stream
        return stream

    def _match(self, request: Request) -> int:
        prompt = request.prompt
        seen = self._seen.setdefault(request.namespace, {})
        best = max((_common_prefix(other, prompt) for other in seen.values()), default=0)
        seen[prompt.tobytes()] = prompt
        return min(best, len(prompt) - 1)

    async def abort(self, request_id: str) -> bool:
        stream = self._live.get(request_id)
        if stream is not None:
            stream.abort_asked = True
        return stream is not None

    async def flush_cache(self, namespace: Namespace | None = None) -> Mapping[str, int]:
        self._seen.clear()
        return {"pages_freed": 7}

    def stats(self) -> Mapping[str, float]:
        return {"num_running": self.num_live, "num_waiting": 0, "num_output_tokens": self.num_tokens, "kv_free": 5}

    def describe(self) -> Mapping[str, object]:
        return {"backend": "fake"}

    def state(self) -> EngineState:
        return self.current

    async def drain(self, timeout_s: float) -> bool:
        self.current = "draining"
        ends = asyncio.get_running_loop().time() + timeout_s
        while self._live and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.01)
        finished = not self._live
        self.close()
        return finished

    def close(self) -> None:
        self.current = "stopped"
        for stream in self._live.values():
            stream.error = EngineUnavailableError("the engine was stopped before the request was finished")

    def forget(self, request_id: str, aborted: bool) -> None:
        if self._live.pop(request_id, None) is not None and aborted:
            self.aborted.append(request_id)


def _common_prefix(first: Int32Array, second: Int32Array) -> int:
    length = min(len(first), len(second))
    different = (first[:length] != second[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length


class FakeStream:
    """Round robin over the sequences of a request, one token each."""

    def __init__(self, engine: FakeEngine, request: Request, cached: int) -> None:
        self._engine = engine
        self._request = request
        self._cached = cached
        self._detokenizers = [IncrementalDetokenizer(engine.tokenizer, request.params) for _ in range(request.n)]
        self._plans = [self._plan(index) for index in range(request.n)]
        self._counts = [0] * request.n
        self._open = list(range(request.n))
        self._turn = 0
        self.abort_asked = False
        self.error: PhloemError | None = None

    def _plan(self, index: int) -> list[int]:
        answer = self._engine.script(self._request, index)
        return list(answer.encode()) if isinstance(answer, str) else list(answer)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._open:
            self._engine.forget(self._request.request_id, False)
            raise StopAsyncIteration
        await asyncio.sleep(self._engine.delay_s)
        self._turn = (self._turn + 1) % len(self._open)
        return self._next(self._open[self._turn])

    async def aclose(self) -> None:
        self._engine.forget(self._request.request_id, bool(self._open))

    def _next(self, index: int) -> TextDelta:
        request = self._request
        if self._engine.fail_after is not None and self._counts[index] >= self._engine.fail_after:
            self.error = self._engine.failure
        if self.error is not None:
            return self._end(index, FinishReason.ERROR, self.error)
        if self.abort_asked:
            return self._end(index, FinishReason.ABORT, None)
        limit = self._engine.max_model_len - len(request.prompt)
        limit = limit if request.params.max_tokens is None else min(limit, request.params.max_tokens)
        if limit == 0:
            delta = self._end(index, FinishReason.LENGTH, None)
            if request.pooling is not None:
                ids = request.prompt[-1:] if request.pooling is Pooling.LAST else request.prompt
                delta.embedding = np.array([ids.mean(), 1.0, 0.0], np.float32)
            return delta
        token = self._draw(index)
        self._counts[index] += 1
        self._engine.num_tokens += 1
        reason: FinishReason | None = None
        stop: int | str | None = None
        if token in request.stop_token_ids:
            reason, stop = FinishReason.STOP, token
        elif token in request.eos_token_ids and not request.params.ignore_eos:
            reason = FinishReason.STOP
        elif self._counts[index] >= limit:
            reason = FinishReason.LENGTH
        piece = self._detokenizers[index].push(
            [token], reason is not None, ends_with_stop_token=reason is FinishReason.STOP
        )
        if piece.stop_reason is not None:
            reason, stop = FinishReason.STOP, piece.stop_reason
        delta = self._delta(index, piece.text, [token])
        delta.finish_reason, delta.stop_reason = reason, stop
        if reason is not None:
            self._open.remove(index)
        return delta

    def _draw(self, index: int) -> int:
        """The scripted token, if bias and grammar allow it; else the first one allowed."""
        request = self._request
        position = self._counts[index]
        plan = self._plans[index]
        token = plan[position] if position < len(plan) else END
        forced = [i for i, bias in request.params.logit_bias.items() if bias == 100.0]
        token = forced[0] if forced else token
        if request.masker:
            mask = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
            request.masker[index].fill(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].nonzero()[0].tolist()
            token = token if token in allowed else END if END in allowed else allowed[0]
            request.masker[index].accept(token)
        return token

    def _end(self, index: int, reason: FinishReason, error: PhloemError | None) -> TextDelta:
        self._open.remove(index)
        delta = self._delta(index, self._detokenizers[index].push([], True).text, [])
        delta.finish_reason, delta.error = reason, error
        return delta

    def _delta(self, index: int, text: str, tokens: list[int]) -> TextDelta:
        params = self._request.params
        delta = TextDelta(
            request_id=self._request.request_id,
            index=index,
            text=text,
            token_ids=tokens,
            num_prompt_tokens=len(self._request.prompt),
            cached_tokens=self._cached,
            num_output_tokens=self._counts[index],
        )
        if params.logprobs is not None:
            delta.logprobs = [self._score(token, params.logprobs) for token in tokens]
        if self._request.score_from and self._counts[index] <= 1:
            prompt = self._request.prompt.tolist()
            delta.prompt_logprobs = [self._score(t, params.prompt_logprobs or 0) for t in prompt[1:]]
        return delta

    @staticmethod
    def _score(token: int, num_top: int) -> TokenLogprob:
        top = tuple(((token + k) % VOCAB, -0.5 - k) for k in range(num_top))
        return TokenLogprob(token, float("-inf") if token == ord("~") else -0.5, top)
