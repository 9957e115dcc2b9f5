"""Steps that ran on an H200, replayed on the model of its allocator: `benchmarks/results/steps`.

    python -m benchmarks.loops.recorded

Each file has what one planned graph asked for, in order, and what the card then reserved in six
steps with a fused AdamW. fxremat laid memory out in another way then, which nothing but this replay
knows any more: all lay in the pool that everybody shares. One *segment* was taken before the first
step, with a *room* at its beginning that was held for the optimizer's states while the graph ran,
and a *wall* behind it. After the backward the room was left, and where it was larger than all
*holes* of the segment, these were held until the next forward.

So the replay shows whether the allocator's model, given a loop, says what a card says. It is
given what was recorded, and that lacks the memory in which kernels were tuned in the first step.
Held all through that step, as the second replay has it, it may be more than there was at the worst
moment. `CAUSES` says where it makes the replay differ.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxremat.sizes import MIB

from ..allocator import Allocator
from ..rows import format_table, mib, number

FOLDER = Path(__file__).parent.parent / "results" / "steps"
STEPS = 4
"""As many as it takes until the replay reserves no more."""
WALL_BYTES = 2 * MIB
LEAST_ROOM_BYTES = 4 * MIB
LEAST_HOLE_BYTES = MIB + 1
TUNING_BYTES = 60 * MIB
"""The card's L2 cache: what kernels write over while they are tuned, in the first step."""
CAUSES = {
    "deberta_amp": "tuning in the first step; the card's later steps are the replay's",
    "gemma2": "tuning in the first step: the card lies between the two replays",
    "lora": "tuning in the first step: blocks that came later found no piece",
    "t5": "tuning in the first step: blocks that came later found no piece",
}
"""Why the replay says less than the card did, where it does by more than 1 %."""


@dataclass(frozen=True)
class Recorded:
    """One file: its name and what it says."""

    name: str
    data: Mapping[str, Any]

    @property
    def measured(self) -> int:
        """The most that the card reserved."""
        return max(int(one["reserved"]) for one in list(self.data["measured"].values())[:2])

    @property
    def inputs(self) -> list[int]:
        """Bytes of the parameters and of the batch."""
        return [int(one["nbytes"]) for one in self.data["events"]["inputs"]]

    @property
    def trained(self) -> list[int]:
        """Bytes of the parameters that have a gradient."""
        inputs = self.data["events"]["inputs"]
        return [int(one["nbytes"]) for one in inputs if one["gradient"] is not None]

    @property
    def room(self) -> int:
        """Bytes of the states of AdamW: two for each parameter."""
        return 2 * sum(self.trained)

    @property
    def rest(self) -> int:
        """What was allocated beside, but for these states."""
        return max(0, int(self.data["held_bytes"]) - self.room)


def recorded_steps() -> list[Recorded]:
    """All files, by name."""
    paths = sorted(FOLDER.glob("*.json.gz"))
    return [Recorded(p.name.split(".")[0], json.loads(gzip.decompress(p.read_bytes())))
            for p in paths]  # fmt: skip


@dataclass
class _Heap:
    """The allocator, with names for what is allocated; those of the graph are numbers."""

    of: Allocator = field(default_factory=Allocator)
    live: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, nbytes: int) -> None:
        self.live[name] = self.of.allocate(nbytes)

    def free(self, name: str) -> None:
        self.of.free(self.live.pop(name))

    def free_all(self, names: Iterable[str]) -> None:
        for name in list(names):
            self.free(name)

    def play(self, events: Iterable[Any]) -> None:
        for name, *size in events:
            if size:
                self.take(name, size[0])
            else:
                self.free(name)

    @property
    def holes(self) -> list[int]:
        """Bytes of the free blocks that large requests may be cut from."""
        free = (n for _, n, _, small in self.of.free_blocks() if not small)
        return sorted(n for n in free if n >= LEAST_HOLE_BYTES)


def reserved_in_steps(step: Recorded, tuning: int = 0) -> list[int]:
    """The most reserved bytes up to the end of each step; ``tuning`` are held in the first one."""
    heap, reserved, held = _Heap(), list[int](), dict[str, int]()
    for k, nbytes in enumerate(step.inputs):
        heap.take(f"input {k}", nbytes)
    for k in range(2):
        heap.take(f"beside {k}", step.rest // 2)
    heap.of.empty_cache()
    heap.take("segment", int(step.data["segment_bytes"]) + WALL_BYTES + step.room)
    heap.free("segment")
    heap.take("room", step.room)
    heap.take("wall", WALL_BYTES)
    for number_of_step in range(STEPS):
        if number_of_step:
            _close_room(heap, step, held)
        for half in ("forward", "incoming", "backward"):
            if tuning and not number_of_step:
                heap.take("tuning", tuning)
            heap.play(step.data["events"][half])
            if "tuning" in heap.live:
                heap.free("tuning")
        held = _open_room(heap, step.room, number_of_step)
        if not number_of_step:
            for k, nbytes in enumerate(step.trained):
                heap.take(f"first moment {k}", nbytes)
                heap.take(f"second moment {k}", nbytes)
        heap.free_all(name for name in heap.live if name.isdigit())
        reserved.append(heap.of.peak_reserved_bytes)
    return reserved


def _open_room(heap: _Heap, room: int, step: int) -> dict[str, int]:
    """After a backward: states may come into the room; smaller holes are held, and named."""
    held: dict[str, int] = {}
    if "room" in heap.live:
        holes = heap.holes
        if max(holes, default=0) > room:
            held = {f"hole {step}.{k}": n for k, n in enumerate(holes) if n <= room}
        for name, nbytes in held.items():
            heap.take(name, nbytes)
        heap.free("room")
    return held


def _close_room(heap: _Heap, step: Recorded, held: Mapping[str, int]) -> None:
    """Before a forward: the room is kept where nobody came into it, else given up."""
    if "room" not in heap.live and "wall" in heap.live:
        own = sum(step.inputs) + sum(held.values()) + WALL_BYTES
        missing = max(0, step.room + step.rest - heap.of.requested + own)
        if missing > step.room - LEAST_ROOM_BYTES:
            heap.take("room", min(missing, step.room))
        else:
            heap.free("wall")
        heap.free_all(held)


def main() -> None:
    """Print what the card reserved, what the replays say, and why they differ."""
    rows = [["model", "card", "replay", "error %", "tuned", "error %", "why"]]
    for step in recorded_steps():
        found, tuned = (max(reserved_in_steps(step, nbytes)) for nbytes in (0, TUNING_BYTES))
        errors = [100 * (nbytes / step.measured - 1) for nbytes in (found, tuned)]
        why = CAUSES[step.name] if abs(errors[0]) > 1 else ""
        first, second = (number(error, ".2f") for error in errors)
        rows.append([step.name, mib(step.measured), mib(found), first, mib(tuned), second, why])
    print(format_table(rows))


if __name__ == "__main__":
    main()
