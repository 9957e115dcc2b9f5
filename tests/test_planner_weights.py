"""Which weights live in host memory: few, and only where that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Problem, validate
from fxremat.core.schedule import store_all
from fxremat.planner import SolverOptions
from fxremat.planner.moves import offload
from fxremat.planner.moves.host_weights import Selection, on_host, ranked, select
from tests.chains import chain_with_host_weights


def resident(layers: int, rate: float = 10.0) -> tuple[Problem, dict[str, str | None]]:
    """The layers with their weights on the device, and the gradient of each weight."""
    problem = chain_with_host_weights(layers, rate=rate)
    weights: dict[str, str | None] = {f"w{i}": f"g{i}" for i in range(layers)}
    gradients = tuple(f"g{i}" for i in range(layers))
    outputs = (*problem.outputs, *gradients)
    return validate(replace(problem, host=(), resident=tuple(weights), outputs=outputs)), weights


def full_peak(problem: Problem) -> int:
    return check(problem, store_all(problem)).peak_bytes


def selected(problem: Problem, weights: dict[str, str | None], budget: int) -> Selection:
    def plan_for(question: Problem) -> Plan:
        validate(question)
        plan = offload.quick(question, budget, SolverOptions())
        assert check(question, plan.steps).ok
        return plan

    return select(problem, weights, budget, plan_for)


def test_on_host_is_the_problem_with_weights_that_come_and_go() -> None:
    problem, weights = resident(4)
    moved = on_host(problem, weights)
    assert {*moved.host} == {*weights, *filter(None, weights.values())}
    assert validate(moved).resident == ()
    assert moved.outputs == ("d0",)
    some = on_host(problem, {"w1": "g1"})
    assert some.host == ("w1", "g1")
    assert some.resident == ("w0", "w2", "w3")


def test_what_nobody_reads_stays_away() -> None:
    problem, _ = resident(2)
    unread = replace(problem, ops=tuple(
        replace(op, reads=tuple(r for r in op.reads if r != "w1")) for op in problem.ops
    ))  # fmt: skip
    assert on_host(unread, {"w1": None}).host == ()


def test_much_work_for_few_bytes_comes_first() -> None:
    problem, weights = resident(3)
    ops = tuple(replace(op, time_us=99.0) if op.name == "b1" else op for op in problem.ops)
    assert ranked(replace(problem, ops=ops), weights)[0] == "w1"


def test_with_room_no_weight_moves() -> None:
    problem, weights = resident(4)
    chosen = selected(problem, weights, full_peak(problem))
    assert chosen.weights == ()
    assert chosen.plan.time_us == problem.base_time_us


@pytest.mark.parametrize("part", [0.7, 0.5, 0.4])
def test_weights_move_until_the_budget_is_met(part: float) -> None:
    problem, weights = resident(8)
    budget = int(part * full_peak(problem))
    chosen = selected(problem, weights, budget)
    assert chosen.weights
    assert chosen.plan.peak_bytes <= budget


def test_a_slow_link_moves_no_more_than_it_must() -> None:
    problem, weights = resident(8, rate=0.5)
    budget = int(0.7 * full_peak(problem))
    few = selected(problem, weights, budget)
    assert 0 < len(few.weights) < len(weights)
    assert few.plan.peak_bytes <= budget
    everything = offload.quick(on_host(problem, weights), budget, SolverOptions())
    assert few.plan.time_us < everything.time_us


def test_where_nothing_fits_the_least_peak_is_found() -> None:
    problem, weights = resident(4)
    chosen = selected(problem, weights, 1)
    alone = offload.quick(replace(problem, copies=Copies(0.0, 0.0)), 1, SolverOptions())
    assert chosen.plan.peak_bytes < alone.peak_bytes
