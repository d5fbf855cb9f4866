"""The baseline without a prefix cache: K/V belongs to one request and is freed when it ends.

Owns the rule that nothing is shared; for benchmarks only. Must not know requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence

from phloem.kv.manager import KVCacheManager, Probe
from phloem.types import Int32Array


class NoCacheManager(KVCacheManager):
    """A KVCacheManager in which every cursor is alone: it matches nothing, and closing it frees its pages.

    Each cursor gets a namespace of its own in the same tree, so the engine, the runner and the accounting are those of
    the other columns. A request that is retracted loses its K/V too, and computes it again.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._spaces: dict[int, int] = {}
        self._empty = self._tree.create_space()

    def peek(self, ns_id: int, tokens: Int32Array, probe: Probe | None = None) -> Probe:
        return super().peek(self._empty, tokens, probe)

    def match_many(self, queries: Sequence[tuple[int, Int32Array, Probe | None]]) -> list[Probe]:
        return super().match_many([(self._empty, tokens, probe) for _, tokens, probe in queries])

    def want(self, ns_id: int, tokens: Int32Array) -> int:
        return super().want(self._empty, tokens)

    def open(self, ns_id: int, tokens: Int32Array, priority: int = 0) -> tuple[int, int]:
        space = self._tree.create_space()
        cursor, length = super().open(space, tokens, priority)
        self._spaces[cursor] = space
        return cursor, length

    def close(self, cursor: int) -> None:
        super().close(cursor)
        self.flush(self._spaces.pop(cursor))
