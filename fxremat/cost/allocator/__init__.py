"""Bytes that torch's CUDA caching allocator reserves for a sequence of allocations."""

from fxremat.cost.allocator.caching import CachingAllocator
from fxremat.cost.allocator.device import Entry
from fxremat.cost.allocator.errors import OutOfMemory
from fxremat.cost.allocator.replay import Allocate, EmptyCache, Event, Free, Usage, replay
from fxremat.cost.allocator.settings import AllocatorSettings
from fxremat.cost.allocator.settings_text import parse_settings, settings_of_environment
from fxremat.cost.allocator.snapshot import Comparison, Recording, compare, from_snapshot

__all__ = [
    "Allocate",
    "AllocatorSettings",
    "CachingAllocator",
    "Comparison",
    "EmptyCache",
    "Entry",
    "Event",
    "Free",
    "OutOfMemory",
    "Recording",
    "Usage",
    "compare",
    "from_snapshot",
    "parse_settings",
    "replay",
    "settings_of_environment",
]
