"""Configuration of one engine and of its HTTP face: frozen, resolved once, every field documented.

Owns the fields, their defaults and their ranges. Must not know how a field is spelled on the command line
(cli) nor read files or the environment. A new field needs a default that suits most and a test of both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from phloem.errors import UsageError

SchedulePolicy = Literal["cache-aware", "lpm", "dfs-weight", "fcfs", "priority", "random"]
EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "priority", "gdsf"]
KVCacheDtype = Literal["f16", "f32", "int8"]
Quantization = Literal["none", "q8", "q4"]
Isa = Literal["auto", "portable", "avx2", "avx512"]
Backend = Literal["auto", "native", "torch"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine needs to know. Sizes of zero or None are derived when the engine starts."""

    model: str = ""
    """Path of a .gguf file or of a Hugging Face-format folder."""
    load_format: LoadFormat = "auto"
    """`dummy` makes random weights from the model's config alone (benchmarks of speed)."""
    chat_template: str = ""
    """File with a Jinja chat template that replaces the model's own."""
    backend: Backend = "auto"
    """Which forward pass: `native` (C++) or `torch` (the oracle: float32, slow). auto: native, never torch."""
    isa: Isa = "auto"
    """Instruction set of the native kernels; auto takes the best that this CPU has."""
    num_threads: int = 0
    """Worker threads of a step; 0: one per core this process may use."""
    quantization: Quantization | None = None
    """Format to convert float weights to: q8 (8.5 bits a weight) or q4 (5 bits). None and `none` keep the file's."""
    kv_cache_dtype: KVCacheDtype = "f16"
    """Element type of the KV cache."""
    max_model_len: int = 0
    """Longest prompt plus output of one request, in tokens; 0: what the model was trained for."""
    max_total_tokens: int = 0
    """KV pool size in tokens; 0: sized by `mem_fraction_static`."""
    mem_fraction_static: float = 0.6
    """Share of the memory that is free before loading that weights and KV pool may take."""
    page_size: int = 1
    """Tokens of one KV page, 1 to 256; a match ends on a page boundary."""
    eviction_policy: EvictionPolicy = "lru"
    """Which unlocked leaf goes first when the pool is short."""
    evict_watermark: float = 0.0
    """Evict ahead of need while less than this share of the pool is free (0: on demand only)."""
    schedule_policy: SchedulePolicy = "cache-aware"
    """Order of the waiting queue."""
    chunked_prefill_size: int = 512
    """Most rows of one step: prefill is cut into chunks so that running requests keep their pace."""
    max_running_requests: int = 64
    """Most sequences that run at once."""
    max_queued_requests: int = 4096
    """Most sequences that wait; beyond it a request is refused with 429."""
    request_timeout_s: float = 0.0
    """Most seconds from arrival to end of a request; 0: no limit."""
    share_cache_across_keys: bool = False
    """Let clients with different API keys reuse each other's prefixes."""
    pin_budget: float = 0.3
    """Largest share of the pool that pinned prefixes may hold."""
    group_shared_prefixes: bool = True
    """Attend a prefix that several rows share once per tile (same bits either way)."""
    weight_cache_dir: str | None = None
    """Where packed weights are kept between starts (safe to delete); None: the user's cache folder; empty: nowhere."""

    def __post_init__(self) -> None:
        """Raise UsageError naming the field that is out of range."""
        choices = (
            ("schedule_policy", SchedulePolicy),
            ("eviction_policy", EvictionPolicy),
            ("kv_cache_dtype", KVCacheDtype),
            ("isa", Isa),
            ("backend", Backend),
            ("load_format", LoadFormat),
        )
        for name, kind in choices:
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        ranges = (
            ("page_size", 1, 256),
            ("max_running_requests", 1, 4096),
            ("max_queued_requests", 1, 1 << 20),
            ("chunked_prefill_size", 1, 1 << 20),
            ("max_model_len", 0, 1 << 24),
            ("max_total_tokens", 0, 1 << 31),
            ("num_threads", 0, 1024),
            ("mem_fraction_static", 0.01, 0.99),
            ("evict_watermark", 0.0, 0.9),
            ("pin_budget", 0.0, 1.0),
            ("request_timeout_s", 0.0, 1e9),
        )
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} must be from {low} to {high}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that the HTTP face needs to know beside the engine."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on; 0 takes a free one and prints it."""
    served_model_name: str = ""
    """Name that clients use; empty: derived from the model."""
    api_keys: tuple[str, ...] = ()
    """Keys that may generate; empty: no key needed."""
    admin_api_key: str = ""
    """Key for flush, abort and server_info; empty: the ordinary keys may."""
    tool_call_parser: str = ""
    """Form of tool calls in the model's text; empty: chosen from the template."""
    reasoning_parser: str = ""
    """Form of reasoning in the model's text; empty: chosen from the template."""
    max_body_bytes: int = 16 << 20
    """Largest request body."""
    drain_timeout_s: float = 30.0
    """How long running requests may finish after SIGTERM."""

    def __post_init__(self) -> None:
        """Raise UsageError for a key that no request could carry in a header. The key itself is not shown."""
        for name, keys in (("api_keys", self.api_keys), ("admin_api_key", filter(None, (self.admin_api_key,)))):
            if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
                raise UsageError(f"{name} must be printable ASCII characters without spaces, at least one")
