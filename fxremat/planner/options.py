"""What a caller may ask of any solver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SolverOptions:
    """Limits and the seed; limits count iterations before they count seconds.

    ``time_limit_s`` is None by default: then the plan depends on problem and seed alone.
    """

    seed: int = 0
    time_limit_s: float | None = None
