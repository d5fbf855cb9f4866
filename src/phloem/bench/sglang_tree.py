"""SGLang's two trees as players of `phloem bench tree`, where the reader has sglang installed.

Owns the calls to its public interface (match_prefix, lock, alloc, evict, insert, unlock), as its scheduler makes them
for one request, with its own allocator of slots. Must not be imported by anything but the benchmark.
"""

from __future__ import annotations

import sys
from array import array
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phloem.bench.tree import Call


def _module(name: str) -> Any:
    # SGLang imports torchvision, which stops on a CPU where its compiled operators do not load: this table of their
    # shapes is all that needs them, and nothing that a tree calls.
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
    return import_module(f"sglang.srt.mem_cache.{name}")


def why_not() -> str:
    """'' when SGLang's trees can be played here, else the reason."""
    if find_spec("sglang") is None:
        return "sglang is not installed"
    try:
        _module("unified_radix_cache")
    except (ImportError, RuntimeError) as error:
        return f"sglang does not import: {error}"
    return ""


class SGLangPlayer:
    """Serves whole requests: match, lock, allocate, insert prompt and answer when finished, unlock."""

    def __init__(self, num_pages: int, *, unified: bool = False) -> None:
        """`unified`: the default UnifiedRadixCache on its Rust core, else the Python RadixCache."""
        torch = import_module("torch")
        self._torch, self._base, self._radix = torch, _module("base_prefix_cache"), _module("radix_cache")
        self._slots = _module("allocator.token").TokenToKVPoolAllocator(num_pages, torch.int64, "cpu", None, False)
        parameters = _module("cache_init_params").CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self._slots, page_size=1
        )
        if unified:
            parameters.tree_components = (_module("unified_cache.component_type").ComponentType.FULL,)
            parameters.tree_core_backend = "rust"
            self._cache = _module("unified_radix_cache").UnifiedRadixCache(parameters)
            core = type(self._cache.tree_core).__name__
            assert core == "RustUnifiedTreeCore", core  # it falls back to Python without a word
        else:
            self._cache = self._radix.RadixCache(parameters)

    def serve(self, call: Call) -> int:
        """Return the prompt tokens that were cached."""
        cache, base = self._cache, self._base
        tokens = array("q", call.tokens.tolist())
        prompt = self._radix.RadixKey(tokens, limit=call.num_prompt)
        match = cache.match_prefix(base.MatchPrefixParams(key=prompt))
        length = match.device_prefix_len
        lock = cache.lock(match.last_device_node)
        needed = len(tokens) - length
        missing = needed - self._slots.available_size()
        if missing > 0:
            cache.evict(base.EvictParams(num_tokens=missing))
        fresh = self._slots.alloc(needed)
        assert fresh is not None
        slots = self._torch.cat([cache.path_device_indices(match.last_device_node), fresh])
        key = self._radix.RadixKey(tokens)
        cache.insert(base.InsertParams(key=key, value=slots, prev_prefix_len=length, inserted_len=length))
        cache.unlock(lock)
        return int(length)
