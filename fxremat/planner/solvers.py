"""Options of every solver, the progress that it reports, how it refuses; and the solvers by name.

A solver's module is imported when the solver is asked for, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem


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
    """Limits count iterations before they count seconds.

    ``time_limit_s`` is None by default: then the plan depends on the problem alone.
    Where there are variants, the best choice found is ``improved`` by one more or less at a time.
    ``start`` are the steps of a plan to begin with. ``progress`` is called now and then.
    """

    time_limit_s: float | None = None
    improved: bool = True
    start: tuple[str, ...] | None = None
    progress: Callable[[Progress], None] | None = field(default=None, compare=False)


Solver = Callable[[Problem, int | None, SolverOptions], Plan]

SOLVERS: dict[str, str | Solver] = {
    "auto": "fxremat.planner.auto:solve",
    "moments": "fxremat.planner.milp.moments:solve",
    "greedy": "fxremat.planner.local.greedy:solve",
    "quick": "fxremat.planner.local.greedy:quick",
    "checkmate": "fxremat.planner.published.checkmate:solve",
    "checkmate_pruned": "fxremat.planner.published.checkmate:solve_pruned",
    "rotor": "fxremat.planner.published.rotor:solve",
    "pofo": "fxremat.planner.published.pofo:solve",
    "rockmate": "fxremat.planner.published.rockmate:solve",
    "hrockmate": "fxremat.planner.published.hrockmate:solve",
    "moccasin": "fxremat.planner.published.moccasin:solve",
    "poet": "fxremat.planner.published.poet:solve",
    "least_peak": "fxremat.planner.local.greedy:solve_least_peak",
}
"""Each is "module:function", or a function."""

MOVING = frozenset({"pofo", "poet"})
"""Solvers that choose moves themselves; `fxremat.planner.moves.offload` does so for the others."""


def named(name: str) -> Solver:
    """The solver of that name; raises `ValueError` with the names there are."""
    if name not in SOLVERS:
        raise ValueError(f"unknown solver {name!r}; there are {', '.join(SOLVERS)}")
    found = SOLVERS[name]
    if isinstance(found, str):
        module, function = found.split(":")
        solver: Solver = getattr(importlib.import_module(module), function)
        return solver
    return found
