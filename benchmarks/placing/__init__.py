"""A search for arenas smaller than those of the greedy orders of `fxremat.planner.addresses`."""

from __future__ import annotations

from benchmarks.placing.placing import place

__all__ = ["place"]
