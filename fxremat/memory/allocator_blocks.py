"""Blocks of device memory, the pools that hold those that are free, and the device itself.

A segment is a chain of blocks, linked in the order of their addresses. Free blocks of a pool are
ordered by stream, size and address, as in torch (c10/cuda/CUDACachingAllocator.cpp, `BlockPool`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fxremat.memory.allocator_settings import round_up
from fxremat.sizes import MIB, TIB


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment: allocated, free, or (``mapped`` false) addresses without memory.

    An expandable segment is mapped in pages of so many bytes; others have no ``page``.
    """

    address: int
    nbytes: int
    stream: int
    page: int | None = None
    mapped: bool = True
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def reach(self) -> int:
        """Bytes that the block can grow to: its own, and addresses without memory behind it."""
        after = self.after
        return self.nbytes + (after.nbytes if after is not None and not after.mapped else 0)

    def cut(self, nbytes: int) -> Block:
        """Shortens the block to ``nbytes``; the rest, of the same kind, becomes its neighbour."""
        rest = Block(
            self.address + nbytes, self.nbytes - nbytes, self.stream, self.page, self.mapped
        )
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.nbytes = nbytes
        return rest

    def absorb_after(self) -> None:
        """Takes over the bytes of the block behind it, which is gone after that."""
        gone = self.after
        assert gone is not None
        self.nbytes += gone.nbytes
        self.after = gone.after
        if gone.after is not None:
            gone.after.before = self


_Row = tuple[int, int, Block]
"""A block after what its pool orders it by: size and address, of unmapped ones the address only."""


def _row(block: Block) -> _Row:
    return block.nbytes if block.mapped else 0, block.address, block


@dataclass(eq=False)
class Pool:
    """The free blocks of one pool, and addresses without memory, by stream."""

    small: bool
    _free: defaultdict[int, list[_Row]] = field(default_factory=lambda: defaultdict(list))
    _unmapped: defaultdict[int, list[_Row]] = field(default_factory=lambda: defaultdict(list))

    def _rows(self, block: Block) -> list[_Row]:
        return (self._free if block.mapped else self._unmapped)[block.stream]

    def add(self, block: Block) -> None:
        """Puts in a free block, or addresses without memory."""
        insort(self._rows(block), _row(block))

    def remove(self, block: Block) -> None:
        """Takes a block out; it has to have the size and the address that it was put in with."""
        rows = self._rows(block)
        del rows[bisect_left(rows, _row(block)[:2])]

    def at_least(self, stream: int, nbytes: int) -> Iterator[Block]:
        """Free blocks of ``stream`` with ``nbytes`` or more, smallest first."""
        rows = self._free[stream]
        return (rows[index][2] for index in range(bisect_left(rows, (nbytes,)), len(rows)))

    def unmapped(self, stream: int) -> list[Block]:
        """Addresses of ``stream`` without memory, lowest first."""
        return [row[2] for row in self._unmapped[stream]]

    def merge(self, block: Block) -> Block:
        """``block``, which is not in the pool, together with free neighbours of its kind."""
        after, before = block.after, block.before
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self.remove(after)
            block.absorb_after()
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self.remove(before)
            before.absorb_after()
            return before
        return block


@dataclass(eq=False)
class Device:
    """Memory without end, of which so many bytes are ``reserved``, and were at most.

    Addresses grow and are never used twice, which cudaMalloc does not promise. They matter where
    two free blocks have the same size: the lower one is taken.
    """

    reserved: int = 0
    peak_reserved_bytes: int = 0
    _next_address: int = 1 << 40

    def take(self, nbytes: int) -> None:
        """So many bytes more; fewer if negative."""
        self.reserved += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved)

    def addresses(self, nbytes: int, multiple: int = 2 * MIB) -> int:
        """The first of ``nbytes`` addresses that nothing else has; a multiple of the step."""
        address = round_up(self._next_address, multiple)
        self._next_address = address + nbytes + multiple
        return address

    def allocate_pages(self, pool: Pool, stream: int, nbytes: int, page: int) -> Block:
        """A free block of at least ``nbytes`` in an expandable segment, in no pool.

        Such a segment is one range of addresses for a pool and a stream, mapped page by page. New
        memory goes to the lowest addresses at which the request has room in free blocks and
        unmapped pages side by side, so that holes are filled first. Source: torch,
        c10/cuda/CUDACachingAllocator.cpp (`ExpandableSegment`, `find_expandable_block`,
        `map_block`).
        """
        block = _lowest_room(pool, stream, nbytes) or self._new_segment(pool, stream, nbytes, page)
        if not block.mapped:
            block = self._map(pool, block, min(block.nbytes, nbytes))
        while block.nbytes < nbytes:
            hole = block.after
            assert hole is not None
            block = self._map(pool, hole, min(hole.nbytes, nbytes - block.nbytes))
        pool.remove(block)
        return block

    def _new_segment(self, pool: Pool, stream: int, least_bytes: int, page: int) -> Block:
        """More addresses than any device has bytes, so that holes do not use them up."""
        nbytes = round_up(max(_SPACE_BYTES, least_bytes), page)
        block = Block(self.addresses(nbytes, page), nbytes, stream, page, mapped=False)
        pool.add(block)
        return block

    def _map(self, pool: Pool, hole: Block, nbytes: int) -> Block:
        """Gives memory to the first ``nbytes`` of ``hole``, in whole pages."""
        assert hole.page is not None
        added = round_up(nbytes, hole.page)
        self.take(added)
        pool.remove(hole)
        if added < hole.nbytes:
            pool.add(hole.cut(added))
        hole.mapped = True
        block = pool.merge(hole)
        pool.add(block)
        return block


_SPACE_BYTES = 64 * TIB


def _has_room(block: Block, nbytes: int) -> bool:
    """Whether ``nbytes`` fit into ``block`` and the free or unmapped ones behind it."""
    room = 0
    at: Block | None = block
    while at is not None and not at.allocated and room < nbytes:
        room += at.nbytes
        at = at.after
    return room >= nbytes


def _lowest_room(pool: Pool, stream: int, nbytes: int) -> Block | None:
    """Where ``nbytes`` fit at the lowest address; a free block before unmapped pages counts."""
    for hole in pool.unmapped(stream):
        before = hole.before
        first = before if before is not None and not before.allocated else hole
        if _has_room(first, nbytes):
            return first
    return None
