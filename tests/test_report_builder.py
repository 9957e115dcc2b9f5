"""What a report says of a plan holds for the problem that the report has."""

from __future__ import annotations

from dataclasses import replace

from fxremat.compile.report_builder import by_the_bytes_of
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.local import greedy
from fxremat.planner.solvers import SolverOptions
from tests.chains import homogeneous


def with_more_scratch(problem: Problem, nbytes: int) -> Problem:
    ops = (replace(op, workspace_bytes=op.workspace_bytes + nbytes) for op in problem.ops)
    return replace(problem, ops=tuple(ops))


def test_a_plan_that_was_made_by_more_bytes() -> None:
    problem = homogeneous(6)
    told = with_more_scratch(problem, 100)
    made = replace(greedy.solve(told, 0, SolverOptions()), peak_bound_bytes=10**9)
    reported = by_the_bytes_of(problem, made)
    assert reported.peak_bytes == replay(problem, made.steps).peak_bytes < made.peak_bytes
    assert reported.peak_bound_bytes is None
    assert replace(reported, peak_bytes=made.peak_bytes, peak_bound_bytes=10**9) == made


def test_a_plan_of_the_same_problem_stays_as_it_is() -> None:
    problem = homogeneous(6)
    plan = greedy.solve(problem, 0, SolverOptions())
    assert by_the_bytes_of(problem, plan) is plan
