"""The figures of one variant on one model, and how they are printed."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

MIB = 2**20


@dataclass
class Row:
    """Everything measured for one variant; None where it does not apply."""

    variant: str
    kind: str
    budget_bytes: int | None = None
    start_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    first_bytes: int | None = None
    retries: int | None = None
    compile_seconds: float | None = None
    loss: float | None = None
    gradient_error: float | None = None
    minimum_bytes: int | None = None
    report: dict[str, Any] | None = None
    error: str | None = None
    step_seconds: list[list[float]] = field(default_factory=list)
    time_ratios: list[float] = field(default_factory=list)

    @property
    def above_bytes(self) -> int | None:
        """Bytes above what was allocated before the step."""
        if self.peak_bytes is None or self.start_bytes is None:
            return None
        return self.peak_bytes - self.start_bytes

    @property
    def counted_bytes(self) -> int | None:
        """What a budget limits: on CUDA the bytes that are reserved, elsewhere the peak."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def predicted_reserved_bytes(self) -> int | None:
        """What fxremat said that CUDA's allocator would reserve."""
        return self.report.get("predicted_reserved_bytes") if self.report else None

    @property
    def predicted_bytes(self) -> int | None:
        """The peak that fxremat promised."""
        return self.report["predicted_peak_bytes"] if self.report else None

    @property
    def planned_ratio(self) -> float | None:
        """The step's time against keeping everything, by fxremat's plan."""
        return 1 + self.report["time_overhead"] if self.report else None

    @property
    def variants(self) -> dict[str, int]:
        """How many sites of each rule fxremat took."""
        return self.report.get("variants", {}) if self.report else {}

    @property
    def obeyed(self) -> bool | None:
        """Whether the measured peak is within the budget.

        On CUDA that of reserved bytes, and what was allocated until the first step was done.
        """
        if self.budget_bytes is None or self.counted_bytes is None:
            return None
        return max(self.counted_bytes, self.first_bytes or 0) <= self.budget_bytes

    @property
    def prediction_error(self) -> float | None:
        """|predicted - measured| / measured."""
        if self.predicted_bytes is None or not self.peak_bytes:
            return None
        return abs(self.predicted_bytes - self.peak_bytes) / self.peak_bytes

    @property
    def step_ms(self) -> float | None:
        """Median over the rounds of the median step."""
        return 1e3 * median(map(median, self.step_seconds)) if self.step_seconds else None

    @property
    def time_ratio(self) -> float | None:
        """Median over the rounds of the step time relative to compile's in the same round."""
        return median(self.time_ratios) if self.time_ratios else None

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        derived = (
            "above_bytes", "predicted_bytes", "planned_ratio", "variants", "obeyed",
            "prediction_error", "step_ms", "time_ratio",
        )  # fmt: skip
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def add_ratios(rows: Iterable[Row], reference: Row) -> None:
    """Fill in `time_ratios`: round by round against the reference's same round."""
    bases = [median(seconds) for seconds in reference.step_seconds]
    for row in rows:
        timed = [median(seconds) for seconds in row.step_seconds]
        row.time_ratios = [mine / base for mine, base in zip(timed, bases, strict=True)]


def mib(count: int | None, digits: int = 1) -> str:
    """Bytes in MiB, for a cell."""
    return "" if count is None else f"{count / MIB:.{digits}f}"


def number(value: float | None, form: str) -> str:
    """A figure, or an empty cell."""
    return "" if value is None else format(value, form)


def yes_no(value: bool | None) -> str:
    """An answer, the bad one loudly, or an empty cell."""
    return {None: "", True: "yes", False: "NO"}[value]


COLUMNS: dict[str, Any] = {
    "variant": lambda row: row.variant,
    "peak MiB": lambda row: mib(row.peak_bytes),
    "above start": lambda row: mib(row.above_bytes),
    "predicted": lambda row: mib(row.predicted_bytes),
    "budget": lambda row: mib(row.budget_bytes),
    "obeyed": lambda row: yes_no(row.obeyed),
    "error": lambda row: number(row.prediction_error, ".2%"),
    "step ms": lambda row: number(row.step_ms, ".1f"),
    "time": lambda row: number(row.time_ratio, ".3f"),
    "planned": lambda row: number(row.planned_ratio, ".3f"),
    "compile s": lambda row: number(row.compile_seconds, ".1f"),
    "loss": lambda row: number(row.loss, ".5f"),
    "gradients": lambda row: number(row.gradient_error, ".1e"),
    "variants": lambda row: str(sum(row.variants.values())) if row.report else "",
}


def format_table(lines: list[list[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def counts(variants: Mapping[str, int]) -> str:
    """Rules and how many sites of each, in words."""
    return ", ".join(f"{rule} x{count}" for rule, count in variants.items())


def _remark(row: Row) -> str | None:
    if row.variants:
        return f"  {row.variant}: {counts(row.variants)}"
    if row.minimum_bytes is not None:
        return f"  {row.variant}: the budget cannot be met; least {mib(row.minimum_bytes)} MiB"
    return f"  {row.variant}: {row.error}" if row.error else None


def table(rows: list[Row]) -> str:
    """All rows side by side, remarks below."""
    lines = [[show(row) for show in COLUMNS.values()] for row in rows]
    remarks = [remark for row in rows if (remark := _remark(row))]
    return "\n".join([format_table([list(COLUMNS), *lines]), *remarks])
