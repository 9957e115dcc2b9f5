"""The least arena by an integer programme, for few buffers.

Every buffer has an offset of ``alignment * multiple[i]``. Two buffers i and j that are alive at one
step have a column ``below[i,j]``: 1 where i lies below j, 0 where j lies below i. The programme is
that of strip packing with one coordinate given, as in Sekiyama et al., "Profile-guided memory
optimization for deep neural networks" (arXiv 1804.10001).
"""

from __future__ import annotations

from itertools import combinations

from fxremat.planner.addresses import Sections
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import Milp, Solution, Term


def place_exactly(
    sections: Sections, enough: int, unit: int, nodes: int, deadline: Deadline
) -> tuple[int, ...] | None:
    """The offsets of the least arena, in bytes; None where the limits leave no solution.

    ``enough`` are bytes of an arena that the buffers fit, ``unit`` is a divisor of all sizes and
    alignments.
    """
    programme = _Programme(sections, enough, unit)
    for one, other in combinations(range(len(sections.size)), 2):
        together = max(sections.begin[one], sections.begin[other])
        if together < min(sections.end[one], sections.end[other]):
            programme.part(one, other)
    solution = programme.milp.solve(deadline, nodes=nodes, gap=0.0)
    if solution.values is None:
        return None
    return programme.offsets(solution)


class _Programme:
    """Columns and rows, in units."""

    def __init__(self, sections: Sections, enough: int, unit: int) -> None:
        self.sections = sections
        self.milp = Milp()
        self.enough = enough // unit
        self.size = [size // unit for size in sections.size]
        self.alignment = [alignment // unit for alignment in sections.alignment]
        self.arena = self.milp.real(1.0, sections.least_bytes // unit, self.enough)
        self.multiple = [self._multiple(buffer) for buffer in range(len(self.size))]
        self.below: dict[tuple[int, int], int] = {}

    def _multiple(self, buffer: int) -> int:
        """alignment * multiple + size <= arena."""
        most = (self.enough - self.size[buffer]) // self.alignment[buffer]
        column = self.milp.real(0.0, 0, most)
        self.milp.integer[column] = True
        self.milp.row(
            [(column, self.alignment[buffer]), (self.arena, -1.0)], high=-self.size[buffer]
        )
        return column

    def part(self, one: int, other: int) -> None:
        """One lies below the other, or the reverse. All of them lie within ``enough``:

        offset[one] + size[one] <= offset[other] + enough * (1 - below), and
        offset[other] + size[other] <= offset[one] + enough * below.
        """
        column = self.below[one, other] = self.milp.binary()
        difference: list[Term] = [
            (self.multiple[one], self.alignment[one]),
            (self.multiple[other], -self.alignment[other]),
        ]
        far = self.enough
        self.milp.row([*difference, (column, far)], high=far - self.size[one])
        self.milp.row([*difference, (column, far)], low=self.size[other])

    def offsets(self, solution: Solution) -> tuple[int, ...]:
        """The lowest offsets under the order of the solution, in bytes: whole numbers again."""
        assert solution.values is not None
        values = solution.values
        by_offset = sorted(
            range(len(self.size)),
            key=lambda buffer: values[self.multiple[buffer]] * self.alignment[buffer],
        )
        beneath: list[list[int]] = [[] for _ in self.size]
        for (one, other), column in self.below.items():
            low, high = (one, other) if solution.chosen(column) else (other, one)
            beneath[high].append(low)
        offsets = [0] * len(self.size)
        for buffer in by_offset:
            tops = (offsets[low] + self.sections.size[low] for low in beneath[buffer])
            lowest = max(tops, default=0)
            offsets[buffer] = lowest + -lowest % self.sections.alignment[buffer]
        return tuple(offsets)
