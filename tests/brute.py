"""The best schedules of tiny problems, found the obvious way: the oracle of planner tests.

A node of the search is (first runs done, values held, by name). Every run and every subset of
held values to free after it is tried, so nothing is assumed about when a copy should end.
`least_time` is a shortest path in time over the runs whose bytes fit the budget.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import combinations

import pytest

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem
from fxremat.core.timeline import store_all_peak
from fxremat.planner.indexed_problem import IndexedProblem, peak_bound


def least_time(problem: Problem, budget: int) -> tuple[float, tuple[str, ...]] | None:
    """Least time of any schedule within the budget, and its steps; None where none fits.

    First runs in base order, ops that are not repeatable once, repeats anywhere.
    """
    resident, outputs = set(problem.resident), set(problem.outputs)
    queue: list[tuple[float, int, int, frozenset[str], tuple[str, ...]]] = []
    queue.append((0.0, 0, 0, frozenset(problem.inputs) - resident, ()))
    seen: set[tuple[int, frozenset[str]]] = set()
    pushed = 0
    while queue:
        time, _, done, held, steps = heapq.heappop(queue)
        if (done, held) in seen:
            continue
        seen.add((done, held))
        if done == len(problem.ops):
            return time, steps
        for k, op in enumerate(problem.ops[: done + 1]):
            if k < done and not op.repeatable:
                continue
            if not set(op.reads) - resident <= held:
                continue
            for after in _afters(problem, op, k == done, held, budget, outputs):
                pushed += 1
                now = done + (k == done)
                heapq.heappush(queue, (time + op.time_us, pushed, now, after, (*steps, op.name)))
    return None


def _afters(
    problem: Problem, op: Op, first: bool, held: frozenset[str], budget: int, outputs: set[str]
) -> list[frozenset[str]]:
    """What may be held after the op, if it runs within the budget."""
    live = held | set(op.writes)
    size = problem.resident_bytes + op.workspace_bytes
    size += sum(problem.bytes_of[name] for name in live)
    out = []
    for freed in _subsets(live - outputs):
        shared = sum(
            min(problem.bytes_of[r], problem.bytes_of[w])
            for r, w in op.inplace
            if r in freed and (first or w not in outputs)
        )
        if size - shared <= budget:
            out.append(live - freed)
    return out


def _subsets(items: frozenset[str]) -> list[frozenset[str]]:
    names = sorted(items)
    return [frozenset(c) for size in range(len(names) + 1) for c in combinations(names, size)]


def least_peak(problem: Problem) -> int:
    """The least peak of any schedule, by bisection over budgets."""
    low, high = 0, store_all_peak(problem)
    while low < high:
        middle = (low + high) // 2
        if least_time(problem, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def plain(problem: Problem) -> Problem:
    """The problem with no value in two in-place pairs of an op: brute force counts such twice."""
    ops = []
    for op in problem.ops:
        pairs: list[tuple[str, str]] = []
        for pair in op.inplace:
            if not {*pair} & {name for other in pairs for name in other}:
                pairs.append(pair)
        ops.append(replace(op, inplace=tuple(pairs)))
    return replace(problem, ops=tuple(ops))


def budget_between(problem: Problem, percent: int) -> int:
    """A budget from the bound on the least peak (0) to the peak of store-all (100)."""
    low, high = peak_bound(IndexedProblem(problem)), store_all_peak(problem)
    return low + (high - low) * percent // 100


def fits(plan: Plan) -> bool:
    """Whether the plan keeps to its budget."""
    return plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes


def solved(problem: Problem, budget: int, solver: str = "greedy") -> Plan:
    """What the solver finds, verified."""
    plan = planner.solve(problem, budget, solver)
    verdict = check(problem, plan.steps, budget if plan.peak_bytes <= budget else None)
    assert verdict.ok, str(verdict)
    assert verdict.peak_bytes == plan.peak_bytes
    assert verdict.time_us == pytest.approx(plan.time_us)
    return plan
