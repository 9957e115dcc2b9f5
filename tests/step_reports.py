"""Reports of planned steps for the tests of pictures and files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import fxremat
from fxremat.core.problem import Problem
from fxremat.core.timeline import lifetimes_of, replay
from fxremat.planner import SolverOptions, solve
from fxremat.report.report import Report
from fxremat.report.source_location import Place
from tests.chains import chain_with_copies
from tests.small import Stack, seeded


@cache
def rehearsed() -> Report:
    """Of a small model, with Inductor's kernels."""
    return _explained("inductor")


@cache
def planned() -> Report:
    """Of a small model, run node by node: its storages are the values of the problem."""
    return _explained("aot_eager")


def _explained(executor: str) -> Report:
    model, x = seeded(Stack, 256, 32)
    options = {"executor": executor, "op_times": "roofline"}
    full = fxremat.explain(model, x, options=options).keep_all_peak_bytes
    budget = full * 7 // 10
    return fxremat.explain(model, x, memory_budget=budget, options=options).graphs[0]


@cache
def moving() -> Report:
    """Of a chain whose values go to host memory and come back."""
    problem = chain_with_copies(8)
    plan = solve(problem, 507, "greedy", SolverOptions())
    assert plan is not None
    assert plan.moves
    return of_problem(problem, replace(planned(), graph=3, plan=plan))


def of_problem(problem: Problem, report: Report) -> Report:
    """The report as if its plan were of this problem."""
    timeline = replay(problem, report.plan.steps)
    return replace(
        report,
        problem=problem,
        timeline=timeline.live_bytes,
        lifetimes=lifetimes_of(timeline),
        making=tuple(map(str, timeline.steps)),
        places={problem.ops[0].writes[0]: Place("layers.0", "net.py", 7)},
    )
