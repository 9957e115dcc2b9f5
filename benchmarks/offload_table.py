"""The rows of `benchmarks.offload plans`, how they are printed, and what they come to.

Times are relative. "/compute" is against running every op once, which no schedule beats;
"/transfers" is against what the busier copy engine takes for the bytes that this very plan moves;
"bound" is proven: no schedule of this strategy within the budget is faster. "hidden" is the part
of the transfers' time for which no op waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from .offload_problems import GB

Status = Literal["ok", "over", "FAILED"]
HALF = "50%"
CLAIM_LINK = 25 * GB
SAME = 1e-9
"""By this part of a time, sums of the same times may differ."""
HEADING = (
    f"{'strategy':11}{'peak GB':>9}{'/compute':>10}{'/transfers':>12}{'bound':>8}{'hidden':>8}"
    f"{'again %':>9}{'out GB':>8}{'back GB':>9}{'host GB':>9}{'s':>7}  status"
)


@dataclass(frozen=True)
class Case:
    """A step on a device, a link in bytes per second each way, and a budget."""

    model: str
    layers: int
    batch: int
    device: str
    link: int
    budget: str
    budget_bytes: int
    store_all_bytes: int
    parameter_bytes: int
    compute_us: float
    weights_on_host: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other cases of the same file."""
        return self.model, self.layers, self.device, self.link, self.budget

    def __str__(self) -> str:
        where = "all weights in host memory" if self.weights_on_host else "weights on the device"
        return (
            f"\n{self.model}, {self.layers} layers, batch {self.batch}, {self.device} at "
            f"{self.link / GB:g} GB/s: budget {self.budget} = {self.budget_bytes / GB:.1f} GB, "
            f"store-all {self.store_all_bytes / GB:.1f} GB and {self.compute_us / 1e3:.0f} ms, "
            f"parameters {self.parameter_bytes / GB:.1f} GB; {where}"
        )


@dataclass(frozen=True)
class Row:
    """One strategy on one case.

    ``transfers_us`` is the time of the busier engine, ``moving_us`` that of both, ``stall_us`` what
    ops wait for them, and ``again_us`` the time of ops that run again.
    """

    case: Case
    strategy: str
    status: Status
    seconds: float
    solver: str
    peak_bytes: int
    time_us: float
    bound_us: float
    transfers_us: float
    moving_us: float
    stall_us: float
    again_us: float
    out_bytes: int
    back_bytes: int
    host_peak_bytes: int
    weights_moved: int | None = None
    reason: str = ""

    @property
    def over_compute(self) -> float:
        """Against running every op once."""
        return self.time_us / self.case.compute_us

    @property
    def over_transfers(self) -> float | None:
        """Against the busier engine; None where nothing moves."""
        return self.time_us / self.transfers_us if self.transfers_us else None

    @property
    def hidden(self) -> float | None:
        """The part of the transfers' time for which no op waits; None where nothing moves."""
        return 1 - self.stall_us / self.moving_us if self.moving_us else None

    def to_json(self) -> dict[str, Any]:
        """The fields, those of the case among them, and the ratios."""
        row = asdict(self)
        ratios = {
            name: getattr(self, name) for name in ("over_compute", "over_transfers", "hidden")
        }
        return {**row.pop("case"), **row, **ratios}


def row_from_json(data: dict[str, Any]) -> Row:
    """A row read back."""
    case = Case(**{name: data[name] for name in Case.__dataclass_fields__})
    own = Row.__dataclass_fields__.keys() - {"case"}
    return Row(case=case, **{name: data[name] for name in own})


def line(row: Row) -> str:
    """One row, under `HEADING`; times of what does not fit say nothing."""
    peak = f"{row.strategy:11}{row.peak_bytes / GB:9.2f}"
    if row.status != "ok":
        remark = row.reason or "least peak found"
        return f"{peak}{'':72}{row.seconds:7.1f}  {row.status}, {remark}"
    more = f", {row.weights_moved} weights in host memory" if row.weights_moved is not None else ""
    return (
        f"{peak}{row.over_compute:10.4f}{_cell(row.over_transfers):>12}"
        f"{row.bound_us / row.case.compute_us:8.4f}{_cell(row.hidden):>8}"
        f"{100 * row.again_us / row.case.compute_us:9.2f}{row.out_bytes / GB:8.2f}"
        f"{row.back_bytes / GB:9.2f}{row.host_peak_bytes / GB:9.2f}{row.seconds:7.1f}  ok{more}"
    )


def _cell(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}"


# -- all of them -----------------------------------------------------------------------------


def by_case(rows: Iterable[Row]) -> dict[Case, dict[str, Row]]:
    """The rows of each case by strategy."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.strategy] = row
    return found


def overview(rows: Sequence[Row]) -> str:
    """Step time against compute, all strategies side by side, a line for each case."""
    names = list(dict.fromkeys(row.strategy for row in rows))
    lines = [
        '\nStep time against running every op once; "over": nothing found fits the budget; '
        '"h": weights in host memory',
        f"{'model':14}{'device':>7}{'GB/s':>6}{'budget':>8}{'GB':>8}  "
        + "".join(f"{name:>11}" for name in names),
    ]
    for case, found in by_case(rows).items():
        start = (
            f"{case.model:14}{case.device:>7}{case.link / GB:6g}{case.budget:>8}"
            f"{case.budget_bytes / GB:8.1f} {'h' if case.weights_on_host else ' '}"
        )
        lines.append(start + "".join(f"{_time(found.get(name)):>11}" for name in names))
    return "\n".join(lines)


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.over_compute:.4f}" if row.status == "ok" else row.status


@dataclass(frozen=True)
class Claims:
    """What the rows say of moving and recomputing together.

    ``removed`` is, for each case at the claim's link and half the peak of store-all with weights on
    the device, the part of the time added by recomputation alone that is gone; ``removable`` is the
    part that the proven bound leaves for any schedule. ``slower`` names the cases where one
    strategy alone beats both together.
    """

    removed: dict[str, float]
    removable: dict[str, float]
    least_removed: float | None
    median_removed: float | None
    compared: int
    slower: tuple[str, ...]


def claims_of(rows: Iterable[Row]) -> Claims:
    """The claims over all cases."""
    cases = by_case(rows)
    halves = {
        f"{case.model} on {case.device}": found
        for case, found in cases.items()
        if case.link == CLAIM_LINK and case.budget == HALF and not case.weights_on_host
        if all(found[name].status == "ok" for name in ("recompute", "both") if name in found)
        if _added(found, "recompute") > SAME and "both" in found
    }
    removed = {
        name: 1 - _added(found, "both") / _added(found, "recompute")
        for name, found in halves.items()
    }
    compared = {case: found for case, found in cases.items() if "both" in found}
    return Claims(
        removed=removed,
        removable={
            name: 1
            - (found["both"].bound_us / found["both"].case.compute_us - 1)
            / _added(found, "recompute")
            for name, found in halves.items()
        },
        least_removed=min(removed.values(), default=None),
        median_removed=median(removed.values()) if removed else None,
        compared=len(compared),
        slower=tuple(_name(case) for case, found in compared.items() if _is_slower(found)),
    )


def _name(case: Case) -> str:
    return f"{case.model} on {case.device} at {case.link / GB:g} GB/s, {case.budget}"


def _added(found: Mapping[str, Row], strategy: str) -> float:
    """Time over store-all; none where there is no such row."""
    return found[strategy].over_compute - 1 if strategy in found else 0.0


def _is_slower(found: dict[str, Row]) -> bool:
    others = [found[name] for name in ("keep", "recompute", "offload") if name in found]
    best = min((row.time_us for row in others if row.status == "ok"), default=None)
    both = found["both"]
    return best is not None and (both.status != "ok" or both.time_us > best * (1 + SAME))


def claims_text(claims: Claims) -> str:
    """The claims in words."""
    lines = [f"\nAt {CLAIM_LINK / GB:g} GB/s and {HALF} of store-all, moving as well removes, of "
             "the time that recomputation alone adds (and no schedule more than):"]  # fmt: skip
    lines += [
        f"  {name:28}{part:8.1%}{f'({claims.removable[name]:.1%})':>10}"
        for name, part in claims.removed.items()
    ]
    if claims.least_removed is not None and claims.median_removed is not None:
        lines.append(f"  median {claims.median_removed:.1%}, least {claims.least_removed:.1%}")
    lines.append(
        f"Both together against the better of the others, {claims.compared} cases: "
        + ("never slower" if not claims.slower else f"SLOWER in {'; '.join(claims.slower)}")
    )
    return "\n".join(lines)
