"""Rotor: optimal where its model is exact, always possible, honest about what is no chain."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
from hypothesis import given

from fxremat.core.check import check
from fxremat.core.problem import Op, Problem, Value, validate
from fxremat.core.timeline import replay
from fxremat.planner.deadline import Deadline
from fxremat.planner.published import rockmate, rotor
from fxremat.planner.published.chain import NotAChain, block_costs, find_chain, store_all
from fxremat.planner.published.rotor import Table
from fxremat.planner.solvers import SolverOptions
from tests import brute, chains, strategies
from tests.examples import examples

OPTIONS = SolverOptions()


def store_all_peak(problem: Problem) -> int:
    return replay(problem, problem.base_steps()).peak_bytes


def tight_budgets(problem: Problem) -> range:
    """Budgets from the peak that no schedule can be under to that of store-all."""
    return range(brute.least_peak(problem), store_all_peak(problem) + 1)


@pytest.mark.parametrize(
    "problem",
    [
        *(chains.chain([4] * count, [1.0] * count, reads_output=False) for count in (3, 4)),
        chains.chain([5, 4, 3, 2], [1.0, 4.0, 2.0, 3.0], 2, reads_output=False),
    ],
    ids=["three alike", "four alike", "one that narrows"],
)
def test_least_time_of_chains(problem: Problem) -> None:
    for budget in tight_budgets(problem):
        best = brute.least_time(problem, budget)
        plan = rotor.solve(problem, budget, OPTIONS)
        assert best is not None
        assert check(problem, plan.steps, budget).ok
        assert plan.time_us == best[0], budget


@examples(40)
@given(chains.chains())
def test_never_better_than_the_best_and_always_possible(problem: Problem) -> None:
    most = store_all_peak(problem)
    for budget in {most, (most + brute.least_peak(problem)) // 2}:
        plan = rotor.solve(problem, budget, OPTIONS)
        verdict = check(problem, plan.steps)
        assert verdict.ok, verdict
        assert (verdict.peak_bytes, verdict.time_us) == (plan.peak_bytes, plan.time_us)
        if plan.peak_bytes <= budget:
            best = brute.least_time(problem, budget)
            assert best is not None
            assert plan.time_us >= best[0]


@pytest.mark.parametrize("solver", [rotor, rockmate])
@examples(40)
@given(strategies.problems(min_ops=4, max_ops=12))
def test_any_problem_is_solved_or_refused(solver: ModuleType, problem: Problem) -> None:
    """Workspaces, in-place writes, outputs and ops that run once, in any arrangement."""
    try:
        plan = solver.solve(problem, 0, OPTIONS)
    except NotAChain:
        return
    assert check(problem, plan.steps).ok
    for other in solver.whole_front(problem, OPTIONS).plans:
        assert check(problem, other.steps, other.peak_bytes).ok


def test_model_agrees_with_the_replay() -> None:
    """With a slot per byte the table's memory and time are those of the replayed plan."""
    for problem in (chains.blocks(5), chains.chain([3, 5, 2, 6], [1.0, 2.0, 3.0, 1.0])):
        chain = find_chain(problem)
        costs = block_costs(chain, [[store_all(block)] for block in chain.blocks])
        table = Table(costs, Deadline(None))
        assert table.slot == 1.0
        for slots in table.levels():
            line = replay(problem, chain.model.names(table.steps(slots)))
            assert line.peak_bytes <= slots
            assert line.time_us == table.best[0, 0, -1, slots]


def test_blocks_are_found_where_one_value_crosses() -> None:
    chain = find_chain(chains.blocks(3))
    names = [value.name for value in chain.model.problem.values]
    crossing = [names[block.leaves] for block in chain.blocks if block.leaves is not None]
    assert {"x1", "x2"} <= set(crossing)
    for block in chain.blocks:
        assert not block.early


def test_a_long_chain_takes_seconds() -> None:
    started = time.process_time()
    problem = chains.homogeneous(100, 1000)
    plan = rotor.solve(problem, store_all_peak(problem) // 4, OPTIONS)
    assert plan.peak_bytes <= store_all_peak(problem) // 4
    assert plan.time_us <= 1.4 * problem.base_time_us
    assert time.process_time() - started < 10


def test_a_chain_of_many_blocks_is_made_coarser() -> None:
    chain = find_chain(chains.homogeneous(150))
    assert len(rotor.coarser(chain, 100).blocks) <= 100


def test_a_value_read_early_stays_until_then() -> None:
    """The backward of the last block reads a value of the first one, as fused kernels do."""
    problem = chains.homogeneous(6)
    ops = [
        Op(op.name, (*op.reads, "y1"), op.writes, op.time_us, 0, "backward", False)
        if op.name == "loss"
        else op
        for op in problem.ops
    ]
    problem = validate(Problem("early", problem.values, tuple(ops), (), ("x",), ("g0",)))
    chain = find_chain(problem)
    assert any(block.early for block in chain.blocks)
    for plan in rotor.whole_front(problem, OPTIONS).plans:
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
