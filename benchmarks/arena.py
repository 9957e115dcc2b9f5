"""How much of the memory for planned addresses nobody uses: the arena, and the pool beside it.

    python -m benchmarks.arena

First the seven steps that were recorded for an H200 (`benchmarks/results/steps`). They do not say
which buffers the code itself allocates, so that all but results lie in the arena. Then steps for an
H200 as a dry run on a machine without one gives them (`benchmarks/results/runs`): of all that is
kept, and of plans for 60 % of that. There what libraries return lies in a private pool.

All parts are relative to the most bytes that are alive: what the arena and the pool take more, and
what a private pool for everything takes more by best fit after the best first segment.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxremat.core.events import (
    Allocate,
    Event,
    Free,
    RunEvents,
)
from fxremat.core.json_data import from_data
from fxremat.core.layout import CodeBuffer
from fxremat.core.step import last_first
from fxremat.memory.allocator_settings import MIN_BLOCK_BYTES, round_up
from fxremat.memory.composed_steps import loop_of
from fxremat.memory.layout import ALIGNMENT_BYTES, arrange, in_sequence, least_pool

from .check_addresses import check_layout
from .commands import parser_for
from .rows import format_table, mib

RESULTS = Path(__file__).parent / "results"
HEAD = ["step", "buffers", "MiB alive", "arena", "pool", "unused", "s", "all by best fit"]


@dataclass(frozen=True)
class Row:
    """Of one step; ``pool_bytes`` and ``best_fit_bytes`` are reserved."""

    name: str
    buffers: int
    alive_bytes: int
    arena_bytes: int
    pool_bytes: int
    best_fit_bytes: int
    seconds: float

    @property
    def unused(self) -> float:
        """Bytes of arena and pool that nobody uses at the peak, relative to those alive."""
        return (self.arena_bytes + self.pool_bytes) / self.alive_bytes - 1

    def cells(self) -> list[str]:
        """A line of the table."""
        best_fit = self.best_fit_bytes / self.alive_bytes - 1
        sizes = map(mib, (self.alive_bytes, self.arena_bytes, self.pool_bytes))
        parts = f"{self.unused:.2%}", f"{self.seconds:.1f}", f"{best_fit:.2%}"
        return [self.name, f"{self.buffers}", *sizes, *parts]


def recorded_runs(results: Path = RESULTS) -> Iterator[tuple[str, RunEvents]]:
    """The names of all steps, and what they do."""
    for path in sorted((results / "steps").glob("*.json.gz")):
        yield _name(path), _all_by_the_code(_read(path)["events"])
    for path in sorted((results / "runs").glob("*.json.gz")):
        yield _name(path), run_of_data(_read(path))


def _name(path: Path) -> str:
    return path.name.partition(".")[0]


def _read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def run_of_data(data: dict[str, Any]) -> RunEvents:
    """A run as it is written down: names and bytes of what is allocated, names of what is freed."""
    forward, backward = (tuple(_events(data[half])) for half in ("forward", "backward"))
    rest = from_data(RunEvents, {**data, "forward": (), "backward": ()})
    return replace(rest, forward=forward, backward=backward)


def _events(written: Iterable[Any]) -> Iterator[Event]:
    for name, *size in written:
        yield Allocate(str(name), int(size[0])) if size else Free(str(name))


def _all_by_the_code(written: dict[str, Any]) -> RunEvents:
    """A run whose code asks itself for everything."""
    forward = tuple(_events(written["forward"]))
    backward = tuple(_events(written["backward"]))
    return RunEvents(
        forward,
        backward,
        results=tuple(written["results"]),
        incoming=tuple((name, nbytes) for name, nbytes in written["incoming"]),
        forward_buffers=_calls(forward),
        backward_buffers=_calls(backward),
    )


def _calls(events: Sequence[Event]) -> tuple[CodeBuffer, ...]:
    made = (event for event in events if isinstance(event, Allocate))
    return tuple(CodeBuffer(e.name, (e.nbytes,), (1,), "torch.uint8", 1) for e in made)


def measured(name: str, run: RunEvents) -> Row:
    """Arrange, take the time, check."""
    order, alignment = last_first(1), ALIGNMENT_BYTES["cuda"]
    started = time.perf_counter()
    arranged = arrange([run], order, "cuda")
    seconds = time.perf_counter() - started
    check_layout([run], order, arranged.layout, alignment)
    events = [event for _, event in in_sequence([run], order)]
    arena = arranged.layout.arena_bytes
    pool = arranged.reserved_bytes - arena
    _, best_fit = least_pool(loop_of(events, {}))
    return Row(name, len(run.sizes()), most_alive(events), arena, pool, best_fit, seconds)


def most_alive(events: Sequence[Event]) -> int:
    """The most bytes, in blocks of the allocator."""
    live, total, most = dict[str, int](), 0, 0
    for event in events:
        if isinstance(event, Allocate):
            live[event.name] = round_up(event.nbytes, MIN_BLOCK_BYTES)
            total += live[event.name]
        elif isinstance(event, Free):
            total -= live.pop(event.name)
        most = max(most, total)
    return most


def main(given: Sequence[str] | None = None) -> int:
    """Print a row for each step, and the median and the worst of what is unused."""
    parser = parser_for("benchmarks.arena", __doc__)
    parser.parse_args(given)
    rows = [measured(name, run) for name, run in recorded_runs()]
    print(format_table([HEAD, *(row.cells() for row in rows)]))
    unused = [row.unused for row in rows]
    print(f"unused: median {statistics.median(unused):.2%}, worst {max(unused):.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
