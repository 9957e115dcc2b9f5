"""Replaying allocations and frees through the allocator's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator.caching import CachingAllocator
from fxremat.memory.allocator.settings import AllocatorSettings


@dataclass(frozen=True)
class Usage:
    """What a trace needs of the device, at most."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    segment_count: int


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


def replay(events: Iterable[Event], settings: AllocatorSettings | None = None) -> Usage:
    """The peaks of a trace that starts with an empty allocator.

    Raises `ValueError` as `apply_events` does.
    """
    allocator = CachingAllocator(settings)
    for _ in apply_events(allocator, events):
        pass
    return Usage(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.peak_requested_bytes,
        allocator.segment_count,
    )
