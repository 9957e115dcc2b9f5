"""POFO: the best of recomputing and sending to the host, for chains of blocks.

Beaumont, Eyraud-Dubois and Shilova, "Efficient Combination of Rematerialization and Offloading
for Training DNNs" (NeurIPS 2021). The programme is `fxremat.planner.published.pofo_table`.

The programme knows a block by its worst steps, and counts the part of a value that has not left,
where truly the value stays until all of it has. So it is asked several times: for blocks of several
sizes, with as much less memory as a value has that is leaving. `fxremat.planner.moves.transfers`
places what it answers within the true budget, and the fastest of these plans and Rotor's is taken.

Conservative on purpose: what was sent is back when its block's backward starts, and no recomputed
segment sends values of its own. Schedules are as persistent as Rotor's.

To run a block, the paper's programme has two ways: hold all
that the backward reads, or nothing but the value that enters, which may be sent in either case.
Here a block has several options (`rockmate`): sets of values to hold, from which its backward
makes the others. A way is an option, and which of the largest values
that it holds are sent; there may be one way for each choice.

Values of ops that run once, which no block may free, are sent as well if only the block itself
reads them. They count as less than nothing of what is kept, as they are part of the chain's fixed
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Problem
from fxremat.core.schedule import Kind, Step
from fxremat.core.timeline import Timeline, replay, transfer_us
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.planner.plans import make_plan, not_beaten, rank
from fxremat.planner.published import rotor
from fxremat.planner.published.chain import (
    Block,
    BlockCost,
    Chain,
    OptionCost,
    find_chain,
)
from fxremat.planner.published.parts import PartPlans, read_later
from fxremat.planner.published.pofo_table import REST, SEND_AND_RECOMPUTE, Decision, Programme, Ways
from fxremat.planner.published.rockmate import block_options
from fxremat.planner.published.rotor import PAID, PAY, Table, coarser, grains
from fxremat.planner.solvers import ProblemRefused, SolverOptions

NAME = "pofo"


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The fastest plan found within the budget, or that of least peak where none fits.

    Never slower than Rotor's plan, and that one where nothing may move. Raises `NotAChain` for a
    problem that is not a chain of blocks, `ProblemRefused` for one with weights in host memory.
    """
    if problem.host:
        raise ProblemRefused(
            f"{problem.host[0]} lives in host memory, and the solver 'pofo' moves activations "
            "only. Use the solver 'auto', which takes any problem."
        )
    deadline = Deadline(options.time_limit_s)
    alone = replace(rotor.solve(problem, budget_bytes, options), solver=NAME)
    if problem.copies is None:
        return alone
    steps: tuple[Step, ...] = alone.steps
    copies = problem.copies
    if budget_bytes is not None and copies.to_host and copies.to_device and not copies.only_host:
        search = _PofoSearch(problem, copies, budget_bytes, deadline, replay(problem, steps))
        search.run()
        steps = search.best.steps
    return make_plan(problem, steps, NAME, budget_bytes=budget_bytes, seconds=deadline.seconds())


@dataclass
class _PofoSearch:
    """The best schedule so far."""

    problem: Problem
    copies: Copies
    budget: int
    deadline: Deadline
    best: Timeline

    def run(self) -> None:
        """Ask the programmes of the chain and of one of larger blocks."""
        plans = PartPlans(self.deadline)
        for chain in grains(coarser(find_chain(self.problem), constants.MOST_BLOCKS)):
            its = [block_options(block, plans) for block in chain.blocks]
            segments = Table(chain, its, self.deadline)
            if not segments.done:
                return
            question = ChainQuestion(chain, segments, self.copies)
            for part in constants.HALVES:
                self._ask(question, self.budget - part * question.largest)
            for part in constants.HALVES if self.best.peak_bytes > self.budget else ():
                self._ask(question, self.budget + part * (self.best.peak_bytes - self.budget))

    def _ask(self, question: ChainQuestion, memory: float) -> None:
        """Offer what the programme answers that is told of so many bytes."""
        fits = self.best.peak_bytes <= self.budget
        most = self.best.time_us - self.problem.base_time_us if fits else math.inf
        if most <= 0 or not self.deadline.running():
            return
        cap = math.inf if self.copies.host_bytes is None else self.copies.host_bytes
        for items in question.answers(memory, most, self.deadline):
            for budget in sorted({self.budget, max(self.budget, int(memory))}):
                line = place(self.problem, items, budget)
                better = rank(line, self.budget) < rank(self.best, self.budget)
                if line.host_peak_bytes <= cap and better:
                    self.best = line


# -- the ways to run one block ----------------------------------------------------------------

Wait = tuple[float, float]
"""When a transfer may begin, and how long it takes."""


@dataclass(frozen=True)
class Way:
    """An option of a block, the values of it that are sent, and what both take."""

    option: OptionCost
    sent: frozenset[int]
    figures: tuple[float, ...]


def figures_of(ways: Sequence[Way]) -> Ways:
    """The figures of the ways by column."""
    rows = np.array([way.figures for way in ways]).reshape(len(ways), len(Ways._fields))
    return Ways(*rows.T)


@dataclass(frozen=True)
class Sender:
    """What one block may send. A value leaves when the op that writes it ends."""

    block: Block
    cost: BlockCost
    copies: Copies

    @cached_property
    def own(self) -> frozenset[int]:
        """Values that may not be freed, which this block alone writes and reads."""
        block, model = self.block, self.block.model
        read, elsewhere = set[int](), set[int]()
        for op, reads in enumerate(model.reads):
            if op in block.backward:
                read.update(reads)
            elif op not in block.forward:
                elsewhere.update(reads)
        return frozenset(
            value
            for value in (read & block.chain.spans.keys()) - elsewhere
            if model.writer[value] in block.forward and not model.is_output[value]
        )

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest value that may be sent."""
        return max((self.block.model.bytes[v] for v in self.block.reach | self.own), default=0)

    def ways(self, x: int) -> list[Way]:
        """The ways of the block that no other beats, and only some where they are many."""
        return pareto([way for option in self.cost.options for way in self._of(option, x)])

    def _of(self, option: OptionCost, x: int) -> Iterator[Way]:
        """The option, with every choice among the largest values that it holds."""
        block, sizes = self.block, self.block.model.bytes
        stored = block.enters is not None and (x == PAID or option.needs_enters)
        later = read_later(self.block.model, option.backward.steps)
        held = (later & block.local) - {block.leaves}
        may = (held - block.early) | self.own | ({block.enters} if stored else set())
        large = sorted((v for v in may if v is not None and sizes[v]), key=lambda v: (-sizes[v], v))
        figures = self._figures(option, x, stored)
        most = int(math.log2(constants.MOST_OPTIONS))  # each may be sent or not
        moves = self._moves(option, large[:most])
        for count in range(len(moves) + 1):
            for sent in combinations(sorted(moves), count):
                nbytes = self.block.model.size_of(sent)
                out = _queue([moves[value][0] for value in sent], option.first.time)
                back = _queue([moves[value][1] for value in sent], option.backward.time)
                kept = figures[-1] - nbytes
                row = (*figures[:-1], kept, nbytes, *out, *back, option.holds_leaves)
                yield Way(option, frozenset(sent), tuple(map(float, row)))

    def _figures(self, option: OptionCost, x: int, stored: bool) -> tuple[float, ...]:
        """The first columns of `Ways`, if nothing is sent.

        What leaves is stored by the next block, where this one needs it, too.
        """
        base, first, backward = self.cost.options[0], option.first, option.backward
        enters = self.cost.enters if stored else 0
        leaves = self.block.left if option.holds_leaves else ()
        return (
            first.time + backward.time - base.first.time - base.backward.time,
            first.time,
            backward.time,
            first.apart + enters if stored else first.whole,
            backward.apart + enters if x == PAID else backward.whole,
            option.held_first + enters - self.block.model.size_of(leaves),
        )

    def _moves(self, option: OptionCost, values: Sequence[int]) -> dict[int, tuple[Wait, Wait]]:
        """For each value, when it may leave and how long that takes; the same for its return,
        looking back from the end of the backward."""
        model = self.block.model
        written = _touch_times(model, option.first.steps, model.writes, ends=True)
        read = _touch_times(model, option.backward.steps, model.reads, ends=False)
        end = option.backward.time
        return {
            value: (
                (written.get(value, 0.0), self._takes("to host", value)),
                (end - read.get(value, end), self._takes("to device", value)),
            )
            for value in values
        }

    def _takes(self, kind: Kind, value: int) -> float:
        return transfer_us(self.copies, kind, self.block.model.bytes[value])


def _touch_times(
    model: IndexedProblem, steps: Sequence[int], touched: Sequence[Sequence[int]], ends: bool
) -> dict[int, float]:
    """When the first op that touches each value begins, or ends."""
    now, found = 0.0, dict[int, float]()
    for op in steps:
        end = now + model.time[op]
        for value in touched[op]:
            found.setdefault(value, end if ends else now)
        now = end
    return found


def _queue(waits: Sequence[Wait], end: float) -> Wait:
    """The time of all transfers, and what is left of it at the end."""
    now = left = 0.0
    for begin, takes in sorted(waits):
        left = max(0.0, left - (begin - now)) + takes
        now = begin
    return sum(takes for _, takes in waits), max(0.0, left - (end - now))


def pareto(ways: Sequence[Way]) -> list[Way]:
    """The ways that no other beats in time, bytes and transfers, and only some where many."""
    by = figures_of(ways)
    less = np.stack((by.added, by.forward_bytes, by.backward_bytes, by.kept,
                     by.out, by.out_left, by.back_left, by.paid, -by.paid), axis=1)  # fmt: skip
    return [ways[at] for at in not_beaten(list(less), constants.MOST_OPTIONS)]


# -- from decisions to ops -------------------------------------------------------------------


class ChainQuestion:
    """A chain, what its programme chooses among, and the bytes of the largest value to send."""

    def __init__(self, chain: Chain, segments: Table, copies: Copies) -> None:
        self.chain, self.segments, self.copies = chain, segments, copies
        pairs = zip(chain.blocks, segments.costs, strict=True)
        senders = [Sender(*pair, copies) for pair in pairs]
        self.choices = [
            [sender.ways(PAY), sender.ways(PAID) if two else []]
            for sender, two in zip(senders, segments.two, strict=True)
        ]
        self.largest = max(sender.largest for sender in senders)

    def answers(self, budget: float, most: float, deadline: Deadline) -> Iterator[list[Item]]:
        """What the programme answers that adds at most so much time, the best first."""
        ways = [[figures_of(each) for each in pair] for pair in self.choices]
        programme = Programme(self.segments, ways, self.copies, budget, most, deadline)
        return map(self.items, programme.answers(8))

    def items(self, decisions: Sequence[Decision]) -> list[Item]:
        """The ops in order, and what is fetched between them."""
        before: list[int] = []
        after: list[Sequence[int]] = []
        sent: set[int] = set()
        for each in decisions:
            if each.choice >= 0:
                way = self.choices[each.i][each.x][each.choice]
                before += way.option.first.steps
                after.append(way.option.backward.steps)
                sent |= way.sent
                continue
            part = self.segments.part(each.x, each.i, each.j, each.slots)
            turn = part.index(self.chain.turn) + 1 if each.choice == REST else 0
            before += part[:turn]
            after.append(part[turn:])
            for cost in self.segments.costs[each.i : each.j + 1] if each.choice != REST else ():
                before += cost.unsaved.first.steps
            enters = self.chain.blocks[each.i].enters
            if each.choice == SEND_AND_RECOMPUTE and enters is not None:
                sent.add(enters)
        return self._fetched(before, [op for steps in reversed(after) for op in steps], sent)

    def _fetched(self, before: Sequence[int], after: Sequence[int], sent: set[int]) -> list[Item]:
        """What was sent is fetched for the first op after the turn that reads it."""
        model = self.chain.model
        items: list[Item] = [*model.names(before)]
        away = set(sent)
        for op in after:
            items += [Fetch(model.value_names[value]) for value in model.reads[op] if value in away]
            away.difference_update(model.reads[op], model.writes[op])
            items += model.names((op,))
        return items
