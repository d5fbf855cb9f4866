"""An answer as a row of blocks that open, grow and close: what the Messages and Responses APIs stream.

Owns where one block ends and the next begins. Must not know either API's JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from phloem.server.events import CallArguments, CallStart, Content, Event, Reasoning

BlockKind = Literal["text", "reasoning", "call"]
Change = Literal["open", "grow", "close"]


@dataclass(slots=True)
class Block:
    """One block of an answer; `text` is the text, the thoughts or the arguments so far."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Blocks:
    """Blocks of one answer so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def add(self, events: Iterable[Event]) -> list[tuple[Change, Block, str]]:
        """Take events; the changes that they make, in order, with the text that came."""
        changes: list[tuple[Change, Block, str]] = []
        for event in events:
            match event:
                case CallStart(_, call_id, name):
                    self._start("call", changes, call_id, name)
                case Content(text):
                    self._grow("text", text, changes)
                case Reasoning(text):
                    self._grow("reasoning", text, changes)
                case CallArguments(_, text):
                    self._grow("call", text, changes)
        return changes

    def close(self) -> list[tuple[Change, Block, str]]:
        """End the block that is open."""
        if self._open is None:
            return []
        block, self._open = self._open, None
        return [("close", block, "")]

    def _grow(self, kind: BlockKind, text: str, changes: list[tuple[Change, Block, str]]) -> None:
        block = self._open
        if block is None or block.kind != kind:
            block = self._start(kind, changes)
        block.pieces.append(text)
        changes.append(("grow", block, text))

    def _start(
        self, kind: BlockKind, changes: list[tuple[Change, Block, str]], call_id: str = "", name: str = ""
    ) -> Block:
        changes += self.close()
        block = Block(len(self.all), kind, call_id, name)
        self.all.append(block)
        self._open = block
        changes.append(("open", block, ""))
        return block
