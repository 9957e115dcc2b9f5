"""Which version each run of a part takes: the level above the plans of the parts.

The hierarchy is that of H-Rockmate (Gusak et al., "HiRemate", ICML 2025), with the parts that the
model is compiled by as its clusters: each offers a few versions, and an integer programme chooses.

    x[r, v]   run r takes version v of its part
    y[u, v]   version v of part u is compiled

minimise the time of all runs, with bytes under the budget at each point, and at most so many
versions of each part, since each has to be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fxremat.core.constants import MEASURABLE
from fxremat.core.step import Step, StepPoint, Version
from fxremat.planner import plans
from fxremat.planner.constants import GAP, NODES
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import TOLERANCE, Milp, present

Chosen = tuple[int, ...]
"""The version of each run, by its place among those of its part."""


def fastest(step: Step, budget_bytes: int, most_versions: int = 2) -> Chosen | None:
    """The versions of least time within the budget; None where no choice is within it.

    A further version of a part has to be worth compiling: what it saves must be seen.
    """
    found: Chosen | None = None
    for most in range(1, most_versions + 1):
        other = _within(step, budget_bytes, most)
        if other is None:
            continue
        if found is None or step.time_us(other) < (1 - MEASURABLE) * step.time_us(found):
            found = other
    return found


def saving_least(step: Step, budget_bytes: int) -> Chosen:
    """Of the versions of a single run, the one that saves least within the budget.

    Where no version is within it, the one of least peak.
    """
    versions = step.versions[step.part_of[0]]

    def order(k: int) -> tuple[int, int, float]:
        peak, one = step.peak_bytes((k,)), versions[k]
        return max(peak, budget_bytes), one.saved_bytes, one.time_us

    return (min(range(len(versions)), key=order),)


def _within(step: Step, budget_bytes: int, most_versions: int) -> Chosen | None:
    for asked in (budget_bytes, int((1 - TOLERANCE) * budget_bytes) - 1):
        found = _chosen(step, most_versions, asked)
        if found is None or step.peak_bytes(found) <= budget_bytes:
            return found
    return None


def lowest(step: Step, most_versions: int = 2) -> Chosen:
    """The versions of least peak."""
    found = _chosen(step, most_versions, None)
    assert found is not None  # every part has a version
    return found


def not_beaten(versions: Sequence[Version]) -> list[int]:
    """The places of those that no other one beats in time and in all bytes."""
    return sorted(plans.not_beaten([version.figures for version in versions]))


def _chosen(step: Step, most_versions: int, budget_bytes: int | None) -> Chosen | None:
    """The integer programme of a step; without a budget it looks for the least peak."""
    milp = Milp()
    kept = [not_beaten(versions) for versions in step.versions]
    slowest = max((v.time_us for each in step.versions for v in each), default=0.0)
    time_unit = max(1e-9, slowest) if budget_bytes is not None else math.inf
    byte_unit = max(1, max((m.outside_bytes for m in step.points), default=1))
    take = list[dict[int, int]]()  # of each run: the column of each version
    for part in step.part_of:
        times = {v: step.versions[part][v].time_us / time_unit for v in kept[part]}
        take.append({version: milp.binary(time) for version, time in times.items()})
        milp.row([(column, 1.0) for column in take[-1].values()], 1.0, 1.0)
    peak = milp.real(cost=1.0, high=math.inf) if budget_bytes is None else None
    for part, its in enumerate(kept):
        runs = [r for r, u in enumerate(step.part_of) if u == part]
        if len(its) <= most_versions or len(runs) <= most_versions:
            continue
        compiled = {version: milp.binary() for version in its}
        milp.row([(column, 1.0) for column in compiled.values()], high=most_versions)
        for run in runs:
            for version, column in take[run].items():
                milp.row([(column, 1.0), (compiled[version], -1.0)], high=0.0)
    for point in step.points:
        terms = [(column, size / byte_unit) for column, size in _bytes_at(step, point, take)]
        room = (budget_bytes or 0) - point.outside_bytes
        milp.row([*terms, *present(peak, factor=-1.0)], high=room / byte_unit)
    solution = milp.solve(Deadline(None), nodes=12 * NODES, gap=GAP)
    if solution.values is None:
        return None
    return tuple(next(v for v, c in columns.items() if solution.chosen(c)) for columns in take)


def _bytes_at(
    step: Step, point: StepPoint, take: Sequence[dict[int, int]]
) -> Iterator[tuple[int, int]]:
    """The columns of all that has bytes at a point, and how many."""
    for run in point.waiting:
        versions = step.versions[step.part_of[run]]
        yield from ((column, versions[v].saved_bytes) for v, column in take[run].items())
    if point.running is not None:
        versions = step.versions[step.part_of[point.running]]
        for v, column in take[point.running].items():
            one, forward = versions[v], point.phase == "forward"
            yield column, one.forward_bytes if forward else one.backward_bytes
