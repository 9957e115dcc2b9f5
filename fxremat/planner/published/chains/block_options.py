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
from operator import le

from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import build_model
from fxremat.planner.milp.highs import Milp, Term
from fxremat.planner.published.chains.chain import Block, Chain
from fxremat.planner.published.chains.chain_costs import (
    BlockOption,
    option_cost,
    read_later,
    store_all,
)
from fxremat.planner.published.chains.isolated_part import (
    backward_schedules,
    eviction_front,
    isolated_problem,
)

Shape = tuple[object, ...]
GRID = 10
"""Numbers of bytes held for which the integer programme is solved: as many as in Rockmate (Zhao
et al., whose class has ``nb_budget_save=10``)."""


class BlockOptions:
    """The options of blocks, each distinct shape solved once."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.solved: dict[Shape, list[tuple[int, ...]]] = {}

    def of(self, chain: Chain, block: Block) -> list[BlockOption]:
        """Store-all first, then what was found; only store-all once the clock has stopped."""
        ops = (*block.forward, *block.backward)
        key = shape(chain, block)
        if key not in self.solved and self.deadline.running():
            place = {op: k for k, op in enumerate(ops)}
            self.solved[key] = [
                tuple(place[op] for op in option.backward) for option in self._solve(chain, block)
            ]
        moved = [BlockOption(tuple(ops[k] for k in steps)) for steps in self.solved.get(key, ())]
        return list(dict.fromkeys([store_all(block), *moved]))

    def _solve(self, chain: Chain, block: Block) -> list[BlockOption]:
        options = [
            *held_options(chain, block, self.deadline),
            *path_options(chain, block, self.deadline),
        ]
        return pareto(chain, block, options)


# -- what makes blocks the same --------------------------------------------------------------


def shape(chain: Chain, block: Block) -> Shape:
    """All that matters of a block, with its values numbered as they come."""
    model = chain.model
    number: dict[int, int] = {}
    rows: list[object] = [len(block.forward)]
    for op in (*block.forward, *block.backward):
        for value in (*model.reads[op], *model.writes[op]):
            if value not in number:
                number[value] = len(number)
                rows.append((model.bytes[value], *_role(chain, block, value)))
        pairs = tuple((number[read], number[write]) for read, write in model.inplace[op])
        reads = tuple(number[value] for value in model.reads[op])
        writes = tuple(number[value] for value in model.writes[op])
        rows.append((model.time[op], model.workspace[op], reads, writes, pairs))
    return tuple(rows)


def _role(chain: Chain, block: Block, value: int) -> tuple[bool, bool, bool, bool]:
    stays = value in chain.spans and chain.spans[value][1] > block.backward.stop - 1
    return value in block.local, value == block.enters, value == block.leaves, stays


def pareto(chain: Chain, block: Block, options: Iterable[BlockOption]) -> list[BlockOption]:
    """Options that no other beats in time, bytes held and bytes while the backward runs.

    Where there are many they are thinned evenly by the bytes held.
    """
    weighed = []
    for option in dict.fromkeys(options):
        cost = option_cost(chain, block, option)
        held = cost.held
        if cost.needs_enters and block.enters is not None:
            held += chain.model.bytes[block.enters]
        weighed.append(((held, cost.backward.time, cost.backward.whole), option))
    weighed.sort(key=lambda pair: pair[0])
    kept: list[tuple[tuple[int, float, int], BlockOption]] = []
    for figures, option in weighed:
        if not any(all(map(le, other, figures)) for other, _ in kept):
            kept.append((figures, option))
    stride = max(1, -(-len(kept) // constants.MOST_OPTIONS))
    return [option for _, option in kept[::stride]]


# -- the integer programme -------------------------------------------------------------------


def held_options(chain: Chain, block: Block, deadline: Deadline) -> Iterator[BlockOption]:
    """Options that hold fewer and fewer bytes, each value made again at most once."""
    backward = tuple(block.backward)
    saved = read_later(chain, backward, block.reach)
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
    whole = sum(chain.model.bytes[value] for value in block.reach) + max(
        chain.model.own_bytes[op] for op in (*block.forward, *block.backward)
    )
    for pause in constants.HALVES:
        problem = isolated_problem(
            chain.model,
            block.forward,
            block.backward,
            int(pause * whole),
            outlives=lambda value: _role(chain, block, value)[3],
            may_rerun=lambda op: bool(block.local.intersection(chain.model.writes[op])),
        )
        front = eviction_front(build_model(problem), deadline)
        yield from map(
            BlockOption, map(tuple, backward_schedules(front, block.forward, block.backward))
        )
