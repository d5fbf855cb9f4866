"""What the program prints while it starts: progress, facts, warnings.

Owns wording and number formats. Takes the facts as a plain mapping; must not know where they come from.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from typing import TextIO

from phloem import __version__

QUESTION = "What is the capital of France?"


def say(text: str) -> None:
    """One line for a person, on stderr."""
    print(f"phloem: {text}", file=sys.stderr, flush=True)


def size(num_bytes: int) -> str:
    """Bytes as MiB or GiB, with three figures or so."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"


class ProgressLine:
    """Shows stages of loading: redrawn in place on a terminal, one line a stage elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is done to `fraction`, 0 to 1; one that is first heard of at 1 is not shown."""
        if stage != self._stage and fraction >= 1.0:
            return
        if self._live:
            bar = "#" * round(30 * fraction)
            self._stream.write(f"\r\x1b[Kphloem: {stage} [{bar:<30}] {fraction:4.0%}")
        elif stage != self._stage:
            self._stream.write(f"phloem: {stage} ...\n")
        self._stage = stage
        self._stream.flush()

    def close(self) -> None:
        """Leave the terminal with an empty line to write on."""
        if self._live and self._stage:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._stage = ""


def engine_facts(facts: Mapping[str, object]) -> list[str]:
    """Lines that say what was loaded, on what, and how much fits. `facts` is AsyncEngine.describe()."""
    device = str(facts.get("device", "cpu"))
    details = [f"{name} {facts[name]}" for name in ("isa", "threads", "backend") if name in facts]
    kv_tokens, length = _number(facts, "kv_tokens"), _number(facts, "max_model_len")
    return [
        f"version {__version__} on {device}" + (f" ({', '.join(details)})" if details else ""),
        f"model {facts.get('model', '')}: weights {size(_number(facts, 'weight_bytes'))}",
        f"KV cache: {kv_tokens} tokens, {facts.get('kv_cache_dtype', '')}, "
        f"{size(kv_tokens * _number(facts, 'kv_bytes_per_token'))}, {capacity(kv_tokens, length)}",
    ]


def capacity(kv_tokens: int, length: int) -> str:
    """How many requests of full length the pool holds."""
    if kv_tokens < length:
        return f"fits no request of {length} tokens, one of {kv_tokens} at most"
    count = kv_tokens // length
    return f"fits {count} request{'' if count == 1 else 's'} of {length} tokens"


def ready(url: str, model: str, needs_key: bool) -> list[str]:
    """The line that scripts wait for, and a request to paste."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": model, "messages": messages, "temperature": 0, "stream": True}
    data = shlex.quote(json.dumps(body))
    curl = f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d {data}"
    return [f"ready on {url}", f"try it:\n  {curl}"]


def _number(facts: Mapping[str, object], name: str) -> int:
    value = facts.get(name, 0)
    return value if isinstance(value, int) else 0
