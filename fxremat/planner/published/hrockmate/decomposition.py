"""Clusters: a graph of ops cut into parts that are planned apart, with what crosses between them.

A *cluster* is a stretch of the forward part in base order and the stretch of the backward part
that reads its values. Stretches of a topological order are convex, and the graph of clusters has
no cycles, whatever the graph of ops looks like: long skips and cross attention only make more
values cross. The cuts are those where the fewest bytes cross, of clusters of about equal size.

Source: Gusak et al., "HiRemate" (ICML 2025, PMLR 267), section on partitioning: clusters of
bounded size and small interface. Theirs grow bottom up by a score; ours are cut by a dynamic
programme, which is exact for its measure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.published.chains.chain import last_reads, never_rising, turns
from fxremat.planner.published.parts import Part


@dataclass(frozen=True)
class Decomposition:
    """A model in clusters, in forward order; the backward parts come in reverse order.

    ``makes`` has the values of each cluster's forward part that can be computed again and that
    other clusters read as well.
    """

    model: IndexedProblem
    turn: int
    clusters: tuple[Part, ...]
    makes: tuple[frozenset[int], ...]

    @staticmethod
    def cut(model: IndexedProblem, turn: int, starts: Iterable[int]) -> Decomposition:
        """The clusters that begin at op 0 and at these ops of the forward part."""
        firsts = [0, *starts]
        of_op = np.searchsorted(firsts, np.arange(turn + 1), side="right") - 1
        owners = _owners(model, turn, of_op, len(firsts))
        whose = [int(c) for c in of_op] + owners
        readers: list[set[int]] = [set() for _ in model.bytes]
        for op, reads in enumerate(model.reads):
            for value in reads:
                readers[value].add(whose[op])
        local: list[set[int]] = [set() for _ in firsts]
        makes: list[set[int]] = [set() for _ in firsts]
        for value, op in enumerate(model.writer):
            if op <= turn and model.evictable(value):
                alone = readers[value] <= {whose[op]}
                (local if alone else makes)[whose[op]].add(value)
        clusters = []
        for c, (start, stop) in enumerate(pairwise((*firsts, turn + 1))):
            ops = [turn + 1 + k for k, owner in enumerate(owners) if owner == c]
            backward = range(ops[0], ops[-1] + 1) if ops else range(model.n, model.n)
            clusters.append(_part(model, range(start, stop), backward, (local[c], makes[c])))
        return Decomposition(model, turn, tuple(clusters), tuple(map(frozenset, makes)))


def _part(
    model: IndexedProblem,
    forward: range,
    backward: range,
    own: tuple[set[int], set[int]],
) -> Part:
    """A cluster, to be planned alone; ``own`` are its local values and those that it makes."""
    local, makes = own
    end = max(forward.stop, backward.stop)

    def role(value: int) -> str:
        return "local" if value in local else "made" if value in makes else "outside"

    def stays(value: int) -> bool:
        kept = model.is_output[value] or model.last_reads[value] >= end
        return kept and role(value) == "outside" and not model.evictable(value)

    return Part(model, forward, backward, frozenset(local), role, stays)


def decompose(model: IndexedProblem, count: int) -> Decomposition:
    """The model in about so many clusters."""
    turn = turn_of(model)
    return Decomposition.cut(model, turn, narrow_cuts(model, turn, max(1, min(count, turn + 1))))


def turn_of(model: IndexedProblem) -> int:
    """The last op of the forward part that makes something that may be dropped."""
    turn = [*turns(model), model.n - 1][0]
    while turn > 0 and not any(model.evictable(value) for value in model.writes[turn]):
        turn -= 1
    return turn


def _owners(model: IndexedProblem, turn: int, of_op: npt.NDArray[np.intp], count: int) -> list[int]:
    """The cluster of each backward op: never rising, with the fewest bytes read out of place.

    Where several will do an op stays with the higher cluster, so that the next is needed late.
    """
    near: dict[int, set[int]] = {}
    for op in range(turn + 1):
        for value in (*model.reads[op], *model.writes[op]):
            if model.evictable(value):
                near.setdefault(value, set()).add(int(of_op[op]))
    costs: list[npt.NDArray[np.float64]] = []
    for op in range(turn + 1, model.n):
        cost = np.zeros(count)
        for value in model.reads[op]:
            for cluster in near.get(value, ()):
                cost[cluster] -= model.bytes[value]
        costs.append(cost)
    return never_rising(costs, count)


# -- where to cut ----------------------------------------------------------------------------


def _bytes_across(model: IndexedProblem, turn: int) -> npt.NDArray[np.float64]:
    """Bytes of the values that forward ops before each op write and from it on read."""
    change = np.zeros(turn + 2)
    for value, op in last_reads(model, turn).items():
        change[model.writer[value] + 1] += model.bytes[value]
        change[op + 1] -= model.bytes[value]
    return np.cumsum(change)[: turn + 1]


def narrow_cuts(model: IndexedProblem, turn: int, count: int) -> list[int]:
    """Cuts that the fewest bytes cross, between clusters of half to twice the average size: ours.

    Of cuts that as many bytes cross, those of more even sizes are better.

    ``best[k, i]`` is the least cost of the first i ops in k clusters.
    """
    bytes_across, n = _bytes_across(model, turn), turn + 1
    average = n / count
    sizes = np.arange(max(1, int(average / 2)), int(np.ceil(2 * average)) + 1)
    uneven = (sizes / average - 1) ** 2 / (4 * count)  # altogether less than a byte
    best = np.full((count + 1, n + 1), np.inf)
    back = np.zeros((count + 1, n + 1), dtype=np.intp)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for i in range(int(sizes[0]), n + 1):
            starts = i - sizes[sizes <= i]
            cost = best[k - 1, starts] + uneven[: len(starts)] + bytes_across[starts] * (starts > 0)
            pick = int(cost.argmin())
            best[k, i], back[k, i] = cost[pick], starts[pick]
    if not np.isfinite(best[count, n]):
        return sorted({n * k // count for k in range(1, count)} - {0})
    cuts, i = [], n
    for k in range(count, 1, -1):
        i = int(back[k, i])
        cuts.append(i)
    return cuts[::-1]
