"""Two results of `python -m benchmarks`, side by side: what got better and what got worse.

    python -m benchmarks.compare before.json after.json [--tolerance 0.5]

For every model and way to run it that both files have: the measured peak, the budget's least where
it was refused, and the time that the plan adds to store-all's, before and after. Peaks and added
times are worse from `--tolerance` percent (of the peak before; of store-all's time) on. Measured
step times are shown, but never judged: they are another machine's moments. Exits with 1 if
something is worse, or if what was trained before is refused or fails now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commands import parser_for
from .rows import MIB, format_table, number

HEAD = ["model", "way", "peak MiB", "after", "", "planned", "after", "", "time", "after", ""]


@dataclass(frozen=True)
class Facts:
    """What a row says; None where it does not.

    ``added`` is what the plan adds to store-all's time, as a part of it; ``ratio`` the measured
    step time against torch.compile's. ``refused`` is the least budget where the one given was
    refused.
    """

    peak_bytes: int | None
    added: float | None
    ratio: float | None
    refused: int | None
    error: str | None
    budget_bytes: int | None = None

    @property
    def over(self) -> bool:
        """Whether the budget was broken."""
        return (self.peak_bytes or 0) > (self.budget_bytes or sys.maxsize)


Key = tuple[str, str]


def facts_of(data: Mapping[str, Any]) -> dict[Key, Facts]:
    """The rows of a result, by model and way."""
    return {
        (_title(result), row["variant"]): _facts(row)
        for result in data["results"]
        for row in result["rows"]
    }


def _title(result: Mapping[str, Any]) -> str:
    usual = {"small", "cpu", "float32"}
    more = [result[name] for name in ("size", "device", "dtype") if result[name] not in usual]
    return " ".join([result["model"], *more])


def _facts(row: Mapping[str, Any]) -> Facts:
    report = row.get("report") or {}
    return Facts(
        peak_bytes=row.get("peak_bytes"),
        added=report.get("time_overhead"),
        ratio=row.get("time_ratio"),
        refused=row.get("minimum_bytes"),
        error=row.get("error"),
        budget_bytes=row.get("budget_bytes"),
    )


@dataclass(frozen=True)
class Pair:
    """One model and way, before and after; ``tolerance`` is a part, not percent."""

    key: Key
    before: Facts
    after: Facts
    tolerance: float

    def worse(self) -> Iterator[str]:
        """What got worse, in words."""
        before, after = self.before, self.after
        if before.peak_bytes is not None and after.peak_bytes is None:
            reason = "refused" if after.refused is not None else f"fails: {after.error}"
            yield reason.splitlines()[0]
        if after.over and not before.over:
            yield "over its budget"
        if _rise(before.peak_bytes, after.peak_bytes, before.peak_bytes) > self.tolerance:
            yield "peak"
        if _rise(before.refused, after.refused, before.refused) > self.tolerance:
            yield "least budget"
        if _rise(before.added, after.added, 1.0) > self.tolerance:
            yield "planned time"

    def cells(self) -> list[str]:
        """A line of the table."""
        before, after = self.before, self.after
        return [
            *self.key,
            _bytes(before),
            _bytes(after),
            _change(before.peak_bytes, after.peak_bytes, before.peak_bytes),
            number(before.added, "+.1%"),
            number(after.added, "+.1%"),
            _change(before.added, after.added, 1.0),
            number(before.ratio, ".2f"),
            number(after.ratio, ".2f"),
            "; ".join(f"WORSE: {what}" for what in self.worse()),
        ]


def _rise(before: float | None, after: float | None, whole: float | None) -> float:
    """How much more, in parts of the whole; none where one of them is not known."""
    return (after - before) / whole if before is not None and after is not None and whole else 0.0


def _change(before: float | None, after: float | None, whole: float | None) -> str:
    rise = _rise(before, after, whole)
    return f"{rise:+.1%}" if abs(rise) >= 5e-4 else ""


def _bytes(facts: Facts) -> str:
    if facts.peak_bytes is not None:
        return f"{facts.peak_bytes / MIB:.1f}"
    return "error" if facts.refused is None else f"least {facts.refused / MIB:.1f}"


def compare(
    before: Mapping[Key, Facts], after: Mapping[Key, Facts], tolerance: float
) -> list[Pair]:
    """All that both have, in the order of the first."""
    return [Pair(key, before[key], after[key], tolerance) for key in before if key in after]


def text(pairs: Sequence[Pair], before: Mapping[Key, Facts], after: Mapping[Key, Facts]) -> str:
    """The table, what only one of the files has, and how many pairs are worse."""
    lines = [format_table([HEAD, *(pair.cells() for pair in pairs)])]
    for where, missing in (("before", before.keys() - after), ("after", after.keys() - before)):
        if missing:
            lines.append(f"only {where}: {', '.join(' '.join(key) for key in sorted(missing))}")
    worse = sum(any(pair.worse()) for pair in pairs)
    return "\n".join([*lines, f"\n{len(pairs)} compared, {worse} worse"])


def main(words: Sequence[str] | None = None) -> int:
    """Read, compare, print; 1 where something got worse."""
    parser = parser_for("benchmarks.compare", __doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.5, metavar="PERCENT")
    given = parser.parse_args(words)
    before, after = (facts_of(json.loads(path.read_text())) for path in (given.before, given.after))
    pairs = compare(before, after, given.tolerance / 100)
    print(text(pairs, before, after))
    return int(any(any(pair.worse()) for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
