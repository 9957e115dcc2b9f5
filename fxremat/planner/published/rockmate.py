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

from collections.abc import Iterable, Iterator

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import Milp, Term
from fxremat.planner.plans import remembered
from fxremat.planner.published.chain import Block, Chain, find_chain, option_cost, store_all
from fxremat.planner.published.parts import (
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


def part_of(chain: Chain, block: Block) -> Part:
    """The block, to be planned alone."""

    def role(value: int) -> tuple[bool, bool, bool]:
        return value in block.local, value == block.enters, value == block.leaves

    def stays(value: int) -> bool:
        return value in chain.spans and chain.spans[value][1] > block.backward.stop - 1

    return Part(chain.model, block.forward, block.backward, block.local, role, stays)


def block_options(chain: Chain, block: Block, plans: PartPlans) -> list[Steps]:
    """The options of a block: store-all first, then what is found, once for equal blocks."""

    def search() -> list[Steps]:
        held = held_options(chain, block, plans.deadline)
        paths = part.schedules(block.reach, may_rerun, plans.deadline)
        return pareto(chain, block, [*held, *paths])

    def may_rerun(op: int) -> bool:
        return not block.local.isdisjoint(chain.model.writes[op])

    part = part_of(chain, block)
    return plans.of(part, search)


def pareto(chain: Chain, block: Block, options: Iterable[Steps]) -> list[Steps]:
    """Options that no other beats in bytes held, time, and bytes while the backward runs."""

    def figures(option: Steps) -> tuple[float, ...]:
        cost = option_cost(chain, block, option)
        held = cost.held
        if cost.needs_enters and block.enters is not None:
            held += chain.model.bytes[block.enters]
        return held, cost.backward.time, cost.backward.whole

    return worth_a_choice(options, figures, constants.MOST_OPTIONS)


# -- the integer programme -------------------------------------------------------------------


def held_options(chain: Chain, block: Block, deadline: Deadline) -> Iterator[Steps]:
    """Options that hold fewer and fewer bytes, each value made again at most once."""
    backward = tuple(block.backward)
    saved = read_later(chain.model, backward) & block.reach
    most = chain.model.size_of(saved)
    for k in reversed(range(GRID)):
        kept = _held(chain, block, saved, most * k // GRID, deadline)
        if kept is not None:
            yield _with_runs(chain, block, kept)


def _held(
    chain: Chain, block: Block, wanted: frozenset[int], limit: int, deadline: Deadline
) -> frozenset[int] | None:
    """The values to hold within the limit such that making the others takes least time.

    Wanted values are held or made again; so is what an op that runs again reads.
    """
    model, milp = chain.model, Milp()
    tie = 1e-6 * sum(model.time) / (1 + sum(model.bytes))
    hold = {value: milp.binary(tie * model.bytes[value]) for value in sorted(block.reach)}
    makers = [op for op in block.forward if block.local.intersection(model.writes[op])]
    again = {op: milp.binary(model.time[op]) for op in makers}

    def there(value: int) -> list[Term]:
        op = model.writer[value]
        made = [(again[op], 1.0)] if value in block.local else []
        return [(hold[value], 1.0), *made]

    for value in sorted(wanted):
        milp.row(there(value), low=1.0)
    for op in makers:
        for value in sorted(block.reach.intersection(model.reads[op])):
            milp.row([*there(value), (again[op], -1.0)], low=0.0)
    milp.row([(column, float(model.bytes[value])) for value, column in hold.items()], high=limit)
    solution = milp.solve(deadline, nodes=12 * constants.NODES)
    if solution.values is None:
        return None
    return frozenset(value for value, column in hold.items() if solution.chosen(column))


def _with_runs(chain: Chain, block: Block, held: frozenset[int]) -> Steps:
    """The backward with what is not held made again in front of its first reader."""
    model, there = chain.model, set(held)
    steps: list[int] = []
    for op in block.backward:
        gone = block.local - there
        again = model.makers(block.forward, gone.intersection(model.reads[op]), gone)
        for maker in again:
            there.update(model.writes[maker])
        steps += (*again, op)
    return tuple(steps)


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
    schedules = chain_schedules(finest, [[store_all(block)] for block in finest.blocks], deadline)
    for chain in grains(finest):
        its = [block_options(chain, block, plans) for block in chain.blocks]
        schedules.extend(chain_schedules(chain, its, deadline))
    return best_plans(problem, schedules, NAME, deadline)
