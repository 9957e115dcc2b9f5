"""Rotor, Rockmate and H-Rockmate: chains of blocks and hierarchies of clusters."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.check import check
from fxremat.core.problem import Op, Problem, Value, validate
from fxremat.core.timeline import replay, store_all_peak
from fxremat.core.variants import take
from fxremat.planner import solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.published import rockmate, rotor
from fxremat.planner.published.chain import (
    NotAChain,
    find_chain,
)
from fxremat.planner.published.clusters import Level, decompose
from fxremat.planner.published.hrockmate import Hierarchy
from fxremat.planner.published.parts import PartPlans
from fxremat.planner.published.rockmate import block_options
from fxremat.planner.published.rotor import Table
from fxremat.planner.solvers import SolverOptions
from tests import brute, chains
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


@pytest.mark.parametrize("solver", [rotor, rockmate])
@examples(40)
@given(problems(min_ops=4, max_ops=12))
def test_any_problem_is_solved_or_refused(solver: ModuleType, problem: Problem) -> None:
    """Workspaces, in-place writes, outputs and ops that run once, in any arrangement."""
    try:
        plans = solver.whole_front(problem, OPTIONS)
    except NotAChain:
        return
    for plan in (*plans, solver.solve(problem, 0, OPTIONS)):
        assert check(problem, plan.steps, plan.peak_bytes).ok


def test_model_agrees_with_the_replay() -> None:
    """With a slot per byte the table's memory and time are those of the replayed plan."""
    for problem in (chains.blocks(5), chains.chain([3, 5, 2, 6], [1.0, 2.0, 3.0, 1.0])):
        chain = find_chain(problem)
        table = Table(chain, chain.store_all, Deadline(None))
        assert table.slot == 1.0
        for slots in table.levels():
            line = replay(problem, chain.model.names(table.steps(slots)))
            assert line.peak_bytes <= slots
            assert line.time_us == table.best[0, 0, -1, slots]


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
    options = [block_options(block, plans) for block in chain.blocks]
    assert len(plans.found) == len({block.shape for block in chain.blocks})
    assert len(plans.found) <= len(chain.blocks) // 2
    assert options[-4] == block_options(chain.blocks[-4], PartPlans(Deadline(None)))


# --- hrockmate ----------------------------------------------------------------------------


def some_problems() -> st.SearchStrategy[Problem]:
    return st.one_of(
        problems(max_ops=8), chains.chains(), st.just(chains.blocks(3)), st.just(chains.skipping())
    )


def level_of(model: IndexedProblem, count: int) -> Level:
    """Clusters with all options that there are to find."""
    hierarchy, parts = Hierarchy(Deadline(None)), decompose(model, count)
    return Level(parts, [hierarchy.options(part) for part in parts])


@examples(60)
@given(st.data())
def test_a_level_is_a_problem(data: st.DataObject) -> None:
    """Its ops are in a valid order, each variant can be taken, and its schedules are possible.

    Store-all takes what it does, and is chosen where it fits.
    """
    problem = data.draw(some_problems())
    model = IndexedProblem(problem)
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
    hierarchy, model = Hierarchy(Deadline(None)), IndexedProblem(chains.blocks(12))
    level = hierarchy.level(model)
    assert level is not None
    with_backward = [its for its in level.clusters if its.backward]
    assert 0 < len(hierarchy.found) < len(with_backward)


def test_shapes_tell_what_matters() -> None:
    narrow, wide = (
        {part.shape for part in decompose(IndexedProblem(chains.blocks(6, width)), 6)}
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
