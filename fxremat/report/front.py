"""The Pareto front of peak against time, as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import store_all
from fxremat.core.timeline import replay
from fxremat.report.pictures import Mark, draw_front
from fxremat.sizes import exact_bytes, format_bytes

FORMAT = "fxremat-front/1"


@dataclass(frozen=True)
class Point:
    """One plan: its peak, its time, and the time it adds as a fraction of running all ops once."""

    peak_bytes: int
    time_us: float
    time_overhead: float


@dataclass(frozen=True)
class Front:
    """Points from the fastest plan to that of the least peak: peak falls, time rises.

    Peaks are those of the planned graph. ``peak_bound_bytes`` is proven: no plan takes less.
    """

    name: str
    points: tuple[Point, ...]
    base_time_us: float
    store_all_peak_bytes: int
    budget_bytes: int | None = None
    peak_bound_bytes: int | None = None

    def within(self, budget_bytes: int) -> Point | None:
        """The fastest point within a budget; None where nothing fits."""
        return next((p for p in self.points if p.peak_bytes <= budget_bytes), None)

    def of_store_all(self, nbytes: int) -> float:
        """Bytes as a fraction of the store-all peak."""
        return nbytes / self.store_all_peak_bytes if self.store_all_peak_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """The front as JSON data; ``added`` and ``of_store_all`` are fractions."""
        return {
            "format": FORMAT,
            "name": self.name,
            "store_all_peak_bytes": self.store_all_peak_bytes,
            "base_time_us": self.base_time_us,
            "budget_bytes": self.budget_bytes,
            "peak_bound_bytes": self.peak_bound_bytes,
            "points": [
                {
                    "peak_bytes": point.peak_bytes,
                    "time_us": point.time_us,
                    "added": point.time_overhead,
                    "of_store_all": self.of_store_all(point.peak_bytes),
                }
                for point in self.points
            ],
        }

    def picture(self) -> str:
        """The front as SVG text: added time over bytes, budget and proven bound marked."""
        marks = []
        if self.budget_bytes is not None:
            marks.append(Mark("budget", self.budget_bytes))
        if self.peak_bound_bytes is not None:
            marks.append(Mark("proven least", self.peak_bound_bytes, down=True))
        return draw_front(
            self.name,
            [(point.peak_bytes, point.time_overhead) for point in self.points],
            marks,
        )

    def __str__(self) -> str:
        full = format_bytes(self.store_all_peak_bytes)
        count = f"{len(self.points)} plan{'' if len(self.points) == 1 else 's'}"
        lines = [f"{self.name or 'front'}: {count}, store-all peak {full}"]
        lines.append(f"  {'peak bytes':>20}  {'':>11}  {'of store-all':>12}  {'added time':>10}")
        chosen = None if self.budget_bytes is None else self.within(self.budget_bytes)
        lines += [self._row(point, point is chosen) for point in self.points]
        if self.budget_bytes is not None and chosen is None:
            lines.append(f"nothing fits the budget, {exact_bytes(self.budget_bytes)}")
        if self.peak_bound_bytes is not None:
            lines.append(f"proven: no plan takes less than {exact_bytes(self.peak_bound_bytes)}")
        return "\n".join(lines)

    def _row(self, point: Point, chosen: bool) -> str:
        share = f"{self.of_store_all(point.peak_bytes):.1%}"
        row = (
            f"  {point.peak_bytes:>20,}  {format_bytes(point.peak_bytes):>11}  {share:>12}"
            f"  {point.time_overhead:>+10.2%}"
        )
        if not chosen or self.budget_bytes is None:
            return row
        return f"{row}  <- fastest of these within {format_bytes(self.budget_bytes)}"


def front_from_json(data: dict[str, Any]) -> Front:
    """A front read back; raises `KeyError`, `TypeError` or `ValueError` where it is not one."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, where {FORMAT!r} is read")
    points = (Point(p["peak_bytes"], p["time_us"], p["added"]) for p in data["points"])
    return Front(
        data["name"],
        tuple(points),
        data["base_time_us"],
        data["store_all_peak_bytes"],
        data["budget_bytes"],
        data["peak_bound_bytes"],
    )


def undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other one beats, fastest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time_us, p.peak_bytes)):
        if not kept or point.peak_bytes < kept[-1].peak_bytes:
            kept.append(point)
    return tuple(kept)


def front_of(
    problem: Problem,
    plans: Iterable[Plan],
    *,
    budget_bytes: int | None = None,
    held_bytes: int = 0,
) -> Front:
    """The front of these plans of a problem; ``held_bytes`` are held outside of the graph."""
    base = problem.base_time_us
    bounds, points = [], []
    for plan in plans:
        overhead = plan.time_us / base - 1 if base else 0.0
        points.append(Point(plan.peak_bytes + held_bytes, plan.time_us, overhead))
        bounds.append(plan.peak_bound_bytes)
    proven = [bound + held_bytes for bound in bounds if bound is not None]
    full = replay(problem, store_all(problem)).peak_bytes + held_bytes
    return Front(
        problem.name, undominated(points), base, full, budget_bytes, max(proven, default=None)
    )


def together(fronts: Sequence[Front]) -> Front:
    """One front for graphs that run one after the other.

    At each peak every graph takes its fastest plan; where one has none, the front ends.
    """
    base = sum(front.base_time_us for front in fronts)
    points = []
    for peak in sorted({p.peak_bytes for front in fronts for p in front.points}, reverse=True):
        chosen = [point for front in fronts if (point := front.within(peak)) is not None]
        if len(chosen) < len(fronts):
            break
        time = sum(point.time_us for point in chosen)
        highest = max(point.peak_bytes for point in chosen)
        points.append(Point(highest, time, time / base - 1 if base else 0.0))
    budgets = [front.budget_bytes for front in fronts if front.budget_bytes is not None]
    bounds = [front.peak_bound_bytes for front in fronts if front.peak_bound_bytes is not None]
    return Front(
        ", ".join(front.name for front in fronts),
        undominated(points),
        base,
        max((front.store_all_peak_bytes for front in fronts), default=0),
        min(budgets, default=None),
        max(bounds, default=None),
    )
