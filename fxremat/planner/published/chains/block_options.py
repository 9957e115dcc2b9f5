"""Ways to run the backward of one block of a chain: what is held for it, what runs again.

Two sources, after Rockmate (Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont: "Rockmate", ICML
2023, section 3), which solves each distinct block on its own and hands the schedules to the
chain as options:

* an integer programme per number of bytes held: which values are held, so that the least time
  goes into making the others once more, each in front of its first reader;
* eviction paths on the block's own problem (`fxremat.planner.local.editable_schedule`), which also
  make a value
  several times where the peak is inside the backward. A pause between forward and backward
  that needs much memory makes them look for schedules that hold little there.

Blocks that are the same but for the names are solved once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import Milp, Term
from fxremat.planner.published.chains.chain import Block, Chain
from fxremat.planner.published.chains.chain_costs import BlockOption, option_cost
from fxremat.planner.published.parts import Part, PartPlans, not_beaten, read_later

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


@dataclass(frozen=True)
class BlockOptions:
    """The options of blocks: store-all first, then what is found, once for equal blocks."""

    plans: PartPlans

    def of(self, chain: Chain, block: Block) -> list[BlockOption]:
        """Those of one block."""
        found = self.plans.of(part_of(chain, block), lambda: self._solve(chain, block))
        return [BlockOption(steps) for steps in found]

    def _solve(self, chain: Chain, block: Block) -> list[tuple[int, ...]]:
        deadline = self.plans.deadline
        options = [*held_options(chain, block, deadline), *path_options(chain, block, deadline)]
        return [option.backward for option in pareto(chain, block, options)]


def pareto(chain: Chain, block: Block, options: Iterable[BlockOption]) -> list[BlockOption]:
    """Options that no other beats in bytes held, time, and bytes while the backward runs."""

    def figures(option: BlockOption) -> tuple[float, ...]:
        cost = option_cost(chain, block, option)
        held = cost.held
        if cost.needs_enters and block.enters is not None:
            held += chain.model.bytes[block.enters]
        return held, cost.backward.time, cost.backward.whole

    weighed = ((figures(option), option) for option in dict.fromkeys(options))
    return not_beaten(weighed, constants.MOST_OPTIONS)


# -- the integer programme -------------------------------------------------------------------


def held_options(chain: Chain, block: Block, deadline: Deadline) -> Iterator[BlockOption]:
    """Options that hold fewer and fewer bytes, each value made again at most once."""
    backward = tuple(block.backward)
    saved = read_later(chain.model, backward) & block.reach
    most = sum(chain.model.bytes[value] for value in saved)
    for k in reversed(range(GRID)):
        kept = _held(chain, block, saved, most * k // GRID, deadline)
        if kept is not None:
            yield BlockOption(_with_runs(chain, block, kept))


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


def _with_runs(chain: Chain, block: Block, held: frozenset[int]) -> tuple[int, ...]:
    """The backward with what is not held made again in front of its first reader."""
    model, there = chain.model, set(held)
    steps: list[int] = []
    for op in block.backward:
        missing = {value for value in model.reads[op] if value in block.local} - there
        runs: list[int] = []
        for maker in reversed(block.forward):
            if not missing.isdisjoint(model.writes[maker]):
                runs.append(maker)
                missing.update(v for v in model.reads[maker] if v in block.local and v not in there)
        for maker in reversed(runs):
            steps.append(maker)
            there.update(model.writes[maker])
        steps.append(op)
    return tuple(steps)


# -- eviction paths --------------------------------------------------------------------------


def path_options(chain: Chain, block: Block, deadline: Deadline) -> Iterator[BlockOption]:
    """The backward of what evictions find for the block's own problem, with several pauses."""
    model, part = chain.model, part_of(chain, block)
    whole = sum(model.bytes[value] for value in block.reach) + max(
        model.own_bytes[op] for op in part.ops
    )
    found = part.schedules(
        whole, lambda op: bool(block.local.intersection(model.writes[op])), deadline
    )
    return map(BlockOption, found)
