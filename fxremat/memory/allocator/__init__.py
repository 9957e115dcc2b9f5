"""Bytes that torch's CUDA caching allocator reserves for a sequence of allocations."""

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator.caching import CachingAllocator
from fxremat.memory.allocator.replay import Usage, replay
from fxremat.memory.allocator.settings import (
    AllocatorSettings,
    parse_settings,
    settings_of_environment,
)

__all__ = [
    "Allocate",
    "AllocatorSettings",
    "CachingAllocator",
    "EmptyCache",
    "Event",
    "Free",
    "Usage",
    "parse_settings",
    "replay",
    "settings_of_environment",
]
