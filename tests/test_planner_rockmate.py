"""Rockmate: never slower than Rotor, distinct blocks solved once, plans judged."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fxremat.core.check import check
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.deadline import Deadline
from fxremat.planner.published import rockmate, rotor
from fxremat.planner.published.chain import Block, Chain, find_chain, option_cost, store_all
from fxremat.planner.published.parts import PartPlans
from fxremat.planner.published.rockmate import (
    BlockOptions,
    held_options,
    pareto,
    part_of,
)
from fxremat.planner.solvers import SolverOptions
from tests import brute, chains

OPTIONS = SolverOptions()


def store_all_peak(problem: Problem) -> int:
    return replay(problem, problem.base_steps()).peak_bytes


def largest(chain: Chain) -> Block:
    return max(chain.blocks, key=lambda block: len(block.forward))


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


def test_least_time_of_tiny_blocks() -> None:
    problem = chains.chain([4, 4, 4], [1.0, 1.0, 1.0], reads_output=False)
    for budget in range(brute.least_peak(problem), store_all_peak(problem) + 1):
        best = brute.least_time(problem, budget)
        assert best is not None
        assert rockmate.solve(problem, budget, OPTIONS).time_us == best[0]


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = find_chain(chains.blocks(9))
    solved: list[Block] = []
    search = rockmate.held_options

    def count(chain: Chain, block: Block, deadline: Deadline) -> object:
        solved.append(block)
        return search(chain, block, deadline)

    monkeypatch.setattr(rockmate, "held_options", count)
    options = BlockOptions(PartPlans(Deadline(None)))
    for block in chain.blocks:
        options.of(chain, block)
    assert len(solved) == len({part_of(chain, block).shape for block in chain.blocks})
    assert len(solved) <= len(chain.blocks) // 2
    again = BlockOptions(PartPlans(Deadline(None))).of(chain, chain.blocks[-4])
    assert options.of(chain, chain.blocks[-4]) == again


def test_options_hold_less_for_more_time() -> None:
    chain = find_chain(chains.blocks(4))
    block = largest(chain)
    options = pareto(chain, block, held_options(chain, block, Deadline(None)))
    costs = [option_cost(chain, block, option) for option in options]
    assert len(costs) >= 2
    assert costs[0].held < costs[-1].held
    assert costs[0].backward.time > costs[-1].backward.time
    everything = option_cost(chain, block, store_all(block))
    assert all(cost.backward.time >= everything.backward.time for cost in costs)
