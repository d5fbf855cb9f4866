"""What a configuration would serve on this machine, found out without packing weights or starting an engine.

Owns the question only; the answers are those of loading and of the runner. Must not know how fast the machine is.
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.config import EngineConfig
from phloem.engine.loading import available_memory, open_model, served_length, size_pool
from phloem.runner.footprint import Footprint, footprint


@dataclass(frozen=True, slots=True)
class Outlook:
    """A model, what it costs, and how many tokens the KV pool would hold."""

    name: str
    architecture: str
    num_parameters: int
    max_model_len: int
    kv_tokens: int
    cost: Footprint


def look(config: EngineConfig) -> Outlook:
    """Raise what a start with this configuration would raise for its model, its flags or the memory."""
    free_bytes = available_memory()
    model = open_model(config)
    cost = footprint(model.spec, model.weights, config.quantization, config.kv_cache_dtype)
    num_pages = size_pool(config, free_bytes, cost.weight_bytes, cost.kv_bytes_per_token)
    return Outlook(
        model.name,
        model.spec.architecture,
        model.spec.num_parameters,
        served_length(config, model.spec),
        num_pages * config.page_size,
        cost,
    )
