"""What a recorded loop takes of the device, by the model of torch's allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fxremat.core.events import Allocate, Free
from fxremat.memory.allocator_settings import AllocatorSettings

from ..allocator import Allocator, EmptyCache
from .recorder import ARENA, Happening, LoopRecord, Moment


@dataclass(frozen=True)
class StepUsage:
    """The most bytes that were reserved, and allocated, in one step, and what ran at the latter."""

    reserved: int
    allocated: int
    moment: Moment


@dataclass(frozen=True)
class LoopUsage:
    """What a loop takes, in bytes.

    The peak is where most was in use while ``reserved`` was as high as it gets. ``unused`` of it
    held no value even then: cached by the allocator, cut off by its rounding, or a part of the
    arena that is empty. ``held`` says who had the rest.
    """

    steps: tuple[StepUsage, ...]
    peak_step: int
    moment: Moment
    unused: int
    held: dict[str, int]

    @property
    def reserved(self) -> int:
        """The most of all steps."""
        return max(step.reserved for step in self.steps)


@dataclass
class _Heap:
    """The pools of the device, and what of the arena is in use."""

    settings: AllocatorSettings
    pools: dict[str, Allocator] = field(init=False)
    addresses: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of all blocks that are there, also of those in the arena."""
    arena: int = 0
    placed: int = 0

    def __post_init__(self) -> None:
        self.pools = {name: Allocator(self.settings) for name in ("common", "graphs")}

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools.values())

    @property
    def allocated(self) -> int:
        """Without what of the arena is empty."""
        return sum(pool.allocated for pool in self.pools.values()) - self.arena + self.placed

    def apply(self, one: Happening) -> None:
        """The next thing that happens."""
        match one.event:
            case Allocate(name, nbytes):
                self.sizes[name] = nbytes
                if one.place == "arena":
                    self.placed += nbytes
                    return
                pool = self.pools[one.place]
                before = pool.allocated
                self.addresses[name] = pool.allocate(nbytes)
                if name == ARENA:
                    self.arena = pool.allocated - before
            case Free(name):
                nbytes = self.sizes.pop(name)
                if one.place == "arena":
                    self.placed -= nbytes
                else:
                    self.pools[one.place].free(self.addresses.pop(name))
            case EmptyCache():
                self.pools[one.place].empty_cache()


def replay_loop(record: LoopRecord, settings: AllocatorSettings | None = None) -> LoopUsage:
    """The bytes that the loop takes in each step, from an empty allocator on."""
    settings = settings or AllocatorSettings()
    heap, steps, most, peak_place = _Heap(settings), list[StepUsage](), (0, 0), 0
    for step, happenings in _by_step(record):
        usage = StepUsage(heap.reserved, heap.allocated, "other")
        for place, one in happenings:
            heap.apply(one)
            reserved, allocated = heap.reserved, heap.allocated
            if (reserved, allocated) > most:
                most, peak_place = (reserved, allocated), place
            if allocated > usage.allocated:
                usage = StepUsage(max(usage.reserved, reserved), allocated, one.moment)
            elif reserved > usage.reserved:
                usage = StepUsage(reserved, usage.allocated, usage.moment)
        assert step == len(steps)
        steps.append(usage)
    heap = _Heap(settings)
    for one in record.happenings[: peak_place + 1]:
        heap.apply(one)
    held = Counter[str]()
    for name, nbytes in heap.sizes.items():
        if name != ARENA:
            held[record.holders[name]] += nbytes
    peak = record.happenings[peak_place]
    unused = most[0] - sum(held.values())
    return LoopUsage(tuple(steps), peak.step, peak.moment, unused, dict(held))


def _by_step(record: LoopRecord) -> Iterator[tuple[int, list[tuple[int, Happening]]]]:
    """All that happens in each step, with its place in the record."""
    parts: list[list[tuple[int, Happening]]] = [[] for _ in range(record.steps)]
    for place, one in enumerate(record.happenings):
        parts[one.step].append((place, one))
    yield from enumerate(parts)
