"""Moves in plans: placed in time, judged by the checker, and never slower than without."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.problem import Copies, Op, Problem, Value
from fxremat.core.schedule import Move, ops_of, store_all
from fxremat.core.timeline import replay
from fxremat.planner import SolverOptions
from fxremat.planner.deadline import Deadline
from fxremat.planner.moves import offload
from fxremat.planner.moves.time_bound import relax
from fxremat.planner.moves.transfers import Fetch, Item, place, synchronous
from tests.budgets import solved
from tests.chains import TEN_BYTES_PER_US, chain_with_copies, chain_with_host_weights
from tests.examples import examples
from tests.strategies import problems, schedules


def moved_away(problem: Problem, *names: str) -> list[Item]:
    """Base order, with the named values fetched before their last reader."""
    last = {name: op.name for op in problem.ops for name in op.reads}
    items: list[Item] = []
    for op in problem.ops:
        items += [Fetch(name) for name in names if last[name] == op.name]
        items.append(op.name)
    return items


def test_a_value_leaves_at_once_and_comes_back_in_time() -> None:
    """x1 leaves during f1 and f2 alone; it comes back during b2, for b1."""
    problem = chain_with_copies(3)
    line = place(problem, moved_away(problem, "x1"), None)
    assert [str(step) for step in line.steps] == [
        "f0", "to host: x1", "f1", "wait: x1", "f2", "loss", "to device: x1", "b2", "wait: x1",
        "b1", "b0",
    ]  # fmt: skip
    assert line.time_us == problem.base_time_us
    assert line.timing.stall_us == 0.0
    assert check(problem, line.steps).ok


def test_what_one_op_writes_leaves_in_the_order_it_is_written() -> None:
    """In that of no set of names, which is another in each process."""
    names = tuple(f"v{k}" for k in range(8))
    values = (*(Value(name, 10) for name in names), Value("out", 1))
    ops = (Op("f", (), names, 1.0), Op("g", (), ("out",), 90.0), Op("h", names, (), 1.0))
    problem = Problem("wide", values, ops, outputs=("out",), copies=TEN_BYTES_PER_US)
    line = place(problem, ["f", "g", *map(Fetch, names), "h"], None)
    left = [step.value for step in line.steps if isinstance(step, Move) and step.kind == "to host"]
    assert left == [*names]


def test_without_room_a_value_comes_back_late() -> None:
    """The peak of 407 is at b2, which needs three values of the four: x1 must wait for it."""
    problem = chain_with_copies(3)
    items = moved_away(problem, "x1")
    least = replay(problem, synchronous(problem, items)).peak_bytes
    line = place(problem, items, least)
    assert line.peak_bytes == least < replay(problem, problem.base_steps()).peak_bytes
    assert line.timing.stall_us == 10.0


def test_transfers_of_one_direction_queue() -> None:
    problem = chain_with_copies(6, copies=Copies(5.0, 5.0))
    line = place(problem, moved_away(problem, "x1", "x2", "x3"), 10**6)
    out = [t for t in line.timing.transfers if t.kind == "to host"]
    assert [t.value for t in out] == ["x1", "x2", "x3"]
    assert all(a.end_us <= b.start_us for a, b in pairwise(out))
    back = [t.value for t in line.timing.transfers if t.kind == "to device"]
    assert back == ["x3", "x2", "x1"]
    assert line.timing.stall_us == 0.0


@pytest.mark.parametrize("solver", ["greedy", "auto", "moments", "checkmate_pruned", "hrockmate"])
def test_every_solver_moves(solver: str) -> None:
    problem = chain_with_copies(8)  # b6 takes 407 bytes, and 100 to fetch the next value meanwhile
    plan = solved(problem, 507, solver)
    assert plan.moves
    assert plan.solver.endswith("+offload")
    assert plan.time_us == problem.base_time_us


def test_no_bandwidth_gives_the_plan_without() -> None:
    problem = chain_with_copies(8, copies=Copies(0.0, 0.0))
    budget = replay(problem, problem.base_steps()).peak_bytes // 2
    plan = solved(problem, budget)
    assert plan.steps == planner.solve(replace(problem, copies=None), budget, "greedy").steps


@pytest.mark.slow
def test_more_bandwidth_is_never_slower() -> None:
    budget = replay(chain_with_copies(10), chain_with_copies(10).base_steps()).peak_bytes // 2
    rates = [0.0, 2.0, 4.0, 8.0, 64.0]
    times = [solved(chain_with_copies(10, copies=Copies(r, r)), budget).time_us for r in rates]
    assert times == sorted(times, reverse=True)


def test_the_host_has_limits() -> None:
    problem = chain_with_copies(10)
    budget = replay(problem, problem.base_steps()).peak_bytes // 2
    for cap in (0, 150, 250, 10_000):
        few = replace(problem, copies=replace(TEN_BYTES_PER_US, host_bytes=cap))
        assert replay(few, solved(few, budget).steps).host_peak_bytes <= cap


def test_a_budget_below_what_recomputation_needs() -> None:
    """Random ops run once; without moves nothing can be saved."""
    problem = chain_with_copies(8)
    once = replace(problem, ops=tuple(replace(op, repeatable=False) for op in problem.ops))
    full = replay(problem, problem.base_steps()).peak_bytes
    alone = planner.solve(replace(once, copies=None), full // 2, "greedy")
    assert alone.peak_bytes == full
    assert solved(once, full // 2).peak_bytes <= full // 2


@examples(10)
@given(problems(), st.sampled_from((0.0, 1.0, 8.0)), st.floats(0.2, 1.0))
def test_random_problems(problem: Problem, rate: float, part: float) -> None:
    problem = replace(problem, copies=Copies(rate, rate, latency_us=1.0))
    budget = int(part * replay(problem, problem.base_steps()).peak_bytes)
    plan = solved(problem, budget)
    alone = planner.solve(replace(problem, copies=None), budget, "greedy")
    fits = alone.peak_bytes <= budget
    assert plan.peak_bytes <= max(budget, alone.peak_bytes)
    assert not fits or plan.time_us <= alone.time_us
    assert plan.peak_bound_bytes is not None
    assert plan.peak_bound_bytes <= plan.peak_bytes


@st.composite
def fetches(draw: st.DrawFn, problem: Problem, steps: tuple[str, ...]) -> list[Item]:
    """The steps, with what may move fetched before some of its reads."""
    may = {w for name in offload.movable(problem) for w in problem.op_of[name].writes}
    there: set[str] = set()
    items: list[Item] = []
    for step in steps:
        op = problem.op_of[step]
        for name in op.reads:
            if name in may and name in there and draw(st.booleans()):
                items.append(Fetch(name))
        items.append(step)
        there |= {*op.writes}
    return items


@examples(100)
@given(st.data(), problems(min_ops=3), st.sampled_from((1.0, 8.0)))
def test_random_fetches_are_placed_within_the_budget(
    data: st.DataObject, problem: Problem, rate: float
) -> None:
    """Any fetches: the schedule is possible, and takes no more than the least and the budget."""
    problem = replace(problem, copies=Copies(rate, rate))
    items = data.draw(fetches(problem, problem.base_steps()))
    budget = data.draw(st.integers(0, 600))
    line = place(problem, items, budget)
    least = replay(problem, synchronous(problem, items)).peak_bytes
    assert line.peak_bytes <= max(budget, least)
    assert check(problem, line.steps).ok
    assert ops_of(line.steps) == tuple(item for item in items if isinstance(item, str))
    fetched = [
        step.value for step in line.steps if isinstance(step, Move) and step.kind == "to device"
    ]
    assert sorted(fetched) == sorted(item.value for item in items if isinstance(item, Fetch))


# --- bounds -------------------------------------------------------------------------------


@pytest.mark.slow
@examples(20)
@given(st.data(), problems(min_ops=3), st.sampled_from((0.0, 1.0, 8.0)), st.floats(0.2, 1.0))
def test_no_schedule_is_faster_than_the_bound(
    data: st.DataObject, problem: Problem, rate: float, part: float
) -> None:
    """Whatever runs again and whatever is fetched, placed within the budget."""
    problem = replace(problem, copies=Copies(rate, rate))
    budget = int(part * replay(problem, problem.base_steps()).peak_bytes)
    bound = relax(problem, budget, Deadline(None)).bound_us
    steps = data.draw(schedules(replace(problem, copies=None)))
    line = place(problem, data.draw(fetches(problem, steps)), budget)
    if line.peak_bytes <= budget:
        assert bound <= line.time_us * (1 + 1e-6) + 1e-6
    plan = solved(problem, budget)
    if plan.peak_bytes <= budget:
        assert bound <= plan.time_us * (1 + 1e-6) + 1e-6


def test_the_bound_counts_both_engines() -> None:
    """With a slow way out little can be away at the peak; with a slow way back little returns."""
    full = replay(chain_with_copies(12), chain_with_copies(12).base_steps()).peak_bytes
    once = tuple(replace(op, repeatable=False) for op in chain_with_copies(12).ops)

    def bound(out: float, back: float) -> float:
        problem = replace(chain_with_copies(12, copies=Copies(out, back)), ops=once)
        return relax(problem, full // 2, Deadline(None)).bound_us

    base = chain_with_copies(12).base_time_us
    assert bound(100.0, 100.0) == pytest.approx(base)
    assert bound(3.0, 100.0) > 1.2 * base
    assert bound(100.0, 1.0) > 1.2 * base
    assert bound(0.0, 100.0) == bound(100.0, 0.0) == float("inf")


# --- values that live in host memory -------------------------------------------------------


def test_weights_visit_the_device() -> None:
    """Of 8 weights and 8 gradients few are there at a time, and nothing has to wait for them.

    The first weight has nothing to hide behind, and neither has the last gradient.
    """
    problem = chain_with_host_weights(8)
    full = check(problem, store_all(problem)).peak_bytes
    plan = solved(problem, full // 2)
    assert plan.peak_bytes <= full // 2
    assert plan.time_us <= problem.base_time_us + 2 * 10.0
    fetched = [move.value for move in plan.moves if move.kind == "to device"]
    assert {f"w{i}" for i in range(8)} <= {*fetched}
    away = {move.value for move in plan.moves if move.kind == "to host"}
    assert {f"g{i}" for i in range(8)} <= away


def test_with_room_each_weight_comes_once() -> None:
    problem = chain_with_host_weights(4)
    plan = solved(problem, 10**6)
    fetched = [move.value for move in plan.moves if move.kind == "to device"]
    assert sorted(fetched) == [f"w{i}" for i in range(4)]
    assert plan.time_us == problem.base_time_us + 20.0


def test_weights_without_bandwidth_are_refused() -> None:
    with pytest.raises(planner.ProblemRefused, match="bandwidth"):
        planner.solve(chain_with_host_weights(2, rate=0.0), 10**6, "greedy")


def test_the_least_with_weights_on_the_host() -> None:
    """One layer at a time: two activations, a gradient of each kind, a weight, the input."""
    problem = chain_with_host_weights(6)
    plan = solved(problem, 0)
    assert plan.peak_bytes == plan.peak_bound_bytes == 600


def test_the_front_with_moves() -> None:
    """Points from the fastest to the least peak, each a schedule that is possible."""
    problem = chain_with_copies(6, copies=Copies(2.0, 2.0))
    plans = planner.front(problem, SolverOptions(time_limit_s=60.0))  # however busy the machine
    assert all(check(problem, plan.steps).ok for plan in plans)
    peaks, times = [p.peak_bytes for p in plans], [p.time_us for p in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    assert len(plans) > 2
    assert any(plan.moves for plan in plans)
    assert planner.front(chain_with_host_weights(4), SolverOptions())
