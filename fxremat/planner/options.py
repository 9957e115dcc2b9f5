"""Options of every solver, the progress that it reports, and how it refuses a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class ProblemRefused(Exception):
    """A solver cannot take the problem; the message names one that can, or says what is missing."""


@dataclass(frozen=True)
class Progress:
    """How far a solver is: the time of the best plan so far, and a bound on that of every plan."""

    solver: str
    seconds: float
    time_us: float | None
    bound_us: float | None


@dataclass(frozen=True)
class SolverOptions:
    """Limits and the seed; limits count iterations before they count seconds.

    ``time_limit_s`` is None by default: then the plan depends on problem and seed alone.
    ``gap`` is a part of the time of store-all: the solver `moments` does not work on a plan so
    near to its bound; after some rounds, nor on one that is twice as far.
    Where there are variants, the best choice found is ``improved`` by one more or less at a time.
    ``start`` are the steps of a plan to begin with. ``progress`` is called now and then.
    """

    seed: int = 0
    time_limit_s: float | None = None
    gap: float = 0.0
    improved: bool = True
    start: tuple[str, ...] | None = None
    progress: Callable[[Progress], None] | None = field(default=None, compare=False)
