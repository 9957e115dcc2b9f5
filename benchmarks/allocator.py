"""The allocator of recorded loops: its cache is emptied where theirs was.

Every segment goes back that holds no block in use, and every page of an expandable one that no
block touches. Source: torch, c10/cuda/CUDACachingAllocator.cpp (`release_block`, `unmap_block`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.core.events import Allocate, Event, Free
from fxremat.memory.allocator import CachingAllocator
from fxremat.memory.allocator_blocks import Block, Device, Pool
from fxremat.memory.allocator_settings import AllocatorSettings, round_up


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """torch.cuda.empty_cache() is called."""


HeapEvent = Event | EmptyCache


class Allocator(CachingAllocator):
    """One whose cache can be emptied, and looked at; it knows what callers ask for."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        super().__init__(settings)
        self._asked: dict[int, int] = {}

    @property
    def requested(self) -> int:
        """Bytes that callers have asked for and not freed."""
        return sum(self._asked.values())

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        address = super().allocate(nbytes, stream)
        self._asked[address] = nbytes
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self._asked.pop(address, None)

    def free_blocks(self) -> list[tuple[int, int, int, bool]]:
        """Every free block: its stream, bytes, address, and whether it is of the small pool."""
        return [
            (block.stream, block.nbytes, block.address, pool.small)
            for pool in (self._small, self._large)
            for block in _free_in(pool)
        ]

    def empty_cache(self) -> None:
        """Gives back every segment, and every page, that holds no block in use."""
        for pool in (self._large, self._small):
            for block in _free_in(pool):
                is_split = block.before is not None or block.after is not None
                if block.page is None and not is_split:
                    pool.remove(block)
                    self.take(-block.nbytes)
            for block in _free_in(pool):
                if block.page is not None:
                    _unmap(self, pool, block, block.page)


def apply_events(allocator: Allocator, events: Iterable[HeapEvent]) -> Iterator[None]:
    """Applies one event after the other, yielding after each."""
    address_of: dict[str, int] = {}
    for event in events:
        match event:
            case Allocate(name, nbytes, stream):
                address_of[name] = allocator.allocate(nbytes, stream)
            case Free(name):
                allocator.free(address_of.pop(name))
            case EmptyCache():
                allocator.empty_cache()
        yield


def most_requested(events: Iterable[HeapEvent]) -> int:
    """The most bytes that these events have asked for and not freed at once."""
    live, asked, most = dict[str, int](), 0, 0
    for event in events:
        match event:
            case Allocate(name, nbytes):
                live[name] = nbytes
                asked += nbytes
                most = max(most, asked)
            case Free(name):
                asked -= live.pop(name)
    return most


def _free_in(pool: Pool) -> list[Block]:
    """All free blocks by stream, size and address."""
    return [row[2] for stream in sorted(pool._free) for row in pool._free[stream]]


def _unmap(device: Device, pool: Pool, block: Block, page: int) -> None:
    """Takes the memory from the pages that lie in ``block`` whole; the rest stays free."""
    first = round_up(block.address, page)
    removed = (block.address + block.nbytes) // page * page - first
    if removed <= 0:
        return
    pool.remove(block)
    if first > block.address:
        head, block = block, block.cut(first - block.address)
        pool.add(head)
    if removed < block.nbytes:
        pool.add(block.cut(removed))
    device.take(-removed)
    block.mapped = False
    block = pool.merge(block)
    if block.before is not None or block.after is not None:
        pool.add(block)
