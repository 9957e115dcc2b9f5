"""Moves to the host, of activations and of weights, and versions of the runs of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.constants import MEASURABLE
from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Op, Problem, Value, validate
from fxremat.core.schedule import Move, ops_of, store_all
from fxremat.core.step import Step, StepPoint, Version
from fxremat.core.timeline import replay
from fxremat.planner import SolverOptions
from fxremat.planner.deadline import Deadline
from fxremat.planner.moves import offload
from fxremat.planner.moves.host_weights import Selection, on_host, ranked, select
from fxremat.planner.moves.time_bound import relax
from fxremat.planner.moves.transfers import Fetch, Item, Route, place
from fxremat.planner.step_versions import fastest, lowest, not_beaten
from tests.brute import solved
from tests.chains import TEN_BYTES_PER_US, chain_with_copies, chain_with_host_weights
from tests.examples import examples
from tests.strategies import problems, schedules


def full_peak(problem: Problem) -> int:
    return check(problem, store_all(problem)).peak_bytes


def run_once(problem: Problem) -> Problem:
    return replace(problem, ops=tuple(replace(op, repeatable=False) for op in problem.ops))


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
    least = replay(problem, Route(problem, items).synchronous()).peak_bytes
    line = place(problem, items, least)
    assert line.peak_bytes == least < full_peak(problem)
    assert line.timing.stall_us == 10.0


@pytest.mark.parametrize("solver", ["greedy", "auto", "moments", "checkmate_pruned", "hrockmate"])
def test_every_solver_moves(solver: str) -> None:
    problem = chain_with_copies(8)  # b6 takes 407 bytes, and 100 to fetch the next value meanwhile
    plan = solved(problem, 507, solver)
    assert plan.moves
    assert plan.solver.endswith("+offload")
    assert plan.time_us == problem.base_time_us


@pytest.mark.slow
def test_more_bandwidth_is_never_slower_and_none_gives_the_plan_without_moves() -> None:
    budget = full_peak(chain_with_copies(10)) // 2
    rates = [0.0, 2.0, 4.0, 8.0, 64.0]
    plans = [solved(chain_with_copies(10, copies=Copies(rate, rate)), budget) for rate in rates]
    times = [plan.time_us for plan in plans]
    assert times == sorted(times, reverse=True)
    alone = planner.solve(replace(chain_with_copies(10), copies=None), budget, "greedy")
    assert plans[0].steps == alone.steps


def test_the_host_has_limits() -> None:
    problem = chain_with_copies(10)
    budget = full_peak(problem) // 2
    for cap in (0, 150, 250, 10_000):
        few = replace(problem, copies=replace(TEN_BYTES_PER_US, host_bytes=cap))
        assert replay(few, solved(few, budget).steps).host_peak_bytes <= cap


def test_a_budget_below_what_recomputation_needs() -> None:
    """Random ops run once; without moves nothing can be saved."""
    once = run_once(chain_with_copies(8))
    half = full_peak(once) // 2
    assert planner.solve(replace(once, copies=None), half, "greedy").peak_bytes == full_peak(once)
    assert solved(once, half).peak_bytes <= half


@examples(10)
@given(problems(), st.sampled_from((0.0, 1.0, 8.0)), st.floats(0.2, 1.0))
def test_random_problems(problem: Problem, rate: float, part: float) -> None:
    problem = replace(problem, copies=Copies(rate, rate, latency_us=1.0))
    budget = int(part * full_peak(problem))
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
    least = replay(problem, Route(problem, items).synchronous()).peak_bytes
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
    budget = int(part * full_peak(problem))
    bound, _ = relax(problem, budget, Deadline(None))
    steps = data.draw(schedules(replace(problem, copies=None)))
    line = place(problem, data.draw(fetches(problem, steps)), budget)
    if line.peak_bytes <= budget:
        assert bound <= line.time_us * (1 + 1e-6) + 1e-6
    plan = solved(problem, budget)
    if plan.peak_bytes <= budget:
        assert bound <= plan.time_us * (1 + 1e-6) + 1e-6


def test_the_bound_counts_both_engines() -> None:
    """With a slow way out little can be away at the peak; with a slow way back little returns."""
    budget = full_peak(chain_with_copies(12)) // 2

    def bound(out: float, back: float) -> float:
        problem = run_once(chain_with_copies(12, copies=Copies(out, back)))
        return relax(problem, budget, Deadline(None))[0]

    base = chain_with_copies(12).base_time_us
    assert bound(100.0, 100.0) == pytest.approx(base)
    assert bound(3.0, 100.0) > 1.2 * base
    assert bound(100.0, 1.0) > 1.2 * base
    assert bound(0.0, 100.0) == bound(100.0, 0.0) == float("inf")


# --- values that live in host memory ------------------------------------------------------


def test_weights_visit_the_device() -> None:
    """Of 8 weights and 8 gradients few are there at a time, and nothing has to wait for them."""
    problem = chain_with_host_weights(8)
    plan = solved(problem, full_peak(problem) // 2)
    assert plan.peak_bytes <= full_peak(problem) // 2
    assert plan.time_us <= problem.base_time_us + 2 * 10.0
    moved = {(move.kind, move.value) for move in plan.moves}
    assert {("to device", f"w{i}") for i in range(8)} <= moved
    assert {("to host", f"g{i}") for i in range(8)} <= moved


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


# --- weights ------------------------------------------------------------------------------


def resident(layers: int, rate: float = 10.0) -> tuple[Problem, dict[str, str | None]]:
    """The layers with their weights on the device, and the gradient of each weight."""
    problem = chain_with_host_weights(layers, rate=rate)
    weights: dict[str, str | None] = {f"w{i}": f"g{i}" for i in range(layers)}
    gradients = tuple(f"g{i}" for i in range(layers))
    outputs = (*problem.outputs, *gradients)
    return validate(replace(problem, host=(), resident=tuple(weights), outputs=outputs)), weights


def selected(problem: Problem, weights: dict[str, str | None], budget: int) -> Selection:
    def plan_for(question: Problem) -> Plan:
        validate(question)
        plan = offload.quick(question, budget, SolverOptions())
        assert check(question, plan.steps).ok
        return plan

    return select(problem, weights, budget, plan_for)


def test_much_work_for_few_bytes_comes_first() -> None:
    problem, weights = resident(3)
    ops = tuple(replace(op, time_us=99.0) if op.name == "b1" else op for op in problem.ops)
    assert ranked(replace(problem, ops=ops), weights)[0] == "w1"


def test_a_slow_link_moves_no_more_than_it_must() -> None:
    problem, weights = resident(8, rate=0.5)
    budget = int(0.7 * full_peak(problem))
    few = selected(problem, weights, budget)
    assert 0 < len(few.weights) < len(weights)
    assert few.plan.peak_bytes <= budget
    everything = offload.quick(on_host(problem, weights), budget, SolverOptions())
    assert few.plan.time_us < everything.time_us


# --- parts --------------------------------------------------------------------------------

bytes_ = st.integers(0, 60)
versions = st.builds(Version, st.integers(1, 40).map(float), bytes_, bytes_, bytes_)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Runs of one or two parts, the last to come the first to go."""
    parts = draw(st.lists(st.lists(versions, min_size=1, max_size=4), min_size=1, max_size=2))
    part_of = draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=4))
    count = len(part_of)
    moments = [StepPoint(draw(bytes_), tuple(range(run)), run, "forward") for run in range(count)]
    moments.append(StepPoint(draw(bytes_), tuple(range(count))))
    for run in reversed(range(count)):
        moments.append(StepPoint(draw(bytes_), tuple(range(run)), run, "backward"))
    return Step(tuple(moments), tuple(part_of), tuple(map(tuple, parts)))


def choices(step: Step, most_versions: int) -> list[tuple[int, ...]]:
    """All, with at most so many versions of each part."""
    places = [range(len(step.versions[part])) for part in step.part_of]

    def few(chosen: tuple[int, ...]) -> bool:
        taken = set(zip(step.part_of, chosen, strict=True))
        parts = range(len(step.versions))
        return all(sum(part == p for p, _ in taken) <= most_versions for part in parts)

    return [chosen for chosen in product(*places) if few(chosen)]


@given(steps(), st.integers(1, 300), st.integers(1, 2))
def test_the_fastest_within_the_budget_and_the_lowest(step: Step, budget: int, most: int) -> None:
    every = choices(step, most)
    within = [one for one in every if step.peak_bytes(one) <= budget]
    found, least = fastest(step, budget, most), lowest(step, most)
    assert (found is None) == (not within)
    if found is not None:
        assert found in within
        assert step.time_us(found) <= min(map(step.time_us, within)) * (1 + MEASURABLE) * 1.002
    assert step.peak_bytes(least) == min(map(step.peak_bytes, every))
    assert fastest(step, step.peak_bytes(least), most) is not None


@given(st.lists(versions, min_size=1, max_size=6))
def test_what_is_left_out_is_beaten_by_what_is_kept(offered: list[Version]) -> None:
    kept = [offered[k] for k in not_beaten(offered)]
    assert len(set(kept)) == len(kept)
    for one in offered:
        assert any(
            all(a <= b for a, b in zip(better.figures, one.figures, strict=True)) for better in kept
        )


def test_many_runs_are_no_harder() -> None:
    """A front of versions, as a block of a transformer has it: two of them are mixed."""
    count, budget = 48, 100 + 25 * 48
    front = tuple(
        Version(100.0 + 3.0 * k * k, 40 - 4 * k, 60 - 3 * k, 90 - 4 * k) for k in range(9)
    )
    runs = range(count)
    moments = [StepPoint(100, tuple(range(run)), run, "forward") for run in runs]
    moments += [StepPoint(100, tuple(range(run)), run, "backward") for run in reversed(runs)]
    step = Step(tuple(moments), (0,) * count, (front,))
    found = fastest(step, budget)
    assert found is not None
    assert step.peak_bytes(found) <= budget
    assert len(set(found)) == 2
    alike = [(k,) * count for k in range(9) if step.peak_bytes((k,) * count) <= budget]
    assert step.time_us(found) <= min(map(step.time_us, alike))
