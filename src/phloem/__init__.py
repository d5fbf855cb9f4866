"""Phloem: an LLM serving engine for agents, built on one radix tree over the KV cache."""

__version__ = "0.1.0"
