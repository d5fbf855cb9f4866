"""From TokenDelta to TextDelta: what one request has said so far, as text that is safe to show.

Owns a detokeniser for each sequence of a request. Must not know threads, asyncio or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.engine.detokenizer import IncrementalDetokenizer
from phloem.errors import PhloemError
from phloem.models.tokenizer import Tokenizer
from phloem.types import FinishReason, Request, TextDelta, TokenDelta


@dataclass(slots=True)
class _SequenceText:
    detokenizer: IncrementalDetokenizer
    finished: bool = False


class RequestOutput:
    """Text of all sequences of one request. `finished` when each has had its terminal answer."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._texts = [_SequenceText(IncrementalDetokenizer(tokenizer, request.params)) for _ in range(request.n)]
        self._num_open = request.n

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """Text news of a sequence; None after its end.

        A TextDelta that ends with a stop string comes before the engine knows of it: the caller aborts the sequence.
        """
        state = self._texts[delta.index]
        if state.finished:
            return None
        text, stop = state.detokenizer.push(
            delta.token_ids,
            final=delta.finish_reason is not None,
            ends_with_stop_token=delta.finish_reason is FinishReason.STOP,
        )
        if delta.finish_reason is not None or stop is not None:
            state.finished = True
            self._num_open -= 1
        return TextDelta(
            request_id=delta.request_id,
            index=delta.index,
            text=text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=FinishReason.STOP if stop is not None else delta.finish_reason,
            stop_reason=stop if stop is not None else delta.stop_reason,
            error=delta.error,
            num_prompt_tokens=delta.num_prompt_tokens,
            cached_tokens=delta.cached_tokens,
            num_output_tokens=state.detokenizer.num_tokens,
            embedding=delta.embedding,
        )

    def fail(self, error: PhloemError) -> list[TextDelta]:
        """Terminal answers for all sequences that have none."""
        request = self.request
        deltas = [
            self.push(TokenDelta(request.request_id, index, [], finish_reason=FinishReason.ERROR, error=error))
            for index in range(request.n)
        ]
        return [delta for delta in deltas if delta is not None]
