"""Rotor: the best persistent checkpointing schedule of a chain of blocks.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous
chains" (arXiv 1911.13214). The dynamic programme (`Table`) knows the memory of a chain only in
slots and by block, so its plans are replayed, and one is chosen by its replayed figures. They do
not depend on the budget: a smaller budget never gives less time.

``best[x, i, j, m]`` is the least time of the forward of the blocks i..j and of their backward
j..i within ``m`` slots of memory, where the value that enters block i is there at the start. The
cases are those of the persistent schedules of Beaumont et al. (arXiv 1911.13214, section 4):

* all: run block i so that it holds what an option's backward needs, go on with i+1..j;
* check: hold only the value that enters i, run i..c-1 holding nothing, do c..j, then i..c-1.

Four things differ from the paper, for a replay counts what is read, not what a block returns:

* the value that enters is paid for by block i (x = 0), or held by i-1 anyway (x = 1), so that
  where no backward reads it, it goes once block i has run;
* in front of the turn (j is the last block) every op runs, after it only those that are needed;
* gradients and outputs are no part of the state: they follow from the place in the backward;
* the bytes ``early`` of blocks that hold nothing stay nevertheless until the turn.

A row over all m is one array operation. The table gives the best plan of every budget at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.plans import make_plan, not_beaten, remembered
from fxremat.planner.published.chain import (
    BlockCost,
    BlockRun,
    Chain,
    NotAChain,
    OptionCost,
    find_chain,
)
from fxremat.planner.published.parts import Steps
from fxremat.planner.solvers import SolverOptions

NAME = "rotor"
PAY, PAID = 0, 1
SLOTS = 500
"""Slots of memory in the table of the longest chain: as many as in Rotor (Beaumont et al., arXiv
1911.13214, whose class `Checkpointable` has ``mem_slots=500``). A shorter one has as many more."""


class Table:
    """The programme of one chain, with several options per block; ``done`` unless out of time.

    ``choice`` says for each entry of ``best`` which case it is: k for "all" with option k of block
    i, -1 - k for "check" with the cut before block i + 1 + k.
    """

    def __init__(
        self, chain: Chain, options: Iterable[Iterable[Steps]], deadline: Deadline
    ) -> None:
        pairs = zip(chain.blocks, options, strict=True)
        self.costs = costs = [BlockCost(block, its) for block, its in pairs]
        self.count = len(costs)
        most = store_all_bytes(costs)
        self.slot = max(1.0, most * self.count / (SLOTS * constants.MOST_BLOCKS))
        self.slots = self._slots(most) + self.count
        self.two = [False, *(any(o.holds_leaves for o in cost.options) for cost in costs[:-1])]
        shape = (2, self.count, self.count, self.slots + 1)
        self.best = np.full(shape, np.inf)
        self.choice = np.zeros(shape, dtype=np.int16)
        self._prepare()
        self.done = self._fill(deadline)

    # -- questions -------------------------------------------------------------------------

    def levels(self) -> list[int]:
        """The slots at which less time is enough, from many to few."""
        row = self.best[PAY, 0, self.count - 1]
        return [int(m) for m in np.flatnonzero(row < np.append(np.inf, row[:-1]))[::-1]]

    def steps(self, slots: int) -> list[int]:
        """The ops of the best schedule within so many slots."""
        return self.part(PAY, 0, self.count - 1, slots)

    def part(self, x: int, i: int, j: int, m: int) -> list[int]:
        """The ops of the best way to do the blocks i..j within ``m`` slots."""
        k = int(self.choice[x, i, j, m])
        if k < 0:
            cut = i - k
            left = m - int(self._held_by_check(x, i, j, cut))
            ahead = [op for run in self._unsaved(j)[i:cut] for op in run.steps]
            return [*ahead, *self.part(PAY, cut, j, left), *self.part(x, i, cut - 1, m)]
        option, inside = self.costs[i].options[k], list[int]()
        if i < j:
            _, _, holds = self._option(x, i, j, option)
            inside = self.part(int(option.holds_leaves), i + 1, j, m - holds)
        return [*self._forward(option, i, j)[0].steps, *inside, *option.backward.steps]

    # -- what the cases cost ---------------------------------------------------------------

    def _slots(self, nbytes: float) -> int:
        return int(np.ceil(nbytes / self.slot))

    def _pays(self, x: int, i: int) -> int:
        return self.costs[i].enters if x == PAY else 0

    def _unsaved(self, j: int) -> list[BlockRun]:
        """The runs of all blocks that hold nothing, where block j is the last one."""
        first = j == self.count - 1
        return [cost.unsaved.first if first else cost.unsaved.again for cost in self.costs]

    def _prepare(self) -> None:
        """Sums over the forward runs that hold nothing.

        ``skip_needs[first, i, k]`` are the bytes of running the blocks i..k, with what enters i
        held apart.
        """
        both = self._unsaved(-1), self._unsaved(self.count - 1)
        self.times = [np.cumsum([0.0, *(run.time for run in runs)]) for runs in both]
        self.early = np.cumsum([0, *(cost.unsaved.held_first for cost in self.costs)])
        self.skip_needs = np.zeros((2, self.count, self.count))
        for first, runs in enumerate(both):
            for i in range(self.count):
                stays = self.early[i : self.count] - self.early[i] if first else 0
                whole = np.array([runs[i].apart, *(run.whole for run in runs[i + 1 :])])
                self.skip_needs[first, i, i:] = np.maximum.accumulate(whole + stays)

    def _held_by_check(self, x: int, i: int, j: int, cut: Any) -> Any:
        """The slots that the case "check" holds for a cut, or for each of several.

        Held bytes are rounded to the nearest: rounded up, a hundred blocks would seem to hold a
        hundred slots more than they do. Every plan is replayed in any case.
        """
        stays = self.early[cut] - self.early[i] if j == self.count - 1 else 0 * cut
        return np.rint((stays + self._pays(x, i)) / self.slot).astype(np.int64)

    def _option(self, x: int, i: int, j: int, option: OptionCost) -> tuple[float, int, int]:
        """The case "all": time without that of other blocks, slots needed, slots held."""
        forward, gap = self._forward(option, i, j)
        pays = self._pays(x, i)
        kept = pays if option.needs_enters else 0
        if x == PAID:
            needs = max(forward.apart + gap, option.backward.apart)
        elif option.needs_enters:
            needs = max(pays + forward.apart + gap, option.backward.whole)
        else:
            needs = max(forward.whole + gap, option.backward.apart)
        held = (option.held_first if j == self.count - 1 else option.held) + kept
        holds = round(held / self.slot)
        return forward.time + option.backward.time, max(self._slots(needs), holds), holds

    def _forward(self, option: OptionCost, i: int, j: int) -> tuple[BlockRun, int]:
        """The forward of block i in front of i+1..j, and the fixed bytes to add to it."""
        if j == self.count - 1:
            return option.first, 0
        return (option.again if i < j else option.last), self.costs[j].gap

    # -- filling ---------------------------------------------------------------------------

    def _fill(self, deadline: Deadline) -> bool:
        for j in range(self.count):
            if not deadline.running():
                return False
            for i in range(j, -1, -1):
                for x in (PAY, PAID) if self.two[i] else (PAY,):
                    self._all(x, i, j)
                    if i < j:
                        self._check(x, i, j)
        return True

    def _all(self, x: int, i: int, j: int) -> None:
        """The case "all" with each option."""
        for k, option in enumerate(self.costs[i].options):
            times, start, holds = self._option(x, i, j, option)
            if start > self.slots:
                continue
            if i < j:
                then = self.best[int(option.holds_leaves), i + 1, j]
                times = then[start - holds : self.slots + 1 - holds] + times
            row = self.best[x, i, j, start:]
            faster = times < row
            self.choice[x, i, j, start:][faster] = k
            np.minimum(row, times, out=row)

    def _check(self, x: int, i: int, j: int) -> None:
        """The case "check" with each cut, at once for those that hold the same."""
        first = int(j == self.count - 1)
        gap = 0 if first else self.costs[j].gap
        needs = np.ceil((self.skip_needs[first, i, i:j] + (self._pays(x, i) + gap)) / self.slot)
        takes = self.times[first][i + 1 : j + 1] - self.times[first][i]
        held = self._held_by_check(x, i, j, np.arange(i + 1, j + 1))
        for holds in np.unique(held[held <= self.slots]):
            low, high = np.searchsorted(held, (holds, holds + 1))
            total = self.best[PAY, i + 1 + low : i + 1 + high, j, : self.slots + 1 - holds]
            total = total + takes[low:high, None]
            total += self.best[x, i, i + low : i + high, holds:]
            total[np.arange(holds, self.slots + 1) < needs[low:high, None]] = np.inf
            row = self.best[x, i, j, holds:]
            faster = total.min(axis=0) < row
            if faster.any():
                at = total[:, faster].argmin(axis=0)
                row[faster] = total[at, faster]
                self.choice[x, i, j, holds:][faster] = -1 - low - at


def store_all_bytes(costs: Sequence[BlockCost]) -> int:
    """Bytes at the worst step where every block takes its first option and runs once."""
    held, worst, paid = 0, 0, False
    for cost in costs:
        option = cost.options[0]
        pays = 0 if paid else cost.enters
        kept = pays if option.needs_enters else 0
        worst = max(worst, held + pays + option.first.apart, held + kept + option.backward.apart)
        held, paid = held + option.held_first + kept, option.holds_leaves
    return worst


def choose(front: Sequence[Plan], budget_bytes: int | None) -> Plan:
    """The plan of least time within the budget, or of least peak; the front is by rising time."""
    fits = (p for p in front if budget_bytes is None or p.peak_bytes <= budget_bytes)
    return replace(next(fits, front[-1]), budget_bytes=budget_bytes)


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits.

    Raises `NotAChain` for a problem that is not a chain of blocks.
    """
    return choose(whole_front(problem, options), budget_bytes)


@remembered
def whole_front(problem: Problem, options: SolverOptions) -> tuple[Plan, ...]:
    """Plans that no other beats in both peak and time, remembered for the last few problems."""
    deadline = Deadline(options.time_limit_s)
    chain = coarser(find_chain(problem), constants.MOST_BLOCKS)
    schedules = chain_schedules(chain, chain.store_all, deadline)
    return best_plans(problem, schedules, NAME, deadline)


def chain_schedules(
    chain: Chain, options: Sequence[Sequence[Steps]], deadline: Deadline
) -> list[tuple[str, ...]]:
    """The schedules of the table, from least time to least memory; none where it was stopped.

    They are as many as every other slot of the longest chain, evenly picked.
    """
    table = Table(chain, options, deadline)
    if not table.done:
        return []
    levels = table.levels()
    stride = max(1, -(-len(levels) // (SLOTS // 2)))
    picks = dict.fromkeys([*levels[::stride], *levels[-1:]])
    return [chain.model.names(table.steps(slots)) for slots in picks]


def best_plans(
    problem: Problem, schedules: Iterable[tuple[str, ...]], name: str, deadline: Deadline
) -> tuple[Plan, ...]:
    """Replay the schedules and store-all, and keep what nothing else beats, by rising time."""
    plans = [make_plan(problem, steps, name) for steps in (problem.base_steps(), *schedules)]
    best = not_beaten([(plan.time_us, plan.peak_bytes) for plan in plans])
    return tuple(replace(plans[k], seconds=deadline.seconds()) for k in best)


def coarser(chain: Chain, most: int) -> Chain:
    """The chain with at most so many blocks: small neighbours are merged first."""
    while len(chain.blocks) > most:
        sizes = [len(block.forward) for block in chain.blocks]
        pairs = sorted(range(len(sizes) - 1), key=lambda k: (sizes[k] + sizes[k + 1], k))
        gone: set[int] = set()
        for k in pairs:
            if len(sizes) - len(gone) > most and not {k - 1, k, k + 1} & gone:
                gone.add(k)
        left = [cut for k, cut in enumerate(chain.cuts) if k not in gone]
        chain = Chain(chain.model, chain.turn, left)
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
