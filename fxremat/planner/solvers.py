"""The solvers by name. A module is imported when its solver is asked for, and not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner.options import SolverOptions

Solver = Callable[[Problem, int | None, SolverOptions], Plan]

SOLVERS: dict[str, str | Solver] = {
    "auto": "fxremat.planner.auto:solve",
    "moments": "fxremat.planner.milp.moments:solve",
    "greedy": "fxremat.planner.local.greedy:solve",
    "quick": "fxremat.planner.local.greedy:quick",
    "checkmate": "fxremat.planner.published.checkmate.checkmate:solve",
    "checkmate_pruned": "fxremat.planner.published.checkmate.checkmate:solve_pruned",
    "rotor": "fxremat.planner.published.chains.rotor:solve",
    "pofo": "fxremat.planner.published.chains.pofo:solve",
    "rockmate": "fxremat.planner.published.chains.rockmate:solve",
    "hrockmate": "fxremat.planner.published.hrockmate.hrockmate:solve",
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
