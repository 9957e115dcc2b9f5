"""Rotor: the best persistent checkpointing schedule of a chain of blocks.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous
chains" (arXiv 1911.13214). The dynamic programme (`rotor_table`) knows the memory of a
chain only in slots and by block, so its plans are replayed, and one is chosen by its replayed
figures. They do not depend on the budget: a smaller budget never gives less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.options import SolverOptions
from fxremat.planner.plans import make_plan
from fxremat.planner.published.chains.chain import Chain, NotAChain, find_chain
from fxremat.planner.published.chains.chain_costs import BlockOption, block_costs, store_all
from fxremat.planner.published.chains.rotor_table import SLOTS, Table
from fxremat.planner.remembered import remembered

NAME = "rotor"


@dataclass(frozen=True)
class PlanFront:
    """Plans that no other beats in both peak and time, by rising time."""

    plans: tuple[Plan, ...]

    def choose(self, budget_bytes: int | None) -> Plan:
        """Least time within the budget, or least peak where nothing fits."""
        fits = (p for p in self.plans if budget_bytes is None or p.peak_bytes <= budget_bytes)
        return replace(next(fits, self.plans[-1]), budget_bytes=budget_bytes)


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits.

    Raises `NotAChain` for a problem that is not a chain of blocks.
    """
    return whole_front(problem, options).choose(budget_bytes)


@remembered
def whole_front(problem: Problem, options: SolverOptions) -> PlanFront:
    """The plans of a problem, remembered for the last few problems."""
    deadline = Deadline(options.time_limit_s)
    chain = coarser(find_chain(problem), constants.MOST_BLOCKS)
    schedules = chain_schedules(chain, [[store_all(block)] for block in chain.blocks], deadline)
    return best_plans(problem, schedules, NAME, deadline)


def chain_schedules(
    chain: Chain, options: Sequence[Sequence[BlockOption]], deadline: Deadline
) -> list[tuple[str, ...]]:
    """The schedules of the table, from least time to least memory; none where it was stopped.

    They are as many as every other slot of the longest chain, evenly picked.
    """
    table = Table(block_costs(chain, options), deadline)
    if not table.done:
        return []
    levels = table.levels()
    stride = max(1, -(-len(levels) // (SLOTS // 2)))
    picks = dict.fromkeys([*levels[::stride], *levels[-1:]])
    return [chain.model.names(table.steps(slots)) for slots in picks]


def best_plans(
    problem: Problem, schedules: Iterable[tuple[str, ...]], name: str, deadline: Deadline
) -> PlanFront:
    """Replay the schedules and store-all, and keep what nothing else beats."""
    plans = [make_plan(problem, problem.base_steps(), name)]
    for steps in schedules:
        plans.append(make_plan(problem, steps, name))
    plans.sort(key=lambda plan: (plan.time_us, plan.peak_bytes))
    front: list[Plan] = []
    for plan in plans:
        if not front or plan.peak_bytes < front[-1].peak_bytes:
            front.append(replace(plan, seconds=deadline.seconds()))
    return PlanFront(tuple(front))


def coarser(chain: Chain, most: int) -> Chain:
    """The chain with at most so many blocks: small neighbours are merged first."""
    while len(chain.blocks) > most:
        sizes = [len(block.forward) for block in chain.blocks]
        pairs = sorted(range(len(sizes) - 1), key=lambda k: (sizes[k] + sizes[k + 1], k))
        gone: set[int] = set()
        for k in pairs:
            if len(sizes) - len(gone) > most and not {k - 1, k, k + 1} & gone:
                gone.add(k)
        chain = chain.merged(cut for k, cut in enumerate(chain.cuts) if k not in gone)
    return chain


def grains(finest: Chain) -> Iterator[Chain]:
    """The chain with its own blocks, then again and again with half as many as before."""
    chain = finest
    yield chain
    while len(chain.blocks) > 2:
        try:
            chain = coarser(finest, max(2, len(chain.blocks) // 2))
        except NotAChain:
            return
        yield chain
