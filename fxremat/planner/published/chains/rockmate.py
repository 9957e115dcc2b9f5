"""Rockmate: Rotor over the blocks of a chain, with the best schedules of each block as options.

Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate: an Efficient, Fast, Automatic and
Generic Tool for Re-materialization in PyTorch" (ICML 2023, PMLR 202). Where blocks have one op
or few, inside a block is nothing to choose; so the chain is also tried with blocks merged.
"""

from __future__ import annotations

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.options import SolverOptions
from fxremat.planner.published.chains.block_options import BlockOptions
from fxremat.planner.published.chains.chain import find_chain
from fxremat.planner.published.chains.chain_costs import store_all
from fxremat.planner.published.chains.rotor import (
    PlanFront,
    best_plans,
    chain_schedules,
    coarser,
    grains,
)
from fxremat.planner.published.parts import PartPlans
from fxremat.planner.remembered import remembered

NAME = "rockmate"


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits.

    Raises `NotAChain` for a problem that is not a chain of blocks.
    """
    return whole_front(problem, options).choose(budget_bytes)


@remembered
def whole_front(problem: Problem, options: SolverOptions) -> PlanFront:
    """The plans of a problem, remembered for the last few problems."""
    deadline = Deadline(options.time_limit_s)
    finest = coarser(find_chain(problem), constants.MOST_BLOCKS)
    solved = BlockOptions(PartPlans(deadline))
    schedules = chain_schedules(finest, [[store_all(block)] for block in finest.blocks], deadline)
    for chain in grains(finest):
        its = [solved.of(chain, block) for block in chain.blocks]
        schedules.extend(chain_schedules(chain, its, deadline))
    return best_plans(problem, schedules, NAME, deadline)
