"""The soak in its short form: scripts/soak runs ten minutes."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.soak import memory_growth, soak_server


def test_everything_at_once(demo_model: Path) -> None:
    # Too short to judge memory: the pool is still being touched. The other rules hold.
    faults = soak_server(seconds=20.0, at_once=12, flags=(str(demo_model),))
    assert [fault for fault in faults if not fault.startswith("memory grew")] == []


def test_growth_is_seen() -> None:
    assert memory_growth([1, 5, 100, 100, 100, 101, 100, 100, 100]) == 0.0
    assert memory_growth([100, 100, 100, 110, 110, 110, 120, 120, 120]) > 0.05
