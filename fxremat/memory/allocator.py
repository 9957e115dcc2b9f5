"""A model of torch's CUDA caching allocator: which bytes are reserved for which requests.

A request is rounded, then served by the smallest free block of its pool and stream that holds it.
Where there is none, a segment is taken from the device. Source: torch 2.11 to 2.14,
c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `alloc_block`, `alloc_found_block`,
`free_block`).

Not modelled: a cache that is emptied, as where a device is full; blocks that wait for
another stream (record_stream), private pools of CUDA graphs, and the addresses that cudaMalloc
chooses. What the CUDA context and libraries hold is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxremat.core.events import Allocate, Event, Free
from fxremat.memory.allocator_blocks import Block, Device, Pool
from fxremat.memory.allocator_settings import (
    LARGEST_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    is_worth_splitting,
    round_request,
    segment_bytes_for,
)


class CachingAllocator(Device):
    """The allocator of a device, which never runs out.

    ``allocated`` and ``reserved`` are bytes as torch.cuda.memory_allocated and memory_reserved
    count them.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or AllocatorSettings()
        self.allocated = self.peak_allocated_bytes = 0
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._live: dict[int, tuple[Pool, Block]] = {}

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block for ``nbytes``; 0, and no block, for none."""
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"cannot allocate {nbytes} bytes; ask for 0 or more")
            return 0
        rounded = round_request(nbytes, self.settings)
        pool = self._small if rounded <= LARGEST_SMALL_BYTES else self._large
        block = _best_fit(pool, stream, rounded)
        if block is not None and self._may_serve(block.nbytes, rounded):
            pool.remove(block)
        else:
            block = self._new(pool, stream, rounded)
        if is_worth_splitting(block.nbytes, rounded, pool.small, self.settings):
            pool.add(block.cut(rounded))
        block.allocated = True
        self._live[block.address] = pool, block
        self.allocated += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Frees what `allocate` returned; raises `ValueError` where nothing lives there."""
        if address == 0:
            return
        if address not in self._live:
            raise ValueError(f"nothing is allocated at {address:#x}; free each address once")
        pool, block = self._live.pop(address)
        self.allocated -= block.nbytes
        block.allocated = False
        pool.add(pool.merge(block))

    def _may_serve(self, free: int, rounded: int) -> bool:
        """Whether oversize blocks, which are not split, are kept for requests of their size."""
        if not self.settings.is_oversize(rounded):
            return not self.settings.is_oversize(free)
        return free < rounded + self.settings.max_non_split_rounding

    def _new(self, pool: Pool, stream: int, rounded: int) -> Block:
        """A block in a new segment or in new pages, in no pool."""
        if self.settings.expandable_segments:
            page = SMALL_SEGMENT_BYTES if pool.small else self.settings.large_segment
            return self.allocate_pages(pool, stream, rounded, page)
        nbytes = segment_bytes_for(rounded, self.settings)
        self.take(nbytes)
        return Block(self.addresses(nbytes), nbytes, stream)


def _best_fit(pool: Pool, stream: int, rounded: int) -> Block | None:
    """The smallest free block that holds ``rounded`` bytes, the lowest of its size.

    A block that can grow counts with what it can grow to, so that the next in size goes first
    where it can grow less.
    """
    fitting = pool.at_least(stream, rounded)
    best = next(fitting, None)
    if best is None or best.page is None:
        return best
    for block in fitting:
        if block.reach >= best.reach:
            break
        best = block
    return best


@dataclass(frozen=True)
class Usage:
    """What a trace needs of the device, at most."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int


def replay(events: Iterable[Event], settings: AllocatorSettings | None = None) -> Usage:
    """The peaks of a trace that starts with an empty allocator, and never empties its cache.

    Raises `ValueError` for a name that is allocated twice, or freed without being allocated.
    """
    allocator, address_of = CachingAllocator(settings), dict[str, int]()
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
    return Usage(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
