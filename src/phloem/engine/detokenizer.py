"""Incremental detokenising: token ids in, text that is safe to send out.

Owns the bytes that do not yet make a character and the characters that may yet become a stop string.
Must not know requests, HTTP or the scheduler: it needs a tokenizer's bytes per token and nothing else.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from phloem.types import SamplingParams


class TokenBytes(Protocol):
    """What the detokeniser asks of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `skip_special_tokens` leaves out."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token stands for, special tokens included; a pure function of the id."""


class Piece(NamedTuple):
    """Text that may be sent now, and the stop string that ended the sequence, if one did."""

    text: str
    stop_reason: str | None


class _StopString:
    """Knuth-Morris-Pratt matcher of one stop string: O(1) amortised per character, never looks back."""

    __slots__ = ("_failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._failure = [0] * (len(text) + 1)
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self._failure[length]
            if text[position] == text[length]:
                length += 1
            self._failure[position + 1] = length

    def advance(self, character: str) -> bool:
        """Take one character; True where the stop string ends with it."""
        if self.matched == len(self.text):
            self.matched = self._failure[self.matched]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._failure[self.matched]
        if character == self.text[self.matched]:
            self.matched += 1
        return self.matched == len(self.text)


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text, piece by piece.

    The pieces joined are the UTF-8 reading of the tokens' joined bytes: a character that spans tokens
    appears when it is whole, and bytes that can belong to no character become U+FFFD, one for each
    longest ill-formed part, exactly as in a one-shot decode. Text that may be the beginning of a stop
    string is held back until it is known not to be one. The earliest end of a stop string wins; of
    two that end together, the longer. The result does not depend on how tokens are grouped in calls.
    """

    def __init__(self, tokenizer: TokenBytes, params: SamplingParams) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopString(text) for text in sorted(params.stop, key=len, reverse=True) if text]
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._held = ""
        self._done = False
        self.num_tokens = 0
        """Tokens taken so far; those after a stop string are not taken."""
        self.stop_reason: str | None = None
        """The stop string that was met."""

    def push(self, token_ids: Sequence[int], final: bool, *, ends_with_stop_token: bool = False) -> Piece:
        """Take the next tokens and return the text that is now certain.

        `final` says that no more come: what was held back is released. `ends_with_stop_token` says
        that the last id is the end-of-text or stop token that ended the sequence: it counts as a
        token, and its text is left out unless `include_stop` asks for it. Once a stop string was met,
        further calls return no text. O(1) amortised per token.
        """
        pieces = []
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            if self._done:
                break
            self.num_tokens += 1
            is_stop_token = ends_with_stop_token and position == last
            if (is_stop_token and not self._include_stop) or (token_id in self._skipped and not is_stop_token):
                continue
            pieces.append(self._scan(self._decoder.decode(self._token_bytes(token_id))))
        if final and not self._done:
            pieces.append(self._scan(self._decoder.decode(b"", True)))
            if not self._done:
                pieces.append(self._held)
                self._held = ""
                self._done = True
        return Piece("".join(pieces), self.stop_reason)

    def _scan(self, text: str) -> str:
        """Add decoded characters, look for stop strings, and return what cannot be part of one."""
        if not self._stops:
            return text
        may_stop = self.num_tokens >= self._min_tokens
        for position, character in enumerate(text):
            met = [stop for stop in self._stops if stop.advance(character)]
            if met and may_stop:
                return self._finish(met[0].text, self._held + text[: position + 1])
        text = self._held + text
        keep = max(stop.matched if stop.matched < len(stop.text) else len(stop.text) - 1 for stop in self._stops)
        sent = len(text) - min(keep, len(text))
        self._held = text[sent:]
        return text[:sent]

    def _finish(self, stop: str, text: str) -> str:
        """End the sequence at the stop string that `text` ends with."""
        self._done = True
        self._held = ""
        self.stop_reason = stop
        return text if self._include_stop else text[: -len(stop)]
