"""The least feasible peak: exact where the problem is small, else the best that was found.

``optima`` is a shortest path in time. Its nodes are pairs of (ops run so far, copies held), and its
edges are the runs whose bytes fit under a cap. The cap goes down from one optimum to the next until
nothing fits. Then the last optimum has the least peak of all schedules whose first runs come in
base order, with any repeats anywhere. A copy is freed at the last step that reads it, or at the one
that writes it if none does; so no other choices need to be tried.

``search_lower`` is for larger problems: it ruins the lowest known schedule and evicts again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from fxremat.planner import constants
from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local.ruin_and_repair import Improver
from fxremat.planner.local.stage_schedule import ExtraRun

Node = tuple[int, frozenset[int]]
"""First runs done, and the copies held (outputs, once written, are not among them)."""


@dataclass(frozen=True)
class PathStep:
    """Running an op: the bytes live meanwhile and the node it leads to."""

    op: int
    bytes: int
    node: Node


class TooLarge(Exception):
    """The exact search was given up."""


def optima(model: IndexedProblem) -> tuple[list[tuple[int, list[ExtraRun]]], bool]:
    """(peak, extra runs in order) of the fastest schedule under each cap; True if these are all.

    There are none where the problem is too large.
    """
    found: list[tuple[int, list[ExtraRun]]] = []
    if not 0 < model.n <= constants.FEW_OPS // 2:
        return found, False
    nodes = 50 * constants.NODES
    cap = sum(model.bytes) + sum(model.workspace) + model.problem.resident_bytes
    try:
        while True:
            best, used = _shortest(model, cap, nodes)
            if best is None:
                break
            found.append(best)
            cap, nodes = best[0] - 1, nodes - used
    except TooLarge:
        return found, False
    return found, True


def _shortest(
    model: IndexedProblem, cap: int, nodes: int
) -> tuple[tuple[int, list[ExtraRun]] | None, int]:
    """Peak and extra runs of a fastest schedule within the cap, and the nodes used."""
    start: Node = (0, frozenset(v for v in model.inputs if not model.is_output[v]))
    last = model.last_reads
    best: dict[Node, float] = {start: 0.0}
    predecessor: dict[Node, tuple[Node, PathStep]] = {}
    queue: list[tuple[float, int, Node]] = [(0.0, 0, start)]
    count = 0
    while queue:
        time, _, node = heapq.heappop(queue)
        if time > best[node]:
            continue
        if node[0] == model.n:
            return _follow(predecessor, node), count
        if count > nodes:
            raise TooLarge
        for step in _steps(model, node, last):
            after = time + model.time[step.op]
            if step.bytes <= cap and after < best.get(step.node, math.inf):
                best[step.node], predecessor[step.node] = after, (node, step)
                count += 1
                heapq.heappush(queue, (after, count, step.node))
    return None, count


def _follow(
    predecessor: dict[Node, tuple[Node, PathStep]], node: Node
) -> tuple[int, list[ExtraRun]]:
    """The path that ends at a node: its highest bytes and its extra runs in order."""
    peak, out = 0, []
    while node in predecessor:
        before, step = predecessor[node]
        peak = max(peak, step.bytes)
        if node[0] == before[0]:
            out.append((step.op, before[0]))
        node = before
    return peak, out[::-1]


def _steps(model: IndexedProblem, node: Node, last: list[int]) -> Iterator[PathStep]:
    """Every run that is possible at a node, with every choice of what it frees."""
    done, held = node
    kept = model.is_output
    for op in range(done + 1):
        first = op == done
        makes_any = any(value not in held and not kept[value] for value in model.writes[op])
        if (first or (model.repeatable[op] and makes_any)) and all(
            read in held or (kept[read] and model.writer[read] < done) for read in model.reads[op]
        ):
            yield from _transitions(model, node, op, first, last)


def _transitions(
    model: IndexedProblem, node: Node, op: int, first: bool, last: list[int]
) -> Iterator[PathStep]:
    done, held = node
    done += first
    now = held | {value for value in model.writes[op] if not model.is_output[value]}
    kept = [v for v, keep in enumerate(model.is_output) if keep and model.writer[v] < done]
    full = model.problem.resident_bytes + model.workspace[op]
    full += sum(model.bytes[value] for value in (*now, *kept))
    ends = [v for v in (*model.reads[op], *model.writes[op]) if v in now]
    if node[0] == 0:
        ends += [value for value in held if last[value] < 0]
    for size in range(len(ends) + 1):
        for freed in combinations(ends, size):
            after = now.difference(freed)
            if _is_lost(model, after, done, last):
                continue
            yield PathStep(op, full - _taken_over(model, op, first, freed), (done, after))


def _is_lost(model: IndexedProblem, held: frozenset[int], done: int, last: list[int]) -> bool:
    """Whether a value that cannot be computed again is gone but still to be read."""
    return any(
        last[value] >= done > op and value not in held and not model.is_output[value]
        for value, op in enumerate(model.writer)
        if op == INPUT or not model.repeatable[op]
    )


def _taken_over(model: IndexedProblem, op: int, first: bool, freed: tuple[int, ...]) -> int:
    return sum(
        min(model.bytes[read], model.bytes[write])
        for read, write in model.inplace[op]
        if read in freed and (first or not model.is_output[write])
    )


def search_lower(improver: Improver, work: int) -> None:
    """Ruin and evict again from the improver's state; lower peaks are offered to its front."""
    search = improver.search
    state = search.state
    for _ in range(5 * constants.TRIES):
        if state.work >= work:
            break
        search.commit()
        before = (state.max_peak(), state.time)
        improver.ruin()
        while state.work < work and search.evict():
            pass
        search.keep_what_fits(state.max_peak())
        if (state.max_peak(), state.time) <= before:
            improver.front.offer(state)
        else:
            search.roll_back(0)
