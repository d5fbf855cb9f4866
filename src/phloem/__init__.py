"""Phloem: an LLM serving engine for agents, built on one radix tree over the KV cache.

Owns the names that a user imports first; each is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phloem.config import EngineConfig
    from phloem.engine.async_engine import AsyncEngine
    from phloem.engine.engine import Engine
    from phloem.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncEngine": "phloem.engine.async_engine",
    "Engine": "phloem.engine.engine",
    "EngineConfig": "phloem.config",
    "SamplingParams": "phloem.types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
