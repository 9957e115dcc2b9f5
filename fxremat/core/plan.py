"""A plan: a schedule with where it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxremat.core.problem import InvalidProblem


@dataclass(frozen=True)
class Plan:
    """Steps in the order they run, and what is claimed of them.

    ``peak_bytes`` and ``time_us`` are those of replaying ``steps``. ``time_bound_us`` is a
    proven lower bound on the time of every schedule within the budget, and ``peak_bound_bytes``
    one on the peak of every schedule; None says that nothing was proven.
    """

    steps: tuple[str, ...]
    solver: str
    budget_bytes: int | None
    peak_bytes: int
    time_us: float
    seconds: float = 0.0
    time_bound_us: float | None = None
    peak_bound_bytes: int | None = None

    def repeats(self) -> Counter[str]:
        """How many times each op runs beyond the first."""
        counts = Counter(self.steps)
        return Counter({name: count - 1 for name, count in counts.items() if count > 1})


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data; ``steps`` are op names in the order they run."""
    return {
        "steps": list(plan.steps),
        "solver": plan.solver,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "time_us": plan.time_us,
        "seconds": plan.seconds,
        "time_bound_us": plan.time_bound_us,
        "peak_bound_bytes": plan.peak_bound_bytes,
    }


def steps_from_json(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The steps of a plan file; its other fields are claims, to be replayed, not read."""
    steps = data.get("steps") if isinstance(data, Mapping) else None
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise InvalidProblem("plan: field 'steps' must be a list of op names")
    return tuple(steps)
