"""What torch's CUDA allocator reserves for a step: by a dry run, and by a plan before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.core.problem import Problem
from fxremat.core.schedule import Step
from fxremat.core.timeline import Interval
from fxremat.core.timeline import replay as timeline_of
from fxremat.memory.allocator.caching import CachingAllocator, Usage, apply_events, replay
from fxremat.memory.allocator.rules import SEGMENT_STEP_BYTES, round_up
from fxremat.memory.allocator.settings import AllocatorSettings
from fxremat.memory.segments import LEAST_SEGMENT_BYTES, WALL_BYTES

LARGER = tuple(1 + k / 400 for k in range(6))
"""Times the bytes that a step needs: segments to choose from; some of them stay unused."""
MUCH_LARGER = tuple(1 + k / 50 for k in range(1, 31))
"""The same, where these leave much unused: large blocks that live across each other fit badly."""
MUCH_UNUSED = 0.02
"""In parts of what the step needs."""


@dataclass(frozen=True)
class Reserved:
    """What the allocator takes for a step, with a segment that it takes first; 0 for none."""

    usage: Usage
    segment_bytes: int


def least_reserved(
    events: Sequence[Event],
    settings: AllocatorSettings,
    held_bytes: int,
    larger: Sequence[float] = LARGER,
    before: int = 0,
) -> Reserved:
    """With the segment that leaves the least unused, taken after ``before`` of the events.

    Segments that are taken as a step needs them fit what was asked for then, and not what comes
    later; one segment for the whole step can be divided as the step goes on.
    """
    without = reserved(events, settings, held_bytes)
    beside = held_bytes + sum(e.nbytes for e in events if _is_resident(e))
    needed = without.peak_allocated_bytes - beside
    best = Reserved(without, 0)
    for factor in (*larger, *MUCH_LARGER) if larger and needed > 0 else ():
        segment = round_up(int(factor * needed), SEGMENT_STEP_BYTES)
        least = best.usage.peak_reserved_bytes
        if factor > larger[-1] and least <= without.peak_allocated_bytes + MUCH_UNUSED * needed:
            break
        if beside + segment + WALL_BYTES < least:
            one = Reserved(reserved(events, settings, held_bytes, segment, before), segment)
            best = min(best, one, key=lambda one: one.usage.peak_reserved_bytes)
    return best


def reserved(
    events: Sequence[Event],
    settings: AllocatorSettings,
    held_bytes: int,
    segment_bytes: int = 0,
    before: int = 0,
) -> Usage:
    """What is reserved for two steps, one after the other.

    ``events`` are of one step; what is resident has a name that is no number, and comes first. What
    a step leaves, as gradients, is freed before the next one. ``held_bytes`` lie beside it, in one
    block. ``segment_bytes`` are asked for, and freed, in the first step after ``before`` of the
    events; what is cached goes back to the device then. What the allocator has taken it keeps
    otherwise: it never runs out. A segment has a wall, too.
    """
    left: dict[str, None] = {}
    begun = [event for event in events[:before] if not _is_resident(event)]
    step = [event for event in events if not _is_resident(event)]
    for event in step:
        if isinstance(event, Allocate):
            left[event.name] = None
        elif isinstance(event, Free):
            del left[event.name]
    resident = [event for event in events if _is_resident(event)]
    ends = [Free(name) for name in left]
    first: list[Event] = [Allocate("held beside", held_bytes), *resident, *begun]
    if segment_bytes:
        first += [EmptyCache()] if begun else []
        first += [Allocate("segment", segment_bytes + WALL_BYTES), Free("segment")]
        first += [Allocate("wall", WALL_BYTES)]
    return replay([*first, *step[len(begun) :], *ends, *step], settings)


def reserved_with_rest(
    events: Sequence[Event], settings: AllocatorSettings, limit_bytes: int, before: int = 0
) -> Reserved:
    """With all that a limit leaves as the segment, taken after ``before`` of the events."""
    allocator = CachingAllocator(settings)
    later = [event for event in events[before:] if _is_resident(event)]
    for _ in apply_events(allocator, [*events[:before], *later, EmptyCache()]):
        pass
    left = (limit_bytes - allocator.reserved) // WALL_BYTES * WALL_BYTES
    segment = max(0, left - WALL_BYTES) if left >= LEAST_SEGMENT_BYTES else 0
    return Reserved(reserved(events, settings, 0, segment, before), segment)


def _is_resident(event: Event) -> TypeGuard[Allocate]:
    return isinstance(event, Allocate) and not event.name.isdigit()


def events_of_plan(problem: Problem, steps: Sequence[Step]) -> tuple[Event, ...]:
    """What the allocator would be asked for if every value lay in memory of its own.

    Nearly so, that is: what fuses with its reader has no memory in the problem either, and a value
    that may be written over another one of at least its size takes that one's block.
    """
    sizes = problem.bytes_of
    events: list[Event] = [Allocate(f"resident {v}", sizes[v]) for v in problem.resident]
    starting: list[list[Interval]] = [[] for _ in steps]
    ending: list[list[Interval]] = [[] for _ in steps]
    for one in timeline_of(problem, steps).intervals:
        starting[one.start].append(one)
        if one.stop < len(steps) or one.value not in problem.outputs:
            ending[one.stop - 1].append(one)
    name_of: dict[Interval, str] = {}

    def allocate(nbytes: int) -> str:
        name = f"{len(events)}"
        events.append(Allocate(name, nbytes))
        return name

    for index, step in enumerate(steps):
        begun, over = starting[index], ending[index]
        if isinstance(step, str):
            op = problem.op_of[step]
            for read, write in op.inplace:
                old = next((one for one in over if one.value == read and one in name_of), None)
                new = next((o for o in begun if o.value == write and o not in name_of), None)
                if old is not None and new is not None and sizes[read] >= sizes[write]:
                    name_of[new] = name_of.pop(old)
        for one in begun:
            if one not in name_of:
                name_of[one] = allocate(sizes[one.value])
        if isinstance(step, str) and op.workspace_bytes:
            events.append(Free(allocate(op.workspace_bytes)))
        events += [Free(name_of.pop(one)) for one in over if one in name_of]
    return tuple(events)
