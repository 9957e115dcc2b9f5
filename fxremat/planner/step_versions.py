"""Which version each run of a part takes: the level above the plans of the parts.

The hierarchy is that of H-Rockmate (Gusak et al., "HiRemate", ICML 2025), with the parts that the
model is compiled by as its clusters: each offers a few versions, and an integer programme chooses.

    x[r, v]   run r takes version v of its part
    y[u, v]   version v of part u is compiled

minimise the time of all runs, with bytes under the budget at each point, and at most so many
versions of each part, since each has to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.core.constants import MEASURABLE
from fxremat.core.step import Step, StepPoint, Version
from fxremat.planner import plans
from fxremat.planner.constants import GAP, NODES
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import TOLERANCE, Milp, Term

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
        found = _Programme(step, most_versions).solve(asked)
        if found is None or step.peak_bytes(found) <= budget_bytes:
            return found
    return None


def lowest(step: Step, most_versions: int = 2) -> Chosen:
    """The versions of least peak."""
    found = _Programme(step, most_versions, for_peak=True).solve(None)
    assert found is not None  # every part has a version
    return found


def not_beaten(versions: Sequence[Version]) -> list[int]:
    """The places of those that no other one beats in time and in all bytes."""
    return sorted(plans.not_beaten([version.figures for version in versions]))


class _Programme:
    """The integer programme of a step."""

    def __init__(self, step: Step, most_versions: int, *, for_peak: bool = False) -> None:
        self.step, self.milp, self.for_peak = step, Milp(), for_peak
        self.kept = [not_beaten(versions) for versions in step.versions]
        slowest = max((v.time_us for each in step.versions for v in each), default=0.0)
        self.time_unit = max(1e-9, slowest)
        self.byte_unit = max(1, max((m.outside_bytes for m in step.points), default=1))
        self.take = [self._columns(part) for part in step.part_of]
        self.peak = self.milp.real(cost=1.0, high=float("inf")) if for_peak else None
        self._limit(most_versions)

    def _columns(self, part: int) -> dict[int, int]:
        """Of one run: the column of each version."""

        def cost(version: int) -> float:
            time = self.step.versions[part][version].time_us / self.time_unit
            return 0.0 if self.for_peak else time

        columns = {version: self.milp.binary(cost(version)) for version in self.kept[part]}
        self.milp.row([(column, 1.0) for column in columns.values()], 1.0, 1.0)
        return columns

    def _limit(self, most_versions: int) -> None:
        """At most so many versions of each part."""
        for part, kept in enumerate(self.kept):
            runs = [r for r, u in enumerate(self.step.part_of) if u == part]
            if len(kept) <= most_versions or len(runs) <= most_versions:
                continue
            compiled = {version: self.milp.binary() for version in kept}
            self.milp.row([(column, 1.0) for column in compiled.values()], high=most_versions)
            for run in runs:
                for version, column in self.take[run].items():
                    self.milp.row([(column, 1.0), (compiled[version], -1.0)], high=0.0)

    def solve(self, budget_bytes: int | None) -> Chosen | None:
        for point in self.step.points:
            self._fit(point, budget_bytes)
        solution = self.milp.solve(Deadline(None), nodes=12 * NODES, gap=GAP)
        if solution.values is None:
            return None
        return tuple(
            next(v for v, column in columns.items() if solution.chosen(column))
            for columns in self.take
        )

    def _fit(self, point: StepPoint, budget_bytes: int | None) -> None:
        """The bytes of a point are under the budget, or under the peak."""
        part = self.byte_unit
        terms: list[Term] = []
        for run in point.waiting:
            versions = self.step.versions[self.step.part_of[run]]
            terms += [(c, versions[v].saved_bytes / part) for v, c in self.take[run].items()]
        if point.running is not None:
            versions = self.step.versions[self.step.part_of[point.running]]
            forward = point.phase == "forward"
            terms += [
                (c, (versions[v].forward_bytes if forward else versions[v].backward_bytes) / part)
                for v, c in self.take[point.running].items()
            ]
        if self.peak is not None:
            self.milp.row([*terms, (self.peak, -1.0)], high=-point.outside_bytes / part)
        elif budget_bytes is not None:
            self.milp.row(terms, high=(budget_bytes - point.outside_bytes) / part)
