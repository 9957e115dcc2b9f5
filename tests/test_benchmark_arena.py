"""Recorded steps leave little of an arena and its pool unused."""

from __future__ import annotations

import statistics

from benchmarks import arena


def test_little_is_unused_in_recorded_steps() -> None:
    """The verifier has passed each layout."""
    rows = [arena.measured(name, run) for name, run in arena.recorded_runs()]
    assert len(rows) == 13
    unused = [row.unused for row in rows]
    assert min(unused) >= 0
    assert statistics.median(unused) <= 0.015
    assert max(unused) <= 0.03
    assert all(row.arena_bytes + row.pool_bytes < row.best_fit_bytes for row in rows)
