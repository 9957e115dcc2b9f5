"""The rows of `benchmarks.planner`, how they are printed, and what they come to.

Times are in percent over store-all, which runs every op once. "bound" is proven: no schedule
within the budget adds less (0 where nothing is proven, for no schedule is faster than store-all).
"gap" is what the plan's time may be too much, in percent of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import exp, log
from statistics import mean
from typing import Any, Literal

from fxremat.sizes import format_bytes

Status = Literal["ok", "infeasible", "refused", "FAILED"]

SMALL_GAP = 1.0
CLOSE = 0.01
"""Percent; what is nearer to its bound has a star in the overview."""
LEAST_RATIO = 0.01
"""A geometric mean needs ratios above 0; smaller ones count as this."""
NOTHING = 1e-9
"""Percent of added time that is none: sums of the same times differ in the last digits."""
MARKS: Mapping[Status, str] = {"infeasible": "over", "refused": "n/a", "FAILED": "FAILED"}


@dataclass(frozen=True)
class Case:
    """A problem, by name, and a budget."""

    problem: str
    ops: int
    store_all_bytes: int
    budget_percent: int
    budget_bytes: int

    def percent(self, nbytes: int | None) -> float | None:
        """Bytes in percent of the peak of store-all."""
        return None if nbytes is None else 100 * nbytes / max(1, self.store_all_bytes)


@dataclass(frozen=True)
class Row:
    """One solver on one case. Peaks are None where there is no plan, times where none fits."""

    case: Case
    solver: str
    status: Status
    seconds: float
    peak_bytes: int | None = None
    peak_bound_bytes: int | None = None
    added_percent: float | None = None
    bound_percent: float | None = None
    gap_percent: float | None = None
    reason: str = ""

    @property
    def peak_percent(self) -> float | None:
        """The peak in percent of that of store-all."""
        return self.case.percent(self.peak_bytes)

    @property
    def peak_bound_percent(self) -> float | None:
        """What is proven of every schedule's peak, in percent of that of store-all."""
        return self.case.percent(self.peak_bound_bytes)

    def to_json(self) -> dict[str, Any]:
        """The fields, those of the case among them, and the peaks in percent."""
        row = asdict(self)
        peaks = {name: getattr(self, name) for name in ("peak_percent", "peak_bound_percent")}
        return {**row.pop("case"), **row, **peaks}


# -- one problem and budget ------------------------------------------------------------------


def heading(case: Case) -> str:
    """What all rows of a case share, and the names of the columns."""
    return (
        f"\n{case.problem}: {case.ops} ops, store-all {format_bytes(case.store_all_bytes)}, "
        f"budget {case.budget_percent} % = {format_bytes(case.budget_bytes)}\n"
        f"{'solver':17}{'peak bytes':>17}{'peak %':>8}{'added %':>10}{'bound %':>10}"
        f"{'gap %':>9}{'s':>8}  status"
    )


def line(row: Row) -> str:
    """One row, under `heading`."""
    return (
        f"{row.solver:17}{'-' if row.peak_bytes is None else f'{row.peak_bytes:,}':>17}"
        f"{_cell(row.peak_percent, 2):>8}{_cell(row.added_percent):>10}"
        f"{_cell(row.bound_percent):>10}{_cell(row.gap_percent):>9}{row.seconds:8.2f}  "
        f"{_status(row)}"
    )


def _status(row: Row) -> str:
    parts = [row.status, row.reason]
    if row.status == "infeasible":
        parts.append("least peak found")
    if row.status == "infeasible" and row.peak_bound_bytes is not None:
        parts.append(f"proven: at least {_cell(row.peak_bound_percent, 2)} %")
    return ", ".join(filter(None, parts))


def _cell(figure: float | None, digits: int = 3) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


# -- all of them -----------------------------------------------------------------------------


def overview(rows: Sequence[Row]) -> str:
    """Added time of all solvers side by side, a line for each problem and budget."""
    solvers = list(dict.fromkeys(row.solver for row in rows))
    lines = [
        f'\nAdded time in %; "*": proven the least but for {CLOSE} points; "over": nothing found '
        'fits; "n/a": refused',
        f"{'problem':16}{'budget':>8}" + "".join(f"{name:>17}" for name in solvers),
    ]
    for case, group in groupby(rows, lambda row: row.case):
        cells = {row.solver: _added(row) for row in group}
        start = f"{case.problem:16}{case.budget_percent:6} %"
        lines.append(start + "".join(f"{cells.get(name, ''):>17}" for name in solvers))
    return "\n".join(lines)


def _added(row: Row) -> str:
    if row.added_percent is None or row.bound_percent is None:
        return f"{MARKS[row.status]} "
    proven = row.added_percent - row.bound_percent < CLOSE
    return f"{row.added_percent:.3f}{'*' if proven else ' '}"


@dataclass(frozen=True)
class Summary:
    """What one solver comes to over all cases.

    ``ratio`` is the geometric mean of its added time over that of the reference, over the
    ``compared`` cases that both fit and where the reference adds something. ``seconds`` is the
    mean over the cases that it did not refuse.
    """

    solver: str
    cases: int
    fits: int
    refused: int
    compared: int
    ratio: float | None
    small_gaps: int
    seconds: float | None


def summarise(rows: Sequence[Row], reference: str) -> list[Summary]:
    """A summary for each solver, in the order of the rows."""
    known = {row.case: row.added_percent for row in rows if row.solver == reference}
    solvers = dict.fromkeys(row.solver for row in rows)
    return [_summary([row for row in rows if row.solver == name], known) for name in solvers]


def _summary(rows: Sequence[Row], known: Mapping[Case, float | None]) -> Summary:
    """Of the rows of one solver."""
    ratios = _ratios(rows, known)
    seconds = [row.seconds for row in rows if row.status != "refused"]
    return Summary(
        solver=rows[0].solver,
        cases=len(rows),
        fits=sum(row.status == "ok" for row in rows),
        refused=sum(row.status == "refused" for row in rows),
        compared=len(ratios),
        ratio=exp(mean(map(log, ratios))) if ratios else None,
        small_gaps=sum(r.gap_percent is not None and r.gap_percent <= SMALL_GAP for r in rows),
        seconds=mean(seconds) if seconds else None,
    )


def _ratios(rows: Iterable[Row], known: Mapping[Case, float | None]) -> list[float]:
    pairs = [(row.added_percent, known.get(row.case)) for row in rows]
    return [
        max(LEAST_RATIO, mine / its)
        for mine, its in pairs
        if mine is not None and its is not None and its > NOTHING
    ]


def summary_table(summaries: Iterable[Summary], reference: str) -> str:
    """A line for each solver."""
    lines = [
        f'\n"ratio": added time over that of {reference}, the geometric mean over the cases '
        f"that both fit and where {reference} adds some (a ratio below {LEAST_RATIO} counts as it)",
        f"{'solver':17}{'cases':>7}{'fits':>6}{'refused':>9}{'compared':>10}{'ratio':>8}"
        f"{f'gap <= {SMALL_GAP:g} %':>13}{'mean s':>9}",
    ]
    lines += [
        f"{its.solver:17}{its.cases:7}{its.fits:6}{its.refused:9}{its.compared:10}"
        f"{_cell(its.ratio):>8}{its.small_gaps:13}{_cell(its.seconds, 2):>9}"
        for its in summaries
    ]
    return "\n".join(lines)
