"""A plan: a schedule with where it came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fxremat.core.json_data import InvalidData, from_data
from fxremat.core.problem import InvalidProblem
from fxremat.core.schedule import Move, Step, ops_of


@dataclass(frozen=True)
class Plan:
    """Steps in the order they run, and what is claimed of them.

    ``peak_bytes`` and ``time_us`` are those of replaying ``steps``.
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


@dataclass(frozen=True)
class Claim:
    """What is read of a plan from elsewhere; its other fields are replayed."""

    steps: tuple[Step, ...]
    variants: tuple[str, ...] = ()


def claim_from_json(data: Any) -> Claim:
    """What a plan file says; raises `InvalidProblem`."""
    try:
        return from_data(Claim, data)
    except InvalidData as error:
        raise InvalidProblem(f"plan: {error}") from error
