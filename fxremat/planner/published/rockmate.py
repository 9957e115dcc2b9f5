"""Rockmate: Rotor over the blocks of a chain, with the best schedules of each block as options.

Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate: an Efficient, Fast, Automatic and
Generic Tool for Re-materialization in PyTorch" (ICML 2023, PMLR 202). Where blocks have one op
or few, inside a block is nothing to choose; so the chain is also tried with blocks merged.

The options of a block, what is held for its backward and what runs again, have two sources:
each distinct block is solved on its own, and hands the schedules to the chain (section 3).

* an integer programme per number of bytes held: which values are held, so that the least time
  goes into making the others once more, each in front of its first reader;
* eviction paths on the block's own problem (`fxremat.planner.local.editable_schedule`), which also
  make a value several times where the peak is inside the backward. A pause between forward and
  backward that needs much memory makes them look for schedules that hold little there.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp.relaxation import Relaxation, extra_runs_for
from fxremat.planner.plans import remembered
from fxremat.planner.published.chain import Block, OptionCost, find_chain
from fxremat.planner.published.parts import (
    MayRerun,
    Part,
    PartPlans,
    Steps,
    read_later,
    worth_a_choice,
)
from fxremat.planner.published.rotor import best_plans, chain_schedules, choose, coarser, grains
from fxremat.planner.solvers import SolverOptions

NAME = "rockmate"
GRID = 10
"""Numbers of bytes held for which the integer programme is solved: as many as in Rockmate (Zhao
et al., whose class has ``nb_budget_save=10``)."""


def block_options(block: Block, plans: PartPlans) -> list[Steps]:
    """The options of a block: store-all first, then what is found, once for equal blocks."""

    def search() -> list[Steps]:
        saved = read_later(block.model, block.backward) & block.reach
        held = held_options(block, block.model.size_of(saved), may_rerun, plans.deadline)
        paths = block.schedules(block.reach, may_rerun, plans.deadline)
        return pareto(block, [*held, *paths])

    def may_rerun(op: int) -> bool:
        return not block.local.isdisjoint(block.model.writes[op])

    return plans.of(block, search)


def pareto(block: Block, options: Iterable[Steps]) -> list[Steps]:
    """Options that no other beats in bytes held, time, and bytes while the backward runs."""

    def figures(option: Steps) -> tuple[float, ...]:
        cost = OptionCost(block, option)
        held = cost.held
        if cost.needs_enters and block.enters is not None:
            held += block.model.bytes[block.enters]
        return held, cost.backward.time, cost.backward.whole

    return worth_a_choice(options, figures, constants.MOST_OPTIONS)


# -- the integer programme -------------------------------------------------------------------


def held_options(part: Part, saved_bytes: int, rerun: MayRerun, deadline: Deadline) -> list[Steps]:
    """Options that hold a smaller and smaller part of the bytes saved, each value made again once.

    The programme is the relaxation over one program point, the pause.
    """
    model, pause = IndexedProblem(part.problem(0, rerun)), len(part.forward)
    most, found = int(StageSchedule(model).peak[pause]) - saved_bytes, list[Steps]()
    for k in reversed(range(GRID)):
        programme = Relaxation(model, most + saved_bytes * k // GRID, [pause])
        solution = programme.solve(deadline)
        if solution.values is not None:
            runs = extra_runs_for(model, dict(programme.held_in(solution)))
            found.append(part.backward_with(runs))
    return found


# -- the chain -------------------------------------------------------------------------------


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits.

    Raises `NotAChain` for a problem that is not a chain of blocks.
    """
    return choose(whole_front(problem, options), budget_bytes)


@remembered
def whole_front(problem: Problem, options: SolverOptions) -> tuple[Plan, ...]:
    """Plans that no other beats in both peak and time, remembered for the last few problems."""
    deadline = Deadline(options.time_limit_s)
    finest, plans = coarser(find_chain(problem), constants.MOST_BLOCKS), PartPlans(deadline)
    schedules = chain_schedules(finest, finest.store_all, deadline)
    for chain in grains(finest):
        its = [block_options(block, plans) for block in chain.blocks]
        schedules.extend(chain_schedules(chain, its, deadline))
    return best_plans(problem, schedules, NAME, deadline)
