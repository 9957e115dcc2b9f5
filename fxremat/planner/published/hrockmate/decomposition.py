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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.published.chains.chain import last_reads, never_rising, turns

OUTSIDE = -1
"""The home of values that no cluster writes."""

Cutter = Callable[[IndexedProblem, int, int], list[int]]
"""(model, turn, count) -> the first ops of all clusters but the first."""


@dataclass(frozen=True)
class Cluster:
    """A stretch of the forward part and the backward ops that go with it, perhaps none.

    ``local`` are the values that can be computed again and that only these ops read, ``makes``
    those of its forward part that other clusters read as well.
    """

    forward: range
    backward: range
    local: frozenset[int]
    makes: frozenset[int]


@dataclass(frozen=True)
class Decomposition:
    """A model in clusters, in forward order; the backward parts come in reverse order.

    An *interface* value crosses between clusters, or cannot be computed again and is read by
    what can; ``home`` gives the cluster that writes it. All other values are *fixed*: they are
    there from their write to their last read.
    """

    model: IndexedProblem
    turn: int
    clusters: tuple[Cluster, ...]
    home: dict[int, int]

    @staticmethod
    def cut(model: IndexedProblem, turn: int, starts: Iterable[int]) -> Decomposition:
        """The clusters that begin at op 0 and at these ops of the forward part."""
        firsts = [0, *starts]
        of_op = np.searchsorted(firsts, np.arange(turn + 1), side="right") - 1
        owners = _owners(model, turn, of_op, len(firsts))
        whose = [int(c) for c in of_op] + owners
        readers: list[set[int]] = [set() for _ in model.bytes]
        read_again = [False] * len(model.bytes)
        for op, reads in enumerate(model.reads):
            for value in reads:
                readers[value].add(whose[op])
                read_again[value] |= op <= turn and model.repeatable[op]
        local: list[set[int]] = [set() for _ in firsts]
        home: dict[int, int] = {}
        for value, op in enumerate(model.writer):
            if model.is_output[value]:
                continue
            again = op <= turn and model.evictable(value)
            if again and readers[value] <= {whose[op]}:
                local[whose[op]].add(value)
            elif again or read_again[value]:
                home[value] = OUTSIDE if op == INPUT or op > turn else whose[op]
        clusters = []
        for c, (start, stop) in enumerate(pairwise((*firsts, turn + 1))):
            ops = [turn + 1 + k for k, owner in enumerate(owners) if owner == c]
            backward = range(ops[0], ops[-1] + 1) if ops else range(model.n, model.n)
            makes = frozenset(
                v for v, h in home.items() if h == c and model.evictable(v)
            )  # what cannot be computed again has a home, but only its first run makes it
            clusters.append(Cluster(range(start, stop), backward, frozenset(local[c]), makes))
        return Decomposition(model, turn, tuple(clusters), home)

    @cached_property
    def last_reads(self) -> tuple[int, ...]:
        """The last op that reads each value, or writes it if none does."""
        last = [max(op, 0) for op in self.model.writer]
        for op, reads in enumerate(self.model.reads):
            for value in reads:
                last[value] = max(last[value], op)
        return tuple(last)

    @cached_property
    def fixed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of fixed and resident values while each op runs first, and just before it."""
        model = self.model
        inside = frozenset().union(*(cluster.local for cluster in self.clusters), self.home)
        change, begins = [0] * (model.n + 2), [0] * model.n
        for value, size in enumerate(model.bytes):
            if value in inside:
                continue
            start = model.writer[value]
            change[max(start, 0)] += size
            change[(model.n - 1 if model.is_output[value] else self.last_reads[value]) + 1] -= size
            if start != INPUT:
                begins[start] += size
        live = [*accumulate(change[: model.n], initial=model.problem.resident_bytes)][1:]
        return tuple(live), tuple(now - new for now, new in zip(live, begins, strict=True))


def decompose(model: IndexedProblem, count: int, cutter: Cutter | None = None) -> Decomposition:
    """The model in about so many clusters."""
    turn = turn_of(model)
    cuts = (cutter or narrow_cuts)(model, turn, max(1, min(count, turn + 1)))
    return Decomposition.cut(model, turn, cuts)


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


def crossing(model: IndexedProblem, turn: int, weights: Sequence[int]) -> npt.NDArray[np.float64]:
    """The weight of the values that forward ops before each op write and from it on read."""
    change = np.zeros(turn + 2)
    for value, op in last_reads(model, turn).items():
        change[model.writer[value] + 1] += weights[value]
        change[op + 1] -= weights[value]
    return np.cumsum(change)[: turn + 1]


def narrow_cuts(model: IndexedProblem, turn: int, count: int) -> list[int]:
    """Cuts that the fewest bytes cross, between clusters of half to twice the average size: ours.

    Of cuts that as many bytes cross, those of more even sizes are better.

    ``best[k, i]`` is the least cost of the first i ops in k clusters.
    """
    bytes_across, n = crossing(model, turn, model.bytes), turn + 1
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
        return even_cuts(model, turn, count)
    cuts, i = [], n
    for k in range(count, 1, -1):
        i = int(back[k, i])
        cuts.append(i)
    return cuts[::-1]


def even_cuts(_: IndexedProblem, turn: int, count: int) -> list[int]:
    """Cuts of the base order into equal parts."""
    return sorted({(turn + 1) * k // count for k in range(1, count)} - {0})


# -- which clusters are the same -------------------------------------------------------------

Signature = tuple[object, ...]


def signature(parts: Decomposition, cluster: Cluster) -> Signature:
    """All that matters for planning the cluster apart, its values numbered as they come.

    Two clusters of one signature have the same plans, op for op.
    """
    model, number = parts.model, dict[int, int]()
    rows: list[object] = [len(cluster.forward)]
    for op in (*cluster.forward, *cluster.backward):
        for value in (*model.reads[op], *model.writes[op]):
            if value not in number:
                number[value] = len(number)
                rows.append((model.bytes[value], role(parts, cluster, value)))
        rows.append(
            (
                model.time[op],
                model.workspace[op],
                model.repeatable[op],
                _numbers(number, model.reads[op]),
                _numbers(number, model.writes[op]),
                tuple((number[read], number[write]) for read, write in model.inplace[op]),
            )
        )
    return tuple(rows)


def _numbers(number: dict[int, int], values: Sequence[int]) -> tuple[int, ...]:
    return tuple(number[value] for value in values)


def role(parts: Decomposition, cluster: Cluster, value: int) -> str:
    """What a value is to a cluster that touches it: local, made, entering, staying or passing.

    One that stays is there when the cluster is done, one that passes ends in it.
    """
    if value in cluster.local:
        return "local"
    if value in cluster.makes:
        return "made"
    if value in parts.home:
        return "entering"
    end = max(cluster.forward.stop, cluster.backward.stop)
    stays = parts.model.is_output[value] or parts.last_reads[value] >= end
    return "staying" if stays else "passing"
