"""Answers of the Responses API that later requests may refer to: in memory, bounded, forgotten oldest first.

Owns what is kept and for whom. Must not know what the items mean.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 20
"""Memory for stored conversations, about."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer: the conversation up to and with it as chat messages, and its JSON. `owner` is the caller's key id."""

    owner: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    num_bytes: int


class ResponseStore:
    """Stored answers by id. Whoever asks with another key is told that there is none."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep an answer; the oldest ones go when memory is short."""
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes:
            _, gone = self._stored.popitem(last=False)
            self._num_bytes -= gone.num_bytes

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """A stored answer of the same owner."""
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget an answer; False when there is none."""
        if self.get(response_id, owner) is None:
            return False
        self._num_bytes -= self._stored.pop(response_id).num_bytes
        return True
