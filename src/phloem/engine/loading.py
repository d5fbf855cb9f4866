"""From an EngineConfig to the parts of an engine: model, runner, cache, scheduler, and what was decided on the way.

Owns the sizing of the KV pool and the choice of the runner. Must not know HTTP or the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phloem.config import EngineConfig
from phloem.errors import StartupError, UsageError
from phloem.kv.manager import KVCacheManager
from phloem.models.load import LoadedModel, load_model
from phloem.models.spec import ModelSpec
from phloem.models.tokenizer import Tokenizer
from phloem.runner.kv_buffers import kv_bytes_per_token
from phloem.sched.scheduler import Scheduler
from phloem.types import ModelRunner

Progress = Callable[[str, float], None]

_MIN_KV_TOKENS = 256
_MAX_DEFAULT_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that an engine thread needs, and a description of it for people."""

    config: EngineConfig
    scheduler: Scheduler
    runner: ModelRunner
    tokenizer: Tokenizer
    model_name: str
    description: dict[str, object]


def load_parts(
    config: EngineConfig,
    progress: Progress | None = None,
    make_manager: Callable[..., KVCacheManager] = KVCacheManager,
) -> EngineParts:
    """Load the model and build what serves it. Blocks for as long as reading the weights takes.

    `make_manager` takes the arguments of KVCacheManager; benchmarks compare other caches through it.
    Raises StartupError (CheckpointError for the files, UsageError for flags) with a remedy in the message.
    """
    report = progress or (lambda _stage, _fraction: None)
    free_bytes = available_memory()
    model = open_model(config, report)
    spec = model.spec
    max_model_len = served_length(config, spec)
    weight_bytes = model.weight_bytes
    token_bytes = kv_bytes_per_token(spec, config.kv_cache_dtype)
    num_pages = size_pool(config, free_bytes, weight_bytes, token_bytes)
    num_slots = num_pages * config.page_size
    runner, facts = _make_runner(config, model, num_slots=num_slots, max_model_len=max_model_len, report=report)
    manager = make_manager(
        num_pages=num_pages,
        page_size=config.page_size,
        eviction_policy=config.eviction_policy,
        evict_watermark=config.evict_watermark,
        pin_budget=config.pin_budget,
    )
    scheduler = Scheduler(
        manager,
        max_model_len=max_model_len,
        max_running=config.max_running_requests,
        max_waiting=config.max_queued_requests,
        chunk_size=config.chunked_prefill_size,
        policy=config.schedule_policy,
    )
    description: dict[str, object] = {
        "model": model.name,
        "architecture": spec.architecture,
        "weight_bytes": weight_bytes,
        "kv_tokens": num_slots,
        "kv_bytes_per_token": token_bytes,
        "kv_cache_dtype": config.kv_cache_dtype,
        "page_size": config.page_size,
        "max_model_len": max_model_len,
        **facts,
    }
    return EngineParts(config, scheduler, runner, model.tokenizer, model.name, description)


def open_model(config: EngineConfig, report: Progress | None = None) -> LoadedModel:
    """The checkpoint that a configuration names, mapped and not yet read."""
    return load_model(
        config.model,
        max_len=config.max_model_len,
        chat_template=_read_template(config.chat_template),
        dummy=config.load_format == "dummy",
        progress=(lambda news: report(*news)) if report else None,
    )


def served_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Longest request in tokens: as asked, else the model's own up to a limit."""
    return config.max_model_len or min(spec.max_position_embeddings, _MAX_DEFAULT_CONTEXT)


def available_memory() -> int:
    """Bytes that this process may still take: what the system has free, or its control group where that is less."""
    free = _meminfo_available()
    limit, used = (_read_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StartupError("cannot read the free memory from /proc/meminfo; give the KV pool's size as --max-total-tokens")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_template(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--chat-template {path}: cannot read it ({error.__class__.__name__}); give a Jinja file"
        ) from None


def size_pool(config: EngineConfig, free_bytes: int, weight_bytes: int, token_bytes: int) -> int:
    """Pages of the pool: as asked, or what the memory share leaves beside the weights."""
    if config.max_total_tokens:
        needed = config.max_total_tokens * token_bytes
        if needed > free_bytes:
            fits = max(0, free_bytes // token_bytes)
            raise StartupError(
                f"a KV pool of {config.max_total_tokens} tokens needs {needed >> 20} MiB, but only "
                f"{free_bytes >> 20} MiB are free; set --max-total-tokens to {fits} or less"
            )
        return max(1, config.max_total_tokens // config.page_size)
    budget = int(free_bytes * config.mem_fraction_static) - weight_bytes
    if budget < _MIN_KV_TOKENS * token_bytes:
        raise StartupError(
            f"too little memory: the weights take {weight_bytes >> 20} MiB and --mem-fraction-static "
            f"{config.mem_fraction_static} of the {free_bytes >> 20} MiB free leaves no room for a KV pool of "
            f"{_MIN_KV_TOKENS} tokens; free some memory, raise --mem-fraction-static or take a smaller model"
        )
    return budget // (token_bytes * config.page_size)


def _make_runner(
    config: EngineConfig, model: LoadedModel, *, num_slots: int, max_model_len: int, report: Progress
) -> tuple[ModelRunner, dict[str, object]]:
    """The runner that the configuration asks for. Imports back ends only when they are used."""
    if config.backend == "torch":
        return _make_torch_runner(config, model, num_slots=num_slots, max_model_len=max_model_len, report=report)
    from phloem.runner.native_runner import NativeRunner
    from phloem.runner.weight_cache import WeightCache

    folder = None if config.load_format == "dummy" else _weight_cache_folder(config)
    runner = NativeRunner(
        model.spec,
        model.weights,
        num_slots=num_slots,
        kv_cache_dtype=config.kv_cache_dtype,
        num_threads=config.num_threads,
        isa=config.isa,
        group_shared_prefixes=config.group_shared_prefixes,
        quantization=config.quantization,
        max_len=max_model_len,
        weight_cache=WeightCache(folder, model.path) if folder else None,
        progress=lambda share: report("packing the weights", share),
    )
    return runner, {"backend": "native", "device": "cpu", **runner.describe()}


def _weight_cache_folder(config: EngineConfig) -> Path | None:
    """Where packed weights are kept; None: nowhere."""
    if config.weight_cache_dir is not None:
        return Path(config.weight_cache_dir).expanduser() if config.weight_cache_dir else None
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches or os.path.expanduser("~/.cache")) / "phloem"


def _make_torch_runner(
    config: EngineConfig, model: LoadedModel, *, num_slots: int, max_model_len: int, report: Progress
) -> tuple[ModelRunner, dict[str, object]]:
    try:
        from phloem.runner.torch_runner import TorchRunner
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--backend torch needs {error.name}, which is not installed: install phloem with its extra 'torch'"
        ) from error
    if config.kv_cache_dtype == "int8":
        raise UsageError("--backend torch keeps K/V as f16 or f32, not int8")
    report("building the torch decoder", 0.8)
    runner = TorchRunner(model.spec, model.weights, num_slots, max_len=max_model_len, kv_dtype=config.kv_cache_dtype)
    return runner, {"backend": "torch", "device": "cpu"}
