"""Reports of planned steps for the tests of pictures and files."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import fxremat
from fxremat.core.problem import Problem
from fxremat.core.timeline import lifetimes_of, replay
from fxremat.planner import SolverOptions, solve
from fxremat.report.report import MemoryFigures, Report, StepMemory
from fxremat.report.source_location import Place
from tests.chains import chain_with_copies
from tests.small import Stack, seeded


@cache
def rehearsed() -> Report:
    """The report of a small model whose bytes a dry run of Inductor's kernels counted."""
    return _explained("inductor")


@cache
def planned() -> Report:
    """The report of a small model that runs node by node: its storages are the problem's values."""
    return _explained("aot_eager")


def _explained(executor: str) -> Report:
    model, x = seeded(Stack, 256, 32)
    options = {"executor": executor, "op_times": "roofline"}
    full = fxremat.explain(model, x, options=options).keep_all_peak_bytes
    budget = full * 7 // 10
    return fxremat.explain(model, x, memory_budget=budget, options=options).graphs[0]


@cache
def moving() -> Report:
    """The report of a chain whose values go to host memory and come back."""
    problem = chain_with_copies(8)
    plan = solve(problem, 507, "greedy", SolverOptions())
    assert plan is not None
    assert plan.moves
    return of_problem(problem, replace(planned(), graph=3, plan=plan))


def of_problem(problem: Problem, report: Report) -> Report:
    """The report as if its plan were of this problem."""
    timeline = replay(problem, report.plan.steps)
    return altered(
        replace(report, problem=problem),
        live_bytes=timeline.live_bytes,
        lifetimes=lifetimes_of(timeline),
        computed=tuple(map(str, timeline.steps)),
        places={problem.ops[0].writes[0]: Place("layers.0", "net.py", 7)},
    )


def altered(report: Report, **figures: Any) -> Report:
    """The report with other figures of its memory and its step."""
    of_memory = {one.name for one in fields(MemoryFigures)} & set(figures)
    of_step = {one.name for one in fields(StepMemory)} & set(figures)
    assert of_memory | of_step == set(figures)
    return replace(
        report,
        memory=replace(report.memory, **{name: figures[name] for name in of_memory}),
        step=replace(report.step, **{name: figures[name] for name in of_step}),
    )
