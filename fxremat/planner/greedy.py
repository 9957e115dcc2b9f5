"""The greedy solver: one budget-independent pool of plans, and the choice from it.

The pool does not depend on the budget, so a smaller budget never gives a larger peak nor a
smaller time: the plans that fit a smaller budget are a subset of those that fit a larger one.
"""

from __future__ import annotations

import time
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import levels
from fxremat.planner.model import build_model
from fxremat.planner.options import SolverOptions
from fxremat.planner.pool import Pool

_CACHE_SIZE = 8
_cache: dict[tuple[int, SolverOptions], tuple[Problem, tuple[Plan, ...]]] = {}


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    plans = front(problem, options)
    fits = [p for p in plans if budget_bytes is None or p.peak_bytes <= budget_bytes]
    return replace(fits[0] if fits else plans[-1], budget_bytes=budget_bytes)


def front(problem: Problem, options: SolverOptions) -> tuple[Plan, ...]:
    """The pool of a problem, remembered for the last few problems."""
    key = (id(problem), options)
    # The entry holds the problem, so its id cannot be given to another one meanwhile.
    if key not in _cache:
        while len(_cache) >= _CACHE_SIZE:
            del _cache[next(iter(_cache))]
        _cache[key] = (problem, _search(problem, options))
    return _cache[key][1]


def _search(problem: Problem, options: SolverOptions) -> tuple[Plan, ...]:
    started = time.perf_counter()
    model = build_model(problem)
    pool = Pool(model)
    levels.fill(pool, options.seed, levels.effort_for(model.n))
    return pool.plans("greedy", time.perf_counter() - started)
