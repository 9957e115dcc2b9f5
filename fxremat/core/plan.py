"""A plan: a schedule with where it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxremat.core.problem import InvalidProblem
from fxremat.core.schedule import Move, Step, ops_of, step_from_json, step_to_json


@dataclass(frozen=True)
class Plan:
    """Steps in the order they run, and what is claimed of them.

    ``peak_bytes``, ``time_us`` and ``energy_uj`` are those of replaying ``steps``.
    ``variants`` are the variants taken (`fxremat.core.variants.take`): steps, figures and
    bounds are those of the problem that is left then.
    ``time_bound_us`` is a proven lower bound on the time of every schedule within the budget, and
    ``peak_bound_bytes`` one on the peak of every schedule; None says that nothing was proven.
    """

    steps: tuple[Step, ...]
    solver: str
    budget_bytes: int | None
    peak_bytes: int
    time_us: float
    seconds: float = 0.0
    time_bound_us: float | None = None
    peak_bound_bytes: int | None = None
    energy_uj: float = 0.0
    variants: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops in the order they run, without the moves."""
        return ops_of(self.steps)

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves in the order they are started and waited for."""
        return tuple(step for step in self.steps if isinstance(step, Move))

    def repeats(self) -> Counter[str]:
        """How many times each op runs beyond the first."""
        counts = Counter(self.ops)
        return Counter({name: count - 1 for name, count in counts.items() if count > 1})


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data; ``steps`` as in `fxremat.core.schedule`."""
    return {
        "steps": [step_to_json(step) for step in plan.steps],
        "solver": plan.solver,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "time_us": plan.time_us,
        "seconds": plan.seconds,
        "time_bound_us": plan.time_bound_us,
        "peak_bound_bytes": plan.peak_bound_bytes,
        **({"energy_uj": plan.energy_uj} if plan.energy_uj else {}),
        **({"variants": list(plan.variants)} if plan.variants else {}),
    }


def variants_from_json(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The variants that a plan file takes."""
    names = data.get("variants", []) if isinstance(data, Mapping) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidProblem("plan: field 'variants' must be a list of names")
    return tuple(names)


def steps_from_json(data: Mapping[str, Any]) -> tuple[Step, ...]:
    """The steps of a plan file; its other fields are claims, to be replayed, not read."""
    steps = data.get("steps") if isinstance(data, Mapping) else None
    if not isinstance(steps, list):
        raise InvalidProblem("plan: field 'steps' must be a list of op names and moves")
    return tuple(step_from_json(step, f"plan: field 'steps'[{i}]") for i, step in enumerate(steps))
