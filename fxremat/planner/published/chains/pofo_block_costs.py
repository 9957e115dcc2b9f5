"""The ways to run one block of a chain: which values are held for its backward, which are sent.

The dynamic programme of POFO (Beaumont, Eyraud-Dubois, Shilova, NeurIPS 2021) has two: hold all
that the backward reads, or nothing but the value that enters, which may be sent in either case.
Here a block has several options (`block_options`): sets of values to hold, from which its backward
makes the others. A way is an option, and which of the largest values
that it holds are sent; there may be one way for each choice.

Values of ops that run once, which no block may free, are sent as well if only the block itself
reads them. They count as less than nothing of what is kept, as they are part of the chain's fixed
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.core.problem import Copies
from fxremat.core.schedule import Kind
from fxremat.core.timeline import transfer_us
from fxremat.planner import constants
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.published.chains.chain import Block, Chain
from fxremat.planner.published.chains.chain_costs import BlockCost, OptionCost
from fxremat.planner.published.chains.rotor_table import PAID
from fxremat.planner.published.parts import read_later

Row = npt.NDArray[np.float64]
Wait = tuple[float, float]
"""When a transfer may begin, and how long it takes."""


class Ways(NamedTuple):
    """The ways to run one block, an entry of every array for each.

    Bytes are those at the worst step of the forward and of the backward, those that stay in
    between, and those that are sent. ``out`` and ``back`` are the transfers of the block's own
    values, ``out_left`` and ``back_left`` what remains of them after its forward, and before its
    backward, if nothing else moves. ``paid`` is 1 where the value that leaves is held for this
    block: then it is the next one that keeps or sends it.
    """

    added: Row
    forward: Row
    backward: Row
    forward_bytes: Row
    backward_bytes: Row
    kept: Row
    sent: Row
    out: Row
    out_left: Row
    back: Row
    back_left: Row
    paid: Row


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

    chain: Chain
    block: Block
    cost: BlockCost
    copies: Copies

    @cached_property
    def own(self) -> frozenset[int]:
        """Values that may not be freed, which this block alone writes and reads."""
        chain, block = self.chain, self.block
        read, elsewhere = set[int](), set[int]()
        for op, reads in enumerate(chain.model.reads):
            if op in block.backward:
                read.update(reads)
            elif op not in block.forward:
                elsewhere.update(reads)
        return frozenset(
            value
            for value in (read & chain.spans.keys()) - elsewhere
            if chain.model.writer[value] in block.forward and not chain.model.is_output[value]
        )

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest value that may be sent."""
        return max((self.chain.model.bytes[v] for v in self.block.reach | self.own), default=0)

    def ways(self, x: int) -> list[Way]:
        """The ways of the block that no other beats, and only some where they are many."""
        kept = pareto([way for option in self.cost.options for way in self._of(option, x)])
        return kept[:: max(1, -(-len(kept) // constants.MOST_OPTIONS))]

    def _of(self, option: OptionCost, x: int) -> Iterator[Way]:
        """The option, with every choice among the largest values that it holds."""
        block, sizes = self.block, self.chain.model.bytes
        stored = block.enters is not None and (x == PAID or option.needs_enters)
        later = read_later(self.chain.model, option.backward.steps)
        held = (later & block.local) - {block.leaves}
        may = (held - block.early) | self.own | ({block.enters} if stored else set())
        large = sorted((v for v in may if v is not None and sizes[v]), key=lambda v: (-sizes[v], v))
        figures = self._figures(option, x, stored)
        most = int(math.log2(constants.MOST_OPTIONS))  # each may be sent or not
        moves = self._moves(option, large[:most])
        for count in range(len(moves) + 1):
            for sent in combinations(sorted(moves), count):
                nbytes = sum(sizes[value] for value in sent)
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
        leaves = self.block.leaves if option.holds_leaves else None
        return (
            first.time + backward.time - base.first.time - base.backward.time,
            first.time,
            backward.time,
            first.apart + enters if stored else first.whole,
            backward.apart + enters if x == PAID else backward.whole,
            option.held_first + enters - (0 if leaves is None else self.chain.model.bytes[leaves]),
        )

    def _moves(self, option: OptionCost, values: Sequence[int]) -> dict[int, tuple[Wait, Wait]]:
        """For each value, when it may leave and how long that takes; the same for its return,
        looking back from the end of the backward."""
        model = self.chain.model
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
        return transfer_us(self.copies, kind, self.chain.model.bytes[value])


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
    """The ways that no other beats in time, bytes and transfers."""
    by = figures_of(ways)
    less = np.stack((by.added, by.forward_bytes, by.backward_bytes, by.kept,
                     by.out, by.out_left, by.back_left, by.paid, -by.paid), axis=1)  # fmt: skip
    order = np.lexsort(less.T[::-1])
    kept: list[int] = []
    for at in map(int, order):
        if not (less[kept] <= less[at]).all(axis=1).any():
            kept.append(at)
    return [ways[at] for at in kept]
