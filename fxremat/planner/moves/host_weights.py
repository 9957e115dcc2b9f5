"""Which weights live in host memory: as few as the budget and the least time ask for.

A weight in host memory comes to the device for the ops that read it, once or twice in a step, and
its gradient leaves: bytes that an engine moves beside the ops. What it gives is the bytes of both
wherever neither is used. So weights are ranked by the time of the ops that use them, for each
byte: the more work a byte does, the better its transfer hides. Plans are made for the first few
of that rank, for all of them and for counts in between, and the best is kept; which weights stay
on the device from forward to backward, and which activations move or are computed again, is
decided with each of these plans, by the solver.

Source: greedy selection after Beaumont, Eyraud-Dubois, Shilova, Zhao, "Weight Offloading
Strategies for Training Large DNN Models" (2022), of which only the abstract was read: the ranking
and the search are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner.plans import rank

Planner = Callable[[Problem], Plan]


@dataclass(frozen=True)
class Selection:
    """The weights that are to live in host memory, and the plan with them there."""

    weights: tuple[str, ...]
    plan: Plan


def on_host(problem: Problem, weights: Mapping[str, str | None]) -> Problem:
    """The problem in which these weights live in host memory, and their gradients (or None)."""
    gradients = {name for name in weights.values() if name is not None}
    resident = tuple(name for name in problem.resident if name not in weights)
    outputs = tuple(name for name in problem.outputs if name not in gradients)
    read = {name for op in problem.ops for name in op.reads}
    coming = tuple(name for name in weights if name in read)
    leaving = tuple(name for name in problem.outputs if name in gradients)
    host = (*problem.host, *coming, *leaving)
    return replace(problem, resident=resident, outputs=outputs, host=host)


def ranked(problem: Problem, weights: Mapping[str, str | None]) -> list[str]:
    """Weights by the work that is done with each byte, most first; equals in base order."""
    sizes = problem.bytes_of
    work = dict.fromkeys(weights, 0.0)
    owner = {name: weight for weight, name in weights.items() if name is not None}
    for op in problem.ops:
        used = {name for name in op.reads if name in work}
        used |= {owner[name] for name in op.writes if name in owner}
        for name in used:
            work[name] += op.time_us
    return sorted(weights, key=lambda name: -work[name] / max(1, sizes[name]))


def select(
    problem: Problem, weights: Mapping[str, str | None], budget_bytes: int, plan_for: Planner
) -> Selection:
    """The weights to move, and the fastest plan found within the budget, or of least peak.

    ``weights`` maps each resident value that may move to its gradient's value.
    """
    order = ranked(problem, weights)
    tried: dict[int, Plan] = {}

    def rank_of(count: int) -> tuple[int, float, int]:
        if count not in tried:
            moved = {name: weights[name] for name in order[:count]}
            tried[count] = plan_for(on_host(problem, moved))
        return *rank(tried[count], budget_bytes), count

    if rank_of(0)[0] == 0 and tried[0].time_us <= problem.base_time_us:
        return Selection((), tried[0])
    best = _best_count(len(order), rank_of)
    return Selection(tuple(order[:best]), tried[best])


def _best_count(most: int, rank: Callable[[int], tuple[int, float, int]]) -> int:
    """The count of least rank among a few: first spread out, then around the best of these."""
    known: Sequence[int] = sorted({0, most, *(most * part // 4 for part in (1, 2, 3))})
    while True:
        best = min(known, key=rank)
        at = known.index(best)
        sides = known[max(0, at - 1) : at + 2]
        middles = {(low + high) // 2 for low, high in pairwise(sides)}
        if middles <= {*known}:
            return best
        known = sorted({*known, *middles})
