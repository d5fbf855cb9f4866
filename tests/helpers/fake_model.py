"""An engine without weights: NullRunner, a tokenizer of one character a token, and the real cache and scheduler."""

from __future__ import annotations

from typing import Any

from phloem.config import EngineConfig
from phloem.engine.loading import EngineParts
from phloem.kv.manager import KVCacheManager
from phloem.runner.null_runner import NullRunner
from phloem.sched.scheduler import Scheduler

VOCAB = 256


class CharTokenizer:
    """Token i is the byte i."""

    vocab_size = VOCAB
    eos_ids = frozenset({0})
    special_ids = frozenset({0})

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def fake_parts(
    *,
    num_pages: int = 4096,
    max_model_len: int = 1024,
    runner: Any = None,
    config: EngineConfig | None = None,
    **options: Any,
) -> EngineParts:
    scheduler = Scheduler(KVCacheManager(num_pages=num_pages), max_model_len=max_model_len, **options)
    runner = runner or NullRunner(num_slots=num_pages, vocab_size=VOCAB)
    tokenizer: Any = CharTokenizer()
    return EngineParts(config or EngineConfig(), scheduler, runner, tokenizer, "fake", {"backend": "null"})
