"""Replaying allocations and frees through the allocator's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator.caching import CachingAllocator
from fxremat.memory.allocator.settings import AllocatorSettings


@dataclass(frozen=True)
class Usage:
    """What a trace needs of the device. Steps are indices of events.

    Each peak comes with the first step after which it was reached (0 if it is 0 bytes).
    ``fragmentation_bytes`` is what was reserved and not allocated at the peak of reserved bytes.
    """

    peak_allocated_bytes: int
    peak_allocated_step: int
    peak_reserved_bytes: int
    peak_reserved_step: int
    peak_requested_bytes: int
    fragmentation_bytes: int
    segment_count: int
    device_calls: int
    retries: int


def apply_events(allocator: CachingAllocator, events: Iterable[Event]) -> Iterator[None]:
    """Applies one event after the other, yielding after each.

    Raises `ValueError` for a name that is allocated twice, or freed without being allocated.
    """
    address_of: dict[str, int] = {}
    for step, event in enumerate(events):
        match event:
            case Allocate(name, nbytes, stream):
                if name in address_of:
                    raise ValueError(f"event {step} allocates {name!r} again; free it before")
                address_of[name] = allocator.allocate(nbytes, stream)
            case Free(name):
                if name not in address_of:
                    raise ValueError(f"event {step} frees {name!r}, which is not allocated")
                allocator.free(address_of.pop(name))
            case EmptyCache():
                allocator.empty_cache()
        yield


def replay(
    events: Iterable[Event],
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
) -> Usage:
    """The peaks of a trace that starts with an empty allocator.

    ``capacity_bytes`` None: the device never runs out. Raises `OutOfMemory` where it does, and
    `ValueError` as `apply_events` does.
    """
    allocator = CachingAllocator(settings, capacity_bytes)
    allocated_peak = reserved_peak = fragmentation = 0
    allocated_step = reserved_step = 0
    for step, _ in enumerate(apply_events(allocator, events)):
        if allocator.allocated_bytes > allocated_peak:
            allocated_peak, allocated_step = allocator.allocated_bytes, step
        if allocator.reserved_bytes > reserved_peak:
            reserved_peak, reserved_step = allocator.reserved_bytes, step
            fragmentation = reserved_peak - allocator.allocated_bytes
    return Usage(
        allocated_peak,
        allocated_step,
        reserved_peak,
        reserved_step,
        allocator.peak_requested_bytes,
        fragmentation,
        allocator.segment_count,
        allocator.device_calls,
        allocator.retries,
    )
