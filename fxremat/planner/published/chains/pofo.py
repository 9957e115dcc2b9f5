"""POFO: the best of recomputing and sending to the host, for chains of blocks.

Beaumont, Eyraud-Dubois and Shilova, "Efficient Combination of Rematerialization and Offloading
for Training DNNs" (NeurIPS 2021). The programme is `fxremat.planner.published.chains.pofo_table`.

The programme knows a block by its worst steps, and counts the part of a value that has not left,
where truly the value stays until all of it has. So it is asked several times: for blocks of several
sizes, with as much less memory as a value has that is leaving. `fxremat.planner.moves.transfers`
places what it answers within the true budget, and the fastest of these plans and Rotor's is taken.

Conservative on purpose: what was sent is back when its block's backward starts, and no recomputed
segment sends values of its own. Schedules are as persistent as Rotor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Problem
from fxremat.core.schedule import Step
from fxremat.core.timeline import Timeline, replay
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.moves.offload import least_bytes
from fxremat.planner.moves.transfers import Fetch, Item, place
from fxremat.planner.options import ProblemRefused, SolverOptions
from fxremat.planner.plans import make_plan
from fxremat.planner.published.chains import rotor
from fxremat.planner.published.chains.block_options import BlockOptions
from fxremat.planner.published.chains.chain import Chain, find_chain
from fxremat.planner.published.chains.chain_costs import BlockOption, block_costs
from fxremat.planner.published.chains.pofo_block_costs import Sender, Way, figures_of
from fxremat.planner.published.chains.pofo_table import (
    REST,
    SEND_AND_RECOMPUTE,
    Asked,
    Decision,
    Programme,
    Segments,
)
from fxremat.planner.published.chains.rotor import coarser, grains
from fxremat.planner.published.chains.rotor_table import PAID, PAY
from fxremat.planner.published.parts import PartPlans

NAME = "pofo"


class LivesOnHost(ProblemRefused, ValueError):
    """The problem has values that live in host memory; this solver sends activations only."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} lives in host memory, and the solver 'pofo' moves activations only. "
            "Use the solver 'auto', which takes any problem."
        )


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The fastest plan found within the budget, or that of least peak where none fits.

    Never slower than Rotor's plan, and that one where nothing may move. Raises `NotAChain` for a
    problem that is not a chain of blocks, `LivesOnHost` for one with weights in host memory.
    """
    if problem.host:
        raise LivesOnHost(problem.host[0])
    deadline = Deadline(options.time_limit_s)
    alone = replace(rotor.solve(problem, budget_bytes, options), solver=NAME)
    if problem.copies is None:
        return alone
    steps: tuple[Step, ...] = alone.steps
    if budget_bytes is not None and _may_move(problem.copies):
        search = _PofoSearch(
            problem, problem.copies, budget_bytes, deadline, replay(problem, steps)
        )
        search.run()
        steps = search.best.steps
    return make_plan(
        problem,
        steps,
        NAME,
        budget_bytes=budget_bytes,
        seconds=deadline.seconds(),
        peak_bound_bytes=least_bytes(problem),
    )


def _may_move(copies: Copies) -> bool:
    return bool(copies.to_host and copies.to_device) and not copies.only_host


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
        solved = BlockOptions(PartPlans(self.deadline))
        for chain in grains(coarser(find_chain(self.problem), constants.MOST_BLOCKS)):
            its = [solved.of(chain, block) for block in chain.blocks]
            question = ChainQuestion.of(chain, its, self.copies, self.deadline)
            if question is None:
                return
            for part in constants.HALVES:
                self._ask(question, self.budget - part * question.largest)
            for part in constants.HALVES if self.best.peak_bytes > self.budget else ():
                self._ask(question, self.budget + part * (self.best.peak_bytes - self.budget))

    def _ask(self, question: ChainQuestion, memory: float) -> None:
        """Offer what the programme answers that is told of so many bytes."""
        fits = self.best.peak_bytes <= self.budget
        most = self.best.time_us - self.problem.base_time_us if fits else math.inf
        if most > 0 and self.deadline.running():
            asked = Asked(self.copies, memory, most)
            for items in question.answers(asked, self.deadline):
                for budget in sorted({self.budget, max(self.budget, int(memory))}):
                    self._offer(place(self.problem, items, budget))

    def _offer(self, line: Timeline) -> None:
        """Note a schedule if it is better, and the host has the memory for it."""
        cap = math.inf if self.copies.host_bytes is None else self.copies.host_bytes
        if line.host_peak_bytes <= cap and self._rank(line) < self._rank(self.best):
            self.best = line

    def _rank(self, line: Timeline) -> tuple[int, float]:
        """Less is better: within the budget first, then less time."""
        return max(0, line.peak_bytes - self.budget), line.time_us


# -- from decisions to ops -------------------------------------------------------------------


@dataclass(frozen=True)
class ChainQuestion:
    """A chain, what its programme chooses among, and the bytes of the largest value to send."""

    chain: Chain
    segments: Segments
    choices: Sequence[Sequence[Sequence[Way]]]
    largest: int

    @staticmethod
    def of(
        chain: Chain, options: Sequence[Sequence[BlockOption]], copies: Copies, deadline: Deadline
    ) -> ChainQuestion | None:
        """The question of a chain; None where the clock stopped it."""
        costs = block_costs(chain, options)
        segments = Segments(costs, deadline)
        if not segments.done:
            return None
        senders = [Sender(chain, *pair, copies) for pair in zip(chain.blocks, costs, strict=True)]
        choices = [
            [sender.ways(PAY), sender.ways(PAID) if two else []]
            for sender, two in zip(senders, segments.two, strict=True)
        ]
        return ChainQuestion(chain, segments, choices, max(sender.largest for sender in senders))

    def answers(self, asked: Asked, deadline: Deadline) -> Iterator[list[Item]]:
        """What the programme answers, the best first."""
        ways = [[figures_of(each) for each in pair] for pair in self.choices]
        programme = Programme(self.segments, ways, asked, deadline)
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
            if each.choice == REST:
                turn = part.index(self.chain.turn) + 1
                before += part[:turn]
                after.append(part[turn:])
                continue
            for cost in self.segments.costs[each.i : each.j + 1]:
                before += cost.first_unsaved.steps
            after.append(part)
            if each.choice == SEND_AND_RECOMPUTE:
                enters = self.chain.blocks[each.i].enters
                assert enters is not None
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
