"""Planned addresses on given instances and on lifetimes made by rule; each result is checked.

    python -m benchmarks.addresses FOLDER_OR_CSV... --out benchmarks/results/addresses.json
    python -m benchmarks.addresses --generated --effort 0

A file has the columns id, lower, upper and size; lifetimes are half-open. Its capacity is part of
its name, as in `A.1048576.csv`, or given by `--capacity`. The exit status is 1 where the checker
rejects a placement, or where one does not fit its capacity.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fxremat.core.layout import Buffer

from .address_shapes import SHAPES
from .check_addresses import BadPlacement, check_placement, live_peak
from .commands import parser_for, write_json
from .placing import limits, place


@dataclass(frozen=True)
class Instance:
    """Buffers to place, and the arena that they have to fit, if one is given."""

    name: str
    buffers: tuple[Buffer, ...]
    capacity_bytes: int | None


@dataclass(frozen=True)
class Row:
    """What became of an instance; ``fault`` is what the checker has against the placement."""

    name: str
    buffers: int
    live_peak_bytes: int
    arena_bytes: int
    capacity_bytes: int | None
    seconds: float
    fault: str

    @property
    def ratio(self) -> float:
        """Arena over live peak; 1 where nothing is alive."""
        return self.arena_bytes / self.live_peak_bytes if self.live_peak_bytes else 1.0

    @property
    def fits(self) -> bool | None:
        """Whether the arena is within the capacity; None without one."""
        return None if self.capacity_bytes is None else self.arena_bytes <= self.capacity_bytes

    @property
    def failed(self) -> bool:
        """Whether the checker rejects it, or it does not fit."""
        return bool(self.fault) or self.fits is False


def read_instances(paths: Sequence[Path], capacity_bytes: int | None) -> Iterator[Instance]:
    """The CSV files, those of folders included, in the order of their names."""
    for path in paths:
        for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
            yield Instance(file.stem, read_buffers(file), capacity_bytes or capacity_of(file))


def read_buffers(file: Path) -> tuple[Buffer, ...]:
    """The buffers of a CSV file."""
    with file.open(newline="") as lines:
        return tuple(
            Buffer(row["id"], int(row["lower"]), int(row["upper"]), int(row["size"]))
            for row in csv.DictReader(lines)
        )


def capacity_of(file: Path) -> int | None:
    """The number in a name such as `A.1048576.csv`."""
    number = file.stem.rpartition(".")[2]
    return int(number) if number.isdigit() else None


def measure(instance: Instance, effort: int, time_limit_s: float | None) -> Row:
    """Place, take the time, check."""
    buffers, capacity = instance.buffers, instance.capacity_bytes
    started = time.perf_counter()
    placement = place(buffers, capacity_bytes=capacity, effort=effort, time_limit_s=time_limit_s)
    seconds = time.perf_counter() - started
    fault = ""
    try:
        check_placement(buffers, placement)
    except BadPlacement as error:
        fault = str(error)
    live = live_peak(buffers)
    return Row(instance.name, len(buffers), live, placement.arena_bytes, capacity, seconds, fault)


HEADING = (
    f"{'instance':<18} {'buffers':>8} {'live peak':>15} {'arena':>15} {'ratio':>7} {'s':>7}  fits"
)


def line(row: Row) -> str:
    """A row of the table."""
    fits = row.fault or {None: "", True: "yes", False: "NO"}[row.fits]
    return (
        f"{row.name:<18} {row.buffers:>8,} {row.live_peak_bytes:>15,} {row.arena_bytes:>15,} "
        f"{row.ratio:>7.4f} {row.seconds:>7.2f}  {fits}"
    )


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.addresses", __doc__)
    add = parser.add_argument
    add("paths", type=Path, nargs="*", help="CSV files, or folders of them")
    add("--capacity", type=int, help="bytes; default: the number in the name of the file")
    add("--generated", action="store_true", help="lifetimes made by rule, too")
    add(
        "--effort",
        type=int,
        default=limits.EFFORT,
        help="of the search, in places tried",
    )
    add("--time-limit", type=float, help="seconds for one instance; default: none")
    add("--out", type=Path, help="JSON file")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Place every instance, print its row, write the file; the exit status."""
    options = parse_arguments(given)
    instances = list(read_instances(options.paths, options.capacity))
    if options.generated:
        instances += [Instance(name, tuple(make()), None) for name, make in SHAPES.items()]
    if not instances:
        raise SystemExit("nothing to place: name CSV files or folders, or give --generated")
    print(HEADING)
    rows = []
    for instance in instances:
        rows.append(measure(instance, options.effort, options.time_limit))
        print(line(rows[-1]), flush=True)
    if options.out:
        figures = [asdict(row) | {"ratio": row.ratio, "fits": row.fits} for row in rows]
        write_json(options.out, {"rows": figures})
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
