"""POFO: recomputing and moving weighed against each other on chains, judged by the checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat import planner
from fxremat.core.problem import Copies, Op, Problem, Value, validate
from fxremat.core.timeline import replay, store_all_peak
from fxremat.planner.moves.offload import movable
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.planner.published import rockmate, rotor
from fxremat.planner.published.chain import NotAChain
from fxremat.planner.solvers import SolverOptions
from tests import brute, chains, strategies
from tests.examples import examples

OPTIONS = SolverOptions()


def net(layers: int, rate: float = 10.0, time_us: float = 10.0) -> Problem:
    """A chain whose values may be copied, at a rate both ways."""
    return validate(chains.chain_with_copies(layers, time_us=time_us, copies=Copies(rate, rate)))


def part_of(problem: Problem, part: float) -> int:
    """A part of the bytes that store-all needs."""
    return int(part * store_all_peak(problem))


solved = partial(brute.solved, solver="pofo")


# -- literal chains --------------------------------------------------------------------------


def test_three_values_leave_and_come_back_one_at_a_time() -> None:
    """507 bytes: what three layers hold, and one value on its way. Nothing is waited for."""
    problem = net(6)
    plan = solved(problem, 507)
    assert [str(step) for step in plan.steps] == [
        "f0", "to host: x1", "f1", "to host: x2", "wait: x1", "f2", "to host: x3", "wait: x2",
        "f3", "wait: x3", "f4", "f5", "loss",
        "b5", "to device: x3", "b4", "to device: x2", "wait: x3", "b3", "to device: x1",
        "wait: x2", "b2", "wait: x1", "b1", "b0",
    ]  # fmt: skip
    assert (plan.peak_bytes, plan.time_us) == (507, problem.base_time_us)


def test_a_slow_link_moves_nothing() -> None:
    """To move a value takes 50 us, out and back; to compute it again takes 10 us."""
    plan = solved(net(4, rate=2.0), 507)
    assert plan.steps == ("f0", "f1", "f2", "f3", "loss", "b3", "f1", "b2", "b1", "b0")


@pytest.mark.slow
def test_more_bandwidth_is_never_slower() -> None:
    """A link of middling speed moves some and recomputes some."""
    budget = part_of(net(12), 0.5)
    plans = [solved(net(12, rate), budget) for rate in (0.0, 2.0, 4.0, 16.0)]
    times = [plan.time_us for plan in plans]
    assert times == sorted(times, reverse=True)
    assert plans[2].moves
    assert len(plans[2].ops) > len(net(12).ops)
    assert times[0] == rotor.solve(net(12), budget, OPTIONS).time_us > times[2]
    assert times[-1] == net(12).base_time_us


# -- against other plans ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "copies",
    [None, Copies(0.0, 0.0), Copies(5.0, 0.0), Copies(0.0, 5.0), Copies(5.0, 5.0, only_host=True)],
)
@pytest.mark.parametrize("part", [0.5, 0.7, 1.0])
def test_rotors_plan_where_nothing_may_move(copies: Copies | None, part: float) -> None:
    problem = replace(net(8), copies=copies)
    plan = solved(problem, part_of(problem, part))
    assert plan.steps == rotor.solve(problem, part_of(problem, part), OPTIONS).steps
    assert plan.solver == "pofo"


RATES = st.sampled_from((0.3, 1.0, 4.0))


@pytest.mark.slow
@examples(10)
@given(chains.chains(), RATES, RATES, st.floats(0.3, 1.0))
def test_never_slower_than_rotor(problem: Problem, out: float, back: float, part: float) -> None:
    problem = replace(problem, copies=Copies(out, back, latency_us=0.5))
    budget = part_of(problem, part)
    plan, alone = solved(problem, budget), rotor.solve(problem, budget, OPTIONS)
    assert plan.peak_bytes <= max(budget, alone.peak_bytes)
    assert alone.peak_bytes > budget or plan.time_us <= alone.time_us
    assert plan.peak_bound_bytes is not None
    assert plan.peak_bound_bytes <= plan.peak_bytes
    assert plan.time_bound_us == problem.base_time_us


@examples(15)
@given(strategies.problems(min_ops=4, max_ops=10), st.floats(0.3, 1.0))
def test_any_problem_is_solved_or_refused(problem: Problem, part: float) -> None:
    """Workspaces, in-place writes, outputs and ops that run once, in any arrangement."""
    problem = replace(problem, copies=Copies(1.0, 2.0))
    try:
        solved(problem, part_of(problem, part))
    except NotAChain:
        return


# -- against brute force ---------------------------------------------------------------------


def brute_time(problem: Problem, budget: int) -> float:
    """The least time of the schedules of Rotor and Rockmate, with any values moved."""
    alone, orders = replace(problem, copies=None), {problem.base_steps()}
    for solver in (rotor, rockmate):
        orders |= {plan.ops for plan in solver.whole_front(alone, OPTIONS)}
    can = [name for op in movable(problem) for name in problem.op_of[op].writes]
    can = [name for name in can if problem.op_of[problem.writer_of[name]].phase != "backward"]
    subsets = [set(some) for k in range(len(can) + 1) for some in combinations(can, k)]
    found = (fetched(problem, ops, moved) for ops in sorted(orders) for moved in subsets)
    lines = (place(problem, items, budget) for items in found)
    return min((x.time_us for x in lines if x.peak_bytes <= budget), default=float("inf"))


def fetched(problem: Problem, ops: Sequence[str], moved: set[str]) -> list[Item]:
    """The ops, with the moved values fetched for their first reader in the backward."""
    items: list[Item] = []
    away, turned = set[str](), False
    for name in ops:
        op = problem.op_of[name]
        if op.phase == "backward" and not turned:
            away, turned = set(moved), True
        items += [Fetch(read) for read in op.reads if read in away]
        away -= {*op.reads, *op.writes}
        items.append(name)
    return items


TINY = [
    ([3, 5, 2], [1.0, 2.0, 3.0]),
    ([2, 2, 2, 2], [4.0, 1.0, 1.0, 3.0]),
    ([6, 4, 3, 2], [2.0, 5.0, 1.0, 1.0]),
    ([2, 6, 2, 6], [1.0, 3.0, 1.0, 3.0]),
]


@pytest.mark.slow
def test_near_the_best_of_all_choices_of_what_moves() -> None:
    """The same schedule or as fast mostly, and never far from it."""
    slower = []
    for sizes, times in TINY:
        for rate in (0.5, 2.0):
            problem = replace(chains.chain(sizes, times), copies=Copies(rate, rate))
            for budget in (part_of(problem, 0.75), part_of(problem, 0.85)):
                best = brute_time(problem, budget)
                plan = solved(problem, budget)
                if best < float("inf"):
                    assert plan.peak_bytes <= budget
                    slower.append(plan.time_us / best - 1)
    assert max(slower) <= 0.1
    assert sum(part <= 0 for part in slower) >= 0.8 * len(slower)


# -- what moves ------------------------------------------------------------------------------


def test_the_host_has_limits() -> None:
    """With room for some values some move: the plan is between the others."""
    budget = part_of(net(10), 0.5)
    times = []
    for cap in (0, 150, 250, 10_000):
        few = replace(net(10), copies=Copies(10.0, 10.0, host_bytes=cap))
        plan = solved(few, budget)
        assert replay(few, plan.steps).host_peak_bytes <= cap
        times.append(plan.time_us)
    assert times == sorted(times, reverse=True)
    assert times[0] == rotor.solve(net(10), budget, OPTIONS).time_us
    assert times[0] > times[1] > times[2] > times[3] == net(10).base_time_us


def dropped(layers: int) -> Problem:
    """A chain whose layers draw masks: these cannot be drawn again."""
    problem = net(layers)
    ops: list[Op] = []
    for op in problem.ops:
        if op.phase == "forward":
            ops.append(Op(f"draw{op.name}", (), (f"m{op.name}",), 1.0, 0, "forward", False))
            op = replace(op, reads=(*op.reads, f"m{op.name}"))
        elif op.name != "loss":
            op = replace(op, reads=(*op.reads, f"mf{op.name[1:]}"))
        ops.append(op)
    masks = tuple(Value(f"mf{k}", 60) for k in range(layers))
    return validate(replace(problem, values=problem.values + masks, ops=tuple(ops)))


def test_values_that_cannot_be_computed_again_move() -> None:
    problem = dropped(10)
    budget = part_of(problem, 0.45)
    assert rotor.solve(problem, budget, OPTIONS).peak_bytes > budget
    plan = solved(problem, budget)
    assert plan.peak_bytes <= budget
    assert any(move.value.startswith("mf") for move in plan.moves)


# -- limits ----------------------------------------------------------------------------------


def test_weights_in_host_memory_are_refused_with_advice() -> None:
    problem = replace(net(4), resident=(), host=("w",))
    with pytest.raises(planner.ProblemRefused, match=r"w lives in host memory.*'auto'"):
        planner.solve(problem, 10, "pofo")
