"""The allocator of recorded loops: its cache is emptied where theirs was.

Every segment goes back that holds no block in use, and every page of an expandable one that no
block touches. Source: torch, c10/cuda/CUDACachingAllocator.cpp (`release_block`, `unmap_block`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator import CachingAllocator
from fxremat.memory.allocator_blocks import AddressSpace, Block, Device, Pool
from fxremat.memory.allocator_settings import round_up


class Allocator(CachingAllocator):
    """One whose cache can be emptied, and looked at."""

    def free_blocks(self) -> list[tuple[int, int, int, bool]]:
        """Every free block: its stream, bytes, address, and whether it is of the small pool."""
        return [
            (block.stream, block.nbytes, block.address, pool.small)
            for pool in (self._small, self._large)
            for block in pool.free_blocks()
        ]

    def empty_cache(self) -> None:
        """Gives back every segment, and every page, that holds no block in use."""
        for pool in (self._large, self._small):
            for block in pool.free_blocks():
                if block.space is None and not block.is_split:
                    pool.remove(block)
                    self._device.take(-block.nbytes)
            for block in pool.free_blocks():
                if block.space is not None:
                    _unmap(self._device, pool, block, block.space)


def apply_events(allocator: Allocator, events: Iterable[Event]) -> Iterator[None]:
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


def _unmap(device: Device, pool: Pool, block: Block, space: AddressSpace) -> None:
    """Takes the memory from the pages that lie in ``block`` whole; the rest stays free."""
    end = block.address + block.nbytes - space.address
    first = round_up(block.address - space.address, space.page)
    removed = end // space.page * space.page - first
    if removed <= 0:
        return
    pool.remove(block)
    before = space.address + first - block.address
    if before > 0:
        head, block = block, block.cut(before)
        pool.add(head)
    if removed < block.nbytes:
        pool.add(block.cut(removed))
    device.take(-removed)
    block.mapped = False
    block = pool.merge(block)
    if block.is_split:
        pool.add(block)
