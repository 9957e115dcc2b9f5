"""Bytes that torch's CUDA caching allocator reserves for a sequence of allocations."""

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator.caching import CachingAllocator
from fxremat.memory.allocator.device import Entry
from fxremat.memory.allocator.errors import OutOfMemory
from fxremat.memory.allocator.replay import Usage, replay
from fxremat.memory.allocator.settings import AllocatorSettings
from fxremat.memory.allocator.settings_text import parse_settings, settings_of_environment
from fxremat.memory.allocator.snapshot import Comparison, Recording, compare, from_snapshot

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
