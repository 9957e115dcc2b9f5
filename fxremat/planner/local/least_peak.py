"""Of a small problem: all schedules that none beats in peak and time, and the least peak.

``optima`` are all shortest paths in time and peak (label setting; Martins, "On a multicriteria
shortest path problem", 1984). Nodes are pairs of (ops run so far, copies held), and edges are runs.
The path of least peak has the least of all schedules whose first runs come in base order, with any
repeats anywhere. A copy is freed at the last step that reads it, or at the one that writes it if
none does; so no other choices need to be tried.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from fxremat.planner import constants
from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local.stage_schedule import ExtraRun

Node = tuple[int, frozenset[int]]
"""First runs done, and the copies held (outputs, once written, are not among them)."""


Path = tuple[Any, int, int] | None
"""The path before, the op of its last run, and the stage in which that is."""


def optima(model: IndexedProblem) -> tuple[list[tuple[int, list[ExtraRun]]], bool]:
    """(peak, extra runs in order) of schedules that none beats, the fastest first; True if all.

    There are none where the problem is too large.
    """
    found: list[tuple[int, list[ExtraRun]]] = []
    if not 0 < model.n <= constants.FEW_OPS // 2:
        return found, False
    start: Node = (0, frozenset(v for v in model.inputs if not model.is_output[v]))
    queue: list[tuple[float, int, int, Node, Path]] = [(0.0, 0, 0, start, None)]
    lowest: dict[Node, int] = {}
    count, cap = 0, sys.maxsize
    while queue:
        time, peak, _, node, path = heapq.heappop(queue)
        if peak >= min(cap, lowest.get(node, cap)):
            continue
        lowest[node] = peak
        if node[0] == model.n:
            found.append((peak, _extra_runs(path)))
            cap = peak
        for op, size, after in _runs(model, node):
            highest = max(peak, size)
            if highest < min(cap, lowest.get(after, cap)):
                count += 1
                label = time + model.time[op], highest, count, after, (path, op, node[0])
                heapq.heappush(queue, label)
        if count > 50 * constants.NODES:
            return found, False
    return found, True


def _extra_runs(path: Path) -> list[ExtraRun]:
    """The runs of a path that are not the first of their op, in order."""
    out = []
    while path is not None:
        path, op, stage = path
        if op < stage:
            out.append((op, stage))
    return out[::-1]


def _runs(model: IndexedProblem, node: Node) -> Iterator[tuple[int, int, Node]]:
    """Every op that may run at a node, its bytes and the node after it, by what it frees."""
    done, held = node
    kept = model.is_output
    for op in range(min(done + 1, model.n)):
        makes_any = any(value not in held and not kept[value] for value in model.writes[op])
        if (op == done or (model.repeatable[op] and makes_any)) and all(
            read in held or (kept[read] and model.writer[read] < done) for read in model.reads[op]
        ):
            yield from _transitions(model, node, op)


def _transitions(model: IndexedProblem, node: Node, op: int) -> Iterator[tuple[int, int, Node]]:
    done, held = node
    begins = [v for v in model.writes[op] if op == done or not model.is_output[v]]
    done += op == done
    now = held | {value for value in begins if not model.is_output[value]}
    kept = [v for v, keep in enumerate(model.is_output) if keep and model.writer[v] < done]
    full = model.problem.resident_bytes + model.workspace[op]
    full += model.size_of((*now, *kept))
    ends = [v for v in (*model.reads[op], *model.writes[op]) if v in now]
    if node[0] == 0:
        ends += [value for value in held if model.last_reads[value] < 0]
    for size in range(len(ends) + 1):
        for freed in combinations(ends, size):
            after = now.difference(freed)
            if not _is_lost(model, after, done):
                yield op, full - model.overtaken(op, freed, begins), (done, after)


def _is_lost(model: IndexedProblem, held: frozenset[int], done: int) -> bool:
    """Whether a value that cannot be computed again is gone but still to be read."""
    return any(
        model.last_reads[value] >= done > op and value not in held and not model.is_output[value]
        for value, op in enumerate(model.writer)
        if op == INPUT or not model.repeatable[op]
    )
