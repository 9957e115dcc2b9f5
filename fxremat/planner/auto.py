"""The default solver: `moments` first, then others where that leaves a gap.

These are `checkmate` on small problems, and `hrockmate`. Each starts from the best plan so far.
What one proves holds for the others' plans.
"""

from __future__ import annotations

from dataclasses import replace

from fxremat.core.constants import MEASURABLE
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.milp import moments
from fxremat.planner.plans import limit_s, rank
from fxremat.planner.solvers import SolverOptions, named


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    deadline = Deadline(limit_s(problem, options))
    best = _best_of_solvers(problem, budget_bytes, options, deadline)
    if budget_bytes is not None and best.peak_bytes > budget_bytes:
        best = replace(_lower_peak(problem, best, options, deadline), budget_bytes=budget_bytes)
    return replace(best, seconds=deadline.seconds())


def _best_of_solvers(
    problem: Problem, budget_bytes: int | None, options: SolverOptions, deadline: Deadline
) -> Plan:
    """The best of the solvers that it takes."""
    first = replace(options, time_limit_s=deadline.left() / 2)
    best = moments.solve(problem, budget_bytes, first, MEASURABLE / 2)
    if budget_bytes is None:
        return best
    for name in ("checkmate", "hrockmate") if _is_small(problem) else ("hrockmate",):
        if _is_solved(best, problem) or not deadline.running():
            break
        rest = replace(options, start=best.ops, time_limit_s=deadline.left())
        best = _better(best, named(name)(problem, budget_bytes, rest))
    return best


def _lower_peak(problem: Problem, best: Plan, options: SolverOptions, deadline: Deadline) -> Plan:
    """A plan of less peak still, or a proof that not much less will do.

    On small problems the range between the least peak found and the bound is halved. A budget for
    which no plan is found counts as too small there, even if that is not proven.
    """
    low = bound = best.peak_bound_bytes or 0
    small = _is_small(problem)
    while deadline.running() and best.peak_bytes - low > MEASURABLE * best.peak_bytes:
        halved, less = (low + best.peak_bytes) // 2, int(constants.LESS * best.peak_bytes)
        budget = halved if small else less
        part = Deadline(deadline.left() / 2)
        plan = _best_of_solvers(problem, budget, replace(options, start=None), part)
        bound = max(bound, plan.peak_bound_bytes or 0)
        low = max(bound, budget if plan.peak_bytes > budget else low)
        if plan.peak_bytes < best.peak_bytes:
            best = plan
        elif not small:
            break
    return replace(best, peak_bound_bytes=bound, time_bound_us=None)


def _is_small(problem: Problem) -> bool:
    """Whether few ops may run again in few stages, so that programmes decide what is feasible."""
    model = IndexedProblem(problem)
    repeats = (
        max((op, *(model.last_needs[value] for value in model.writes[op]))) - op
        for op in range(model.n)
        if model.repeatable[op]
    )
    return sum(repeats) <= 2 * constants.MANY_COLUMNS


def _is_solved(plan: Plan, problem: Problem) -> bool:
    """Whether the plan is optimal but for a small gap, or proven that none fits."""
    assert plan.budget_bytes is not None
    if plan.peak_bytes > plan.budget_bytes:
        return plan.peak_bound_bytes is not None and plan.peak_bound_bytes > plan.budget_bytes
    bound = plan.time_bound_us or problem.base_time_us
    return plan.time_us - bound <= MEASURABLE * problem.base_time_us


def _better(one: Plan, other: Plan) -> Plan:
    """The better plan, with what both prove."""
    both = one, other
    best = min(both, key=lambda plan: rank(plan, one.budget_bytes))
    times = (plan.time_bound_us for plan in both if plan.time_bound_us is not None)
    peaks = (plan.peak_bound_bytes for plan in both if plan.peak_bound_bytes is not None)
    least = max(peaks, default=None)
    return replace(best, time_bound_us=max(times, default=None), peak_bound_bytes=least)
