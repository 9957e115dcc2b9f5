"""Expandable segments: one range of addresses for a pool and a stream, mapped page by page.

New memory goes to the lowest addresses at which the request has room in free blocks and unmapped
pages side by side, so that holes are filled first. Where the cache is emptied, every page that no
block touches is unmapped. Source: torch, c10/cuda/CUDACachingAllocator.cpp (`ExpandableSegment`,
`find_expandable_block`, `map_block`, `unmap_block`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.memory.allocator.blocks import AddressSpace, Block, Device, Pool
from fxremat.memory.allocator.rules import SMALL_SEGMENT_BYTES, round_up
from fxremat.sizes import TIB

_SPACE_BYTES = 64 * TIB


def _has_room(block: Block, nbytes: int) -> bool:
    """Whether ``nbytes`` fit into ``block`` and the free or unmapped ones behind it."""
    room = 0
    at: Block | None = block
    while at is not None and not at.allocated and room < nbytes:
        room += at.nbytes
        at = at.after
    return room >= nbytes


@dataclass(eq=False)
class ExpandableSegments:
    """All expandable segments of an allocator; ``count`` of them exist."""

    device: Device
    large_page: int
    count: int = 0

    def allocate(self, pool: Pool, stream: int, nbytes: int) -> Block:
        """A free block of at least ``nbytes``, in no pool."""
        block = self._lowest_room(pool, stream, nbytes) or self._new_segment(pool, stream, nbytes)
        if not block.mapped:
            block = self._map(pool, block, min(block.nbytes, nbytes))
        while block.nbytes < nbytes:
            hole = block.after
            assert hole is not None
            block = self._map(pool, hole, min(hole.nbytes, nbytes - block.nbytes))
        pool.remove(block)
        return block

    def release(self, pool: Pool) -> None:
        """Unmaps each page of ``pool`` that lies in a free block."""
        for block in pool.free_blocks():
            if block.space is not None:
                self._unmap(pool, block, block.space)

    def _lowest_room(self, pool: Pool, stream: int, nbytes: int) -> Block | None:
        """Where ``nbytes`` fit at the lowest address; a free block before unmapped pages counts."""
        for hole in pool.unmapped(stream):
            before = hole.before
            first = before if before is not None and not before.allocated else hole
            if _has_room(first, nbytes):
                return first
        return None

    def _new_segment(self, pool: Pool, stream: int, least_bytes: int) -> Block:
        """More addresses than any device has bytes, so that holes do not use them up."""
        page = SMALL_SEGMENT_BYTES if pool.small else self.large_page
        nbytes = round_up(max(_SPACE_BYTES, least_bytes), page)
        space = AddressSpace(self.device.addresses(nbytes, page), nbytes, page)
        block = Block(space.address, nbytes, stream, space, mapped=False)
        pool.add(block)
        self.count += 1
        return block

    def _map(self, pool: Pool, hole: Block, nbytes: int) -> Block:
        """Gives memory to the first ``nbytes`` of ``hole``, in whole pages."""
        space = hole.space
        assert space is not None
        added = round_up(nbytes, space.page)
        self.device.take(added)
        pool.remove(hole)
        if added < hole.nbytes:
            pool.add(hole.cut(added))
        hole.mapped = True
        block = pool.merge(hole)
        pool.add(block)
        return block

    def _unmap(self, pool: Pool, block: Block, space: AddressSpace) -> None:
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
        self.device.give_back(removed)
        block.mapped = False
        block = pool.merge(block)
        if block.is_split:
            pool.add(block)
        else:
            self.count -= 1
