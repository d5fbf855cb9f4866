"""Typed face of the native free list of pages. The tree has a pool of its own; this one serves whoever else needs
fixed ids (tiers, tests).

Owns nothing; must not know tokens or nodes.
"""

from __future__ import annotations

from phloem._tree import PagePool

__all__ = ["PagePool"]
