"""Rotor, Rockmate, H-Rockmate and POFO: chains of blocks, what moves, and clusters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.problem import Copies, Op, Problem, Value, validate
from fxremat.core.timeline import replay
from fxremat.core.variants import take
from fxremat.planner import solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.moves.offload import movable
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.planner.published import pofo, rockmate, rotor
from fxremat.planner.published.chain import (
    NotAChain,
    find_chain,
)
from fxremat.planner.published.clusters import Level, decompose
from fxremat.planner.published.hrockmate import Hierarchy
from fxremat.planner.published.parts import PartPlans
from fxremat.planner.published.rockmate import block_options, part_of
from fxremat.planner.solvers import SolverOptions
from tests import brute, chains
from tests.brute import store_all_peak
from tests.examples import examples
from tests.strategies import problems

OPTIONS = SolverOptions()


@pytest.mark.parametrize(
    ("solver", "problem"),
    [
        *((s, chains.chain([4] * 3, [1.0] * 3, reads_output=False)) for s in (rotor, rockmate)),
        (rotor, chains.chain([4] * 4, [1.0] * 4, reads_output=False)),
        (rotor, chains.chain([5, 4, 3, 2], [1.0, 4.0, 2.0, 3.0], 2, reads_output=False)),
    ],
)
def test_least_time_of_chains(solver: ModuleType, problem: Problem) -> None:
    for budget in range(brute.least_peak(problem), store_all_peak(problem) + 1):
        best = brute.least_time(problem, budget)
        plan = solver.solve(problem, budget, OPTIONS)
        assert best is not None
        assert check(problem, plan.steps, budget).ok
        assert plan.time_us == best[0], budget


@pytest.mark.parametrize("solver", [rotor, rockmate, pofo])
@examples(40)
@given(problems(min_ops=4, max_ops=12), st.floats(0.3, 1.0))
def test_any_problem_is_solved_or_refused(
    solver: ModuleType, problem: Problem, part: float
) -> None:
    """Workspaces, in-place writes, outputs and ops that run once, in any arrangement."""
    if solver is pofo:
        problem = replace(problem, copies=Copies(1.0, 2.0))
    budget = bytes_of(problem, part)
    try:
        plans = [solver.solve(problem, budget, OPTIONS), solver.solve(problem, 0, OPTIONS)]
    except NotAChain:
        return
    plans += () if solver is pofo else solver.whole_front(problem, OPTIONS)
    for plan in plans:
        assert check(problem, plan.steps, plan.peak_bytes).ok


def test_a_long_chain_takes_seconds() -> None:
    started = time.process_time()
    """One of more blocks than there may be is made coarser."""
    assert len(rotor.coarser(find_chain(chains.homogeneous(150)), 100).blocks) <= 100
    problem = chains.homogeneous(100, 1000)
    plan = rotor.solve(problem, store_all_peak(problem) // 4, OPTIONS)
    assert plan.peak_bytes <= store_all_peak(problem) // 4
    assert plan.time_us <= 1.4 * problem.base_time_us
    assert time.process_time() - started < 10


def test_a_value_read_early_stays_until_then() -> None:
    """The backward of the last block reads a value of the first one, as fused kernels do."""
    problem = chains.homogeneous(6)
    ops = (replace(o, reads=(*o.reads, "y1")) if o.name == "loss" else o for o in problem.ops)
    problem = validate(replace(problem, ops=tuple(ops)))
    chain = find_chain(problem)
    assert any(block.early for block in chain.blocks)
    for plan in rotor.whole_front(problem, OPTIONS):
        assert check(problem, plan.steps, plan.peak_bytes).ok


@pytest.mark.parametrize(
    "problem",
    [
        chains.skipping(),
        validate(Problem("one", (Value("a", 1),), (Op("o", (), ("a",), 1.0),))),
        validate(Problem("none", (), ())),
    ],
)
def test_no_chain_is_refused_with_advice(problem: Problem) -> None:
    with pytest.raises(NotAChain, match=r"not a chain of blocks.*'auto' or 'hrockmate'"):
        rotor.solve(problem, 10, OPTIONS)
    assert issubclass(NotAChain, ValueError)


# --- rockmate -----------------------------------------------------------------------------


def test_options_make_the_cheap_values_again() -> None:
    """In a block whose activation is cheap to make, that is what is left out."""
    problem = chains.blocks(6)
    most = store_all_peak(problem)
    plan = rockmate.solve(problem, most * 3 // 4, OPTIONS)
    assert plan.peak_bytes <= most * 3 // 4
    assert {name.rstrip("0123456789") for name in plan.repeats()} <= {"act", "norm"}
    assert plan.time_us < rotor.solve(problem, most * 3 // 4, OPTIONS).time_us


@pytest.mark.parametrize("problem", [chains.blocks(5), chains.homogeneous(9)])
def test_never_slower_than_rotor(problem: Problem) -> None:
    most = store_all_peak(problem)
    plans = []
    for budget in range(most // 5, most + 1, max(1, most // 25)):
        plan, other = (solver.solve(problem, budget, OPTIONS) for solver in (rockmate, rotor))
        assert check(problem, plan.steps).ok
        if other.peak_bytes <= budget:
            assert plan.peak_bytes <= budget
            assert plan.time_us <= other.time_us
        plans.append(plan)
    for small, large in pairwise(plans):
        assert small.time_us >= large.time_us
        assert small.peak_bytes <= large.peak_bytes


def test_equal_blocks_are_solved_once() -> None:
    chain, plans = find_chain(chains.blocks(9)), PartPlans(Deadline(None))
    options = [block_options(chain, block, plans) for block in chain.blocks]
    assert len(plans.found) == len({part_of(chain, block).shape for block in chain.blocks})
    assert len(plans.found) <= len(chain.blocks) // 2
    assert options[-4] == block_options(chain, chain.blocks[-4], PartPlans(Deadline(None)))


# --- hrockmate ----------------------------------------------------------------------------


def some_problems() -> st.SearchStrategy[Problem]:
    return st.one_of(
        problems(max_ops=8), chains.chains(), st.just(chains.blocks(3)), st.just(chains.skipping())
    )


def level_of(model: IndexedProblem, count: int) -> Level:
    """Clusters with all options that there are to find."""
    hierarchy, parts = Hierarchy(PartPlans(Deadline(None))), decompose(model, count)
    return Level(parts, [hierarchy.options(part) for part in parts])


@examples(60)
@given(st.data())
def test_a_level_is_a_problem(data: st.DataObject) -> None:
    """Its ops are in a valid order, each variant can be taken, and its schedules are possible.

    Store-all takes what it does, and is chosen where it fits.
    """
    problem = data.draw(some_problems())
    model = build_model(problem)
    level = level_of(model, data.draw(st.integers(2, 5)))
    validate(level.problem)
    for variant in level.problem.variants:
        take(level.problem, [variant.name])
    full = store_all_peak(level.problem)
    assert full >= store_all_peak(problem) or any(op.inplace for op in problem.ops)
    everything = model.names(level.steps(full, Deadline(None)))
    assert replay(problem, everything).time_us == problem.base_time_us
    budget = data.draw(st.integers(full // 2, full))
    steps = model.names(level.steps(budget, Deadline(None)))
    assert not steps or check(problem, steps).ok


def test_clusters_of_one_shape_are_solved_once() -> None:
    hierarchy, model = Hierarchy(PartPlans(Deadline(None))), build_model(chains.blocks(12))
    level = hierarchy.level(model)
    assert level is not None
    with_backward = [its for its in level.clusters if its.backward]
    assert 0 < len(hierarchy.plans.found) < len(with_backward)


def test_shapes_tell_what_matters() -> None:
    narrow, wide = (
        {part.shape for part in decompose(build_model(chains.blocks(6, width)), 6)}
        for width in (16, 17)
    )
    assert len(narrow) < 6
    assert not narrow & wide


@pytest.mark.parametrize("percent", [80, 60])
@pytest.mark.parametrize(
    "problem", [chains.blocks(8), chains.blocks(8, skips=False), chains.skipping()]
)
def test_never_worse_than_greedy(problem: Problem, percent: int) -> None:
    budget = store_all_peak(problem) * percent // 100
    greedy, ours = solve(problem, budget, "greedy"), solve(problem, budget, "hrockmate")
    assert max(ours.peak_bytes, budget) <= max(greedy.peak_bytes, budget)
    if greedy.peak_bytes <= budget:
        assert ours.time_us <= greedy.time_us * (1 + 1e-9)


# --- pofo ---------------------------------------------------------------------------------


def net(layers: int, rate: float = 10.0) -> Problem:
    """A chain whose values may be copied, at a rate both ways."""
    return validate(chains.chain_with_copies(layers, copies=Copies(rate, rate)))


def bytes_of(problem: Problem, part: float) -> int:
    """A part of the bytes that store-all needs."""
    return int(part * brute.store_all_peak(problem))


solved = partial(brute.solved, solver="pofo")


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
    budget = bytes_of(net(12), 0.5)
    plans = [solved(net(12, rate), budget) for rate in (0.0, 2.0, 4.0, 16.0)]
    times = [plan.time_us for plan in plans]
    assert times == sorted(times, reverse=True)
    assert plans[2].moves
    assert len(plans[2].ops) > len(net(12).ops)
    assert times[0] == rotor.solve(net(12), budget, OPTIONS).time_us > times[2]
    assert times[-1] == net(12).base_time_us


@pytest.mark.parametrize(
    "copies",
    [None, Copies(0.0, 0.0), Copies(5.0, 0.0), Copies(0.0, 5.0), Copies(5.0, 5.0, only_host=True)],
)
@pytest.mark.parametrize("part", [0.5, 0.7, 1.0])
def test_rotors_plan_where_nothing_may_move(copies: Copies | None, part: float) -> None:
    problem = replace(net(8), copies=copies)
    plan = solved(problem, bytes_of(problem, part))
    assert plan.steps == rotor.solve(problem, bytes_of(problem, part), OPTIONS).steps
    assert plan.solver == "pofo"


RATES = st.sampled_from((0.3, 1.0, 4.0))


@pytest.mark.slow
@examples(10)
@given(chains.chains(), RATES, RATES, st.floats(0.3, 1.0))
def test_moves_are_never_slower_than_rotor(
    problem: Problem, out: float, back: float, part: float
) -> None:
    problem = replace(problem, copies=Copies(out, back, latency_us=0.5))
    budget = bytes_of(problem, part)
    plan, alone = solved(problem, budget), rotor.solve(problem, budget, OPTIONS)
    assert plan.peak_bytes <= max(budget, alone.peak_bytes)
    assert alone.peak_bytes > budget or plan.time_us <= alone.time_us
    assert plan.peak_bound_bytes is not None
    assert plan.peak_bound_bytes <= plan.peak_bytes
    assert plan.time_bound_us == problem.base_time_us


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
            for budget in (bytes_of(problem, 0.75), bytes_of(problem, 0.85)):
                best = brute_time(problem, budget)
                plan = solved(problem, budget)
                if best < float("inf"):
                    assert plan.peak_bytes <= budget
                    slower.append(plan.time_us / best - 1)
    assert max(slower) <= 0.1
    assert sum(part <= 0 for part in slower) >= 0.8 * len(slower)


def test_the_host_has_limits() -> None:
    """With room for some values some move: the plan is between the others."""
    budget = bytes_of(net(10), 0.5)
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
    budget = bytes_of(problem, 0.45)
    assert rotor.solve(problem, budget, OPTIONS).peak_bytes > budget
    plan = solved(problem, budget)
    assert plan.peak_bytes <= budget
    assert any(move.value.startswith("mf") for move in plan.moves)


def test_weights_in_host_memory_are_refused_with_advice() -> None:
    problem = replace(net(4), resident=(), host=("w",))
    with pytest.raises(pofo.LivesOnHost, match=r"w lives in host memory.*'auto'"):
        planner.solve(problem, 10, "pofo")
